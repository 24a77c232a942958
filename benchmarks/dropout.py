"""Measures the cost of exact dropout, where each replica draws its rows of the mask.

    .venv/bin/python benchmarks/dropout.py [--rounds 21] [--markdown docs/performance.md]

A small transformer trains on logical CPUs, alternately with the exact mask and with one mask for
all replicas. Both run in one process, so that a slow moment of the machine affects both. The table
shows the median, the smallest and the largest figure.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from report import closing_line, measured_in_turn, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "dropout.py"
MARKERS = ("<!-- dropout begin -->", "<!-- dropout end -->")
STEPS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    columns = "mirrored on | masks | ms per step | relative to one mask"
    lines = ["", f"| {columns} |", "|---|---|---|---|"]
    for replicas in (2, 4):
        rounds = measured_in_turn(PROGRAM, replicas, STEPS, arguments.rounds)
        first = next(iter(rounds[0]))
        for what in rounds[0]:
            times = [each[what] for each in rounds]
            ratio = statistics.median(each[what] / each[first] for each in rounds)
            spread = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
            lines.append(f"| {replicas} logical CPUs | {what} | {spread} | {ratio:.3f} x |")
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(text)
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
