"""Steps a second of an embedding on parameter servers, beside what a user would pick instead.

    .venv/bin/python benchmarks/embedding_speed.py [--rounds 3] [--markdown docs/performance.md]

Embedding(rows, 32) and Dense(1), sgd, batches of 256, two workers and two parameter servers: five
processes on this machine. Every round runs every contestant once, so that a slow minute of the
machine hits all of them. Compared are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from fit_speed import LEGACY_PYTHON, PROGRAMS, prepare_legacy

from tfdist_ext.launch import addresses_needed, plan_local, reserve_ports, run_plan

MILLION = 1_000_000
MARKERS = ("<!-- embedding_speed begin -->", "<!-- embedding_speed end -->")
OURS = "tfdist_ext fit"

# name -> (interpreter, program, rows of the table, steps of an epoch, epochs): 3 to 20 seconds each
CONTESTANTS: dict[str, tuple[str, str, int, int, int]] = {
    OURS: (sys.executable, "embedding_fit.py", MILLION, 1000, 5),
    "hand-written ClusterCoordinator loop": (
        sys.executable, "embedding_hand_loop.py", MILLION, 1000, 5,
    ),
    "tf_keras fit": (LEGACY_PYTHON, "embedding_tf_keras.py", MILLION, 100, 2),
    f"{OURS}, 10k rows": (sys.executable, "embedding_fit.py", 10_000, 1000, 5),
    f"{OURS}, 100k rows": (sys.executable, "embedding_fit.py", 100_000, 1000, 5),
    f"{OURS}, 4M rows": (sys.executable, "embedding_fit.py", 4 * MILLION, 1000, 5),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    prepare_legacy()
    speeds: dict[str, list[float]] = {}
    for turn in range(arguments.rounds):
        for name, (python, program, *numbers) in CONTESTANTS.items():
            speed = measure([python, str(PROGRAMS / program), *map(str, numbers)])
            speeds.setdefault(name, []).append(speed)
            print(f"round {turn + 1}: {name}: {speed:.1f} steps/s", flush=True)
    text = table({name: statistics.median(each) for name, each in speeds.items()}, arguments.rounds)
    print(f"\n{text}")
    if arguments.markdown:
        page = arguments.markdown.read_text(encoding="utf-8")
        begin, end = (page.index(marker) for marker in MARKERS)
        page = f"{page[: begin + len(MARKERS[0])]}\n{text}\n{page[end:]}"
        arguments.markdown.write_text(page, encoding="utf-8")
    return 0


def measure(command: list[str]) -> float:
    """Steps a second that the chief of a cluster with two workers and two servers prints."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        reserve_ports(addresses_needed(workers=2, ps=2)) as ports,
    ):
        plan = plan_local(command, workers=2, ps=2, ports=ports, log_dir=folder, env=env)
        result = run_plan(plan, env=env, stream=nowhere, grace=1, linger=0, timeout=600)
        log = (Path(folder) / "chief-0.log").read_text()
    if result.exit_status != 0:
        raise SystemExit(f"{' '.join(command)} failed: status {result.exit_status}\n{log[-3000:]}")
    return float(re.findall(r"steps/s ([\d.]+)", log)[-1])


def table(medians: dict[str, float], rounds: int) -> str:
    lines = ["", "| 1M rows of 32, 2 workers, 2 ps | steps/s | tfdist_ext is |", "|---|---|---|"]
    for name, median in medians.items():
        ratio = "" if name == OURS else f"{medians[OURS] / median:.2f} x as fast"
        lines.append(f"| {name} | {median:.0f} | {ratio} |")
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("tensorflow", "keras"))
    lines += ["", f"Medians of {rounds} rounds; {versions}, Python {platform.python_version()},"
              f" {os.cpu_count()} cores."]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
