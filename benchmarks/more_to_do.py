"""What more metrics, weights of samples or classes, and validation cost a step of fit.

    .venv/bin/python benchmarks/more_to_do.py [--rounds 11] [--markdown docs/performance.md]

The model is a small MLP: a step takes about a millisecond. One process trains it on one device, and
one on 4 logical CPUs. In each the contestants take turns, so that a slow moment of the machine hits
all of them. Compared are medians over the rounds, with the smallest and the largest.
Validation counts by the training steps beside it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from report import closing_line, measured_in_turn, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "more_to_do.py"
MARKERS = ("<!-- more_to_do begin -->", "<!-- more_to_do end -->")
ROWS, STEPS = 64, 1024
DEVICES = {1: "one device", 4: "mirrored on 4 logical CPUs"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    arguments = parser.parse_args()
    lines = []
    for replicas, title in DEVICES.items():
        rounds = measured_in_turn(PROGRAM, replicas, ROWS, STEPS, arguments.rounds)
        lines += ["", f"| {title} | ms a step | of plain |", "|---|---|---|"]
        for what in rounds[0]:
            times = [each[what] for each in rounds]
            ratio = statistics.median(each[what] / each["plain"] for each in rounds)
            spread = f"{min(times):.2f} to {max(times):.2f}"
            lines.append(f"| {what} | {statistics.median(times):.2f} ({spread}) | {ratio:.2f} x |")
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(text)
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
