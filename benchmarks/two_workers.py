"""Short trainings on two workers: fit beside a loop by hand, in turn in the same processes.

    .venv/bin/python benchmarks/two_workers.py [--rounds 21] [--markdown docs/performance.md]

What differs from process to process on a busy machine is more than what is to be measured; so both
train in one pair of processes, and change places each round. Compared are medians over the rounds,
with the smallest and the largest; the ratio is the median of those of the rounds. "Steps alone" is
what the long training takes longer than the short one, without what begins and ends them.
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
MLP, TRANSFORMER = "MLP 64-256-10", "4-layer transformer, d=128"
TABLES = "26 tables of 1,000 x 16"
# model, rows of a global batch, steps of a short and of a long training
SETTINGS = [(MLP, 64, 256, 1024), (TRANSFORMER, 32, 32, 128), (TABLES, 128, 32, 128)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    lines = ["", "| 2 workers | fit, steps/s | by hand, steps/s | of by hand |"]
    lines.append("|---|---|---|---|")
    for model, rows, short, long in SETTINGS:
        rounds = measure(model, rows, arguments.rounds, short, long)
        for steps in (short, long):
            speeds = [{w: steps / t for w, t in each[str(steps)].items()} for each in rounds]
            lines.append(line_of(f"{model}, {steps:,} steps", speeds))
        alone = [
            {w: (long - short) / (t - each[str(short)][w]) for w, t in each[str(long)].items()}
            for each in rounds
        ]
        lines.append(line_of(f"{model}, steps alone", alone))
        print("\n".join(lines[-3:]), flush=True)
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(text)
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def line_of(title: str, rounds: list[dict[str, float]]) -> str:
    """A line of the table, of the steps/s of each contestant in each round."""
    ratio = statistics.median(each["fit"] / each["by hand"] for each in rounds)
    cells = []
    for what in ("fit", "by hand"):
        speeds = [each[what] for each in rounds]
        spread = f"({min(speeds):.0f} to {max(speeds):.0f})"
        cells.append(f"{statistics.median(speeds):.1f} {spread}")
    return f"| {title} | {' | '.join(cells)} | {ratio:.2f} x |"


def measure(
    model: str, rows: int, rounds: int, short: int, long: int
) -> list[dict[str, dict[str, float]]]:
    """For each round and number of steps, the seconds of each contestant in the first worker."""
    command = [sys.executable, str(PROGRAM), model, *map(str, (rows, rounds, short, long))]
    status, outputs = outputs_of_tasks(command, workers=2)
    if status:
        raise SystemExit(f"{' '.join(command)} failed: status {status}")
    (line,) = (line for line in outputs["worker-0"].splitlines() if line.startswith("[{"))
    found: list[dict[str, dict[str, float]]] = json.loads(line)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
