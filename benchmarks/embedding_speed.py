"""Compares the speed of an embedding on parameter servers with the alternatives.

    .venv/bin/python benchmarks/embedding_speed.py [--rounds 3] [--markdown docs/performance.md]

The model is Embedding(rows, 32) and Dense(1), with SGD and batches of 256. It trains on a chief,
two workers and two parameter servers, all on this machine. Each round runs each method once, so
that a slow minute of the machine affects all of them. The table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

from clusters import output_of_chief
from fit_speed import LEGACY_PYTHON, PROGRAMS, prepare_legacy
from report import closing_line, put_into, table

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
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    lines = table("1M rows of 32, 2 workers, 2 ps", medians, OURS)
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(f"\n{text}")
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def measure(command: list[str]) -> float:
    """Steps a second that the chief of a cluster with two workers and two servers prints."""
    status, log = output_of_chief(command, workers=2, ps=2)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed: status {status}\n{log[-3000:]}")
    return float(re.findall(r"steps/s ([\d.]+)", log)[-1])


if __name__ == "__main__":
    raise SystemExit(main())
