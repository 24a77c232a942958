"""Compares the speed of an embedding on parameter servers with the alternatives.

    .venv/bin/python benchmarks/embedding_speed.py [--rounds 3] [--markdown docs/performance.md]

The model is Embedding(rows, 32) and Dense(1), with batches of 256, and SGD unless the name says
otherwise. It trains on a chief, two workers and two parameter servers, all on this machine. Each
round runs each method once, so that a slow minute of the machine affects all of them. The table
shows medians over the rounds, and the largest peak memory of a server.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

from clusters import outputs_of_tasks
from fit_speed import LEGACY_PYTHON, PROGRAMS, prepare_legacy
from report import closing_line, put_into, table

MILLION = 1_000_000
MARKERS = ("<!-- embedding_speed begin -->", "<!-- embedding_speed end -->")
OURS = "tfdist_ext fit"

# name -> (interpreter, program, rows of the table, steps of an epoch, epochs, optimizer of ours):
# 3 to 20 seconds each
CONTESTANTS: dict[str, tuple[str | int, ...]] = {
    OURS: (sys.executable, "embedding_fit.py", MILLION, 1000, 5),
    "hand-written ClusterCoordinator loop": (
        sys.executable, "embedding_hand_loop.py", MILLION, 1000, 5,
    ),
    "tf_keras fit": (LEGACY_PYTHON, "embedding_tf_keras.py", MILLION, 100, 2),
    f"{OURS}, 10k rows": (sys.executable, "embedding_fit.py", 10_000, 1000, 5),
    f"{OURS}, 100k rows": (sys.executable, "embedding_fit.py", 100_000, 1000, 5),
    f"{OURS}, 4M rows": (sys.executable, "embedding_fit.py", 4 * MILLION, 1000, 5),
    f"{OURS}, Adagrad": (sys.executable, "embedding_fit.py", MILLION, 50, 2, "adagrad"),
    f"{OURS}, Adam": (sys.executable, "embedding_fit.py", MILLION, 50, 2, "adam"),
    f"{OURS}, Adam, 4M rows": (sys.executable, "embedding_fit.py", 4 * MILLION, 20, 2, "adam"),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    prepare_legacy()
    speeds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    for turn in range(arguments.rounds):
        for name, (python, program, *words) in CONTESTANTS.items():
            command = [str(python), str(PROGRAMS / str(program)), *map(str, words)]
            speed, peak = measure(command)
            speeds.setdefault(name, []).append(speed)
            memory[name] = max(peak, memory.get(name, 0))
            print(f"round {turn + 1}: {name}: {speed:.1f} steps/s, {peak} MiB", flush=True)
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    title = "1M rows of 32, 2 workers, 2 ps"
    shown = {name: f"{peak:,}" for name, peak in memory.items()}
    lines = table(title, medians, OURS, MiB_of_a_server=shown)
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def measure(command: list[str]) -> tuple[float, int]:
    """(steps a second, peak memory of a server in MiB), with two workers and two servers."""
    status, outputs = outputs_of_tasks(command, workers=2, ps=2)
    log = outputs["chief-0"]
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed: status {status}\n{log[-3000:]}")
    peaks = re.findall(r"^peak MiB (\d+)$", outputs["ps-0"] + outputs["ps-1"], re.MULTILINE)
    return float(re.findall(r"steps/s ([\d.]+)", log)[-1]), max(map(int, peaks))


if __name__ == "__main__":
    raise SystemExit(main())
