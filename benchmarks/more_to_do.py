"""Measures what metrics, sample weights, class weights and validation cost a step.

    .venv/bin/python benchmarks/more_to_do.py [--rounds 24] [--markdown docs/performance.md]

The program trains a small MLP, whose steps take less than a millisecond on one device, and a
transformer. Keras's own `fit` trains the MLP, too. Each process trains one model under one
strategy. The trainings with and without the additional work take turns in it, each with a new
model, so that a slow moment of the machine affects all of them. The tables show the median, the
smallest and the largest figure. The time of validation is divided by the number of training steps.
The program takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from report import closing_line, measured_in_turn, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "more_to_do.py"
MARKERS = ("<!-- more_to_do begin -->", "<!-- more_to_do end -->")
MLP, TRANSFORMER = "MLP 64-256-10", "4-layer transformer, d=128"
# Title: (model, replicas, rows of a global batch, steps of an epoch), share of the rounds.
CONTESTS = {
    f"{MLP}, Keras's own fit": ((MLP, 0, 64, 512), 1.0),
    f"{MLP}, one device": ((MLP, 1, 64, 512), 1.0),
    f"{MLP}, mirrored on 4 logical CPUs": ((MLP, 4, 64, 512), 1.0),
    f"{TRANSFORMER}, mirrored on 4 logical CPUs, a quarter of the rounds": (
        (TRANSFORMER, 4, 32, 24),
        0.25,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    arguments = parser.parse_args()
    lines = []
    for title, (contest, share) in CONTESTS.items():
        rounds = measured_in_turn(PROGRAM, *contest, max(1, round(share * arguments.rounds)))
        lines += ["", f"| {title} | ms per step | relative to plain |", "|---|---|---|"]
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
