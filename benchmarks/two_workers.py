"""Short trainings on two workers: fit beside a loop by hand, in turn in the same processes.

    .venv/bin/python benchmarks/two_workers.py [--rounds 21] [--markdown docs/performance.md]

What differs from process to process on a busy machine is more than what is to be measured; so both
train in one pair of processes, and change places each round. Compared are medians over the rounds,
with the smallest and the largest; the ratio is the median of those of the rounds.
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
# title -> (model, rows of a global batch, steps of a training)
SETTINGS = {
    "MLP, 256 steps": (MLP, 64, 256),
    "MLP, 1,024 steps": (MLP, 64, 1024),
    "transformer, 32 steps": (TRANSFORMER, 32, 32),
    "transformer, 128 steps": (TRANSFORMER, 32, 128),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    lines = ["", "| 2 workers | fit, steps/s | by hand, steps/s | of by hand |"]
    lines.append("|---|---|---|---|")
    for title, setting in SETTINGS.items():
        rounds = measure(*setting, arguments.rounds)
        ratios = statistics.median(each["fit"] / each["by hand"] for each in rounds)
        cells = []
        for what in ("fit", "by hand"):
            speeds = [each[what] for each in rounds]
            spread = f"({min(speeds):.0f} to {max(speeds):.0f})"
            cells.append(f"{statistics.median(speeds):.1f} {spread}")
        lines.append(f"| {title} | {' | '.join(cells)} | {ratios:.2f} x |")
        print(lines[-1], flush=True)
    text = "\n".join(lines + closing_line(arguments.rounds))
    print(text)
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def measure(model: str, rows: int, steps: int, rounds: int) -> list[dict[str, float]]:
    """Steps/s of each contestant, for each round, as the first worker sees them."""
    command = [sys.executable, str(PROGRAM), model, *map(str, (rows, steps, rounds))]
    status, outputs = outputs_of_tasks(command, workers=2)
    if status:
        raise SystemExit(f"{' '.join(command)} failed: status {status}")
    (line,) = (line for line in outputs["worker-0"].splitlines() if line.startswith("[{"))
    found: list[dict[str, float]] = json.loads(line)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
