"""Compares short trainings on two workers: `fit` and a hand-written loop.

    .venv/bin/python benchmarks/two_workers.py [--rounds 21] [--markdown docs/performance.md]
    .venv/bin/python benchmarks/two_workers.py --apart --rounds 3 --markdown docs/performance.md

Without --apart, both methods train alternately in the same pair of processes. Their order changes
each round. On a busy machine, two processes differ more than the two methods do. With --apart, each
method runs in a new pair of processes each round, as a user would start it: `fit` under
`create_strategy()`, and the loop under TensorFlow's own strategy.

The tables show the median, the smallest and the largest figure, and the median of the ratios of all
rounds. "Only steps" divides the additional steps of the long training by its additional time, which
leaves out the start and end of both trainings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from clusters import outputs_of_tasks
from report import closing_line, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "two_workers.py"
MARKERS = ("<!-- two_workers begin -->", "<!-- two_workers end -->")
MARKERS_APART = ("<!-- two_workers_apart begin -->", "<!-- two_workers_apart end -->")
HAND = "hand-written loop"
CONTESTANTS = ("fit", HAND)
MLP, TRANSFORMER = "MLP 64-256-10", "4-layer transformer, d=128"
TABLES = "26 tables of 1,000 x 16"
# model, rows of a global batch, steps of a short and of a long training
SETTINGS = [(MLP, 64, 256, 1024), (TRANSFORMER, 32, 32, 128), (TABLES, 128, 32, 128)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    parser.add_argument("--apart", action="store_true", help="a pair of processes for each")
    arguments = parser.parse_args()
    measured = measure_apart if arguments.apart else measure
    columns = f"fit, steps/s | {HAND}, steps/s | relative to {HAND}"
    lines = ["", f"| 2 workers | {columns} |", "|---|---|---|---|"]
    # The hand-written loop takes 20 s to trace many tables in each new pair of processes.
    for model, rows, short, long in SETTINGS[:2] if arguments.apart else SETTINGS:
        rounds = measured(model, rows, arguments.rounds, short, long)
        for steps in (short, long):
            speeds = [{w: steps / t for w, t in each[str(steps)].items()} for each in rounds]
            lines.append(line_of(f"{model}, {steps:,} steps", speeds))
        alone = [
            {w: (long - short) / (t - each[str(short)][w]) for w, t in each[str(long)].items()}
            for each in rounds
        ]
        lines.append(line_of(f"{model}, only steps", alone))
        print("\n".join(lines[-3:]), flush=True)
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(text)
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS_APART if arguments.apart else MARKERS, text)
    return 0


def line_of(title: str, rounds: list[dict[str, float]]) -> str:
    """A line of the table, of the steps/s of each contestant in each round."""
    ratio = statistics.median(each["fit"] / each[HAND] for each in rounds)
    cells = []
    for what in CONTESTANTS:
        speeds = [each[what] for each in rounds]
        spread = f"({min(speeds):.0f} to {max(speeds):.0f})"
        cells.append(f"{statistics.median(speeds):.1f} {spread}")
    return f"| {title} | {' | '.join(cells)} | {ratio:.2f} x |"


def measure(
    model: str, rows: int, rounds: int, short: int, long: int, *contestants: str
) -> list[dict[str, dict[str, float]]]:
    """For each round and number of steps, the seconds of each contestant in the first worker."""
    which = ",".join(contestants or CONTESTANTS)
    command = [sys.executable, str(PROGRAM), model, which, *map(str, (rows, rounds, short, long))]
    status, outputs = outputs_of_tasks(command, workers=2)
    if status:
        raise SystemExit(f"{' '.join(command)} failed: status {status}")
    (line,) = (line for line in outputs["worker-0"].splitlines() if line.startswith("[{"))
    found: list[dict[str, dict[str, float]]] = json.loads(line)
    return found


def measure_apart(
    model: str, rows: int, rounds: int, short: int, long: int
) -> list[dict[str, dict[str, float]]]:
    """The same, each contestant in processes of its own."""
    found = []
    for number in range(rounds):
        order = CONTESTANTS if number % 2 else CONTESTANTS[::-1]
        alone = [measure(model, rows, 1, short, long, each)[0] for each in order]
        both = {steps: {**alone[0][steps], **alone[1][steps]} for steps in map(str, (short, long))}
        found.append(both)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
