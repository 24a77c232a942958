"""Compares training losses with gradients in 32 and in 16 bits.

    .venv/bin/python benchmarks/gradient_types.py [--steps 500] [--markdown docs/exactness.md]

A transformer learns to continue the source code of Python's standard library, and a convolutional
network learns scikit-learn's digits, each on two workers. The table shows the mean loss of the last
50 steps with each type, and with another seed of the weights, for comparison.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from clusters import outputs_of_tasks
from fit_speed import PROGRAMS
from report import closing_line, put_into

MARKERS = ("<!-- gradient_types begin -->", "<!-- gradient_types end -->")
MODELS = {"transformer": "4-layer transformer", "convolutional": "convolutional network"}
# column -> (gradient_dtype, seed of the weights)
RUNS = {
    "float32": ("", 1),
    "bfloat16": ("bfloat16", 1),
    "float16": ("float16", 1),
    "float32, another seed": ("", 2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--markdown", type=Path, help="also write the table into this page")
    arguments = parser.parse_args()
    lines = [f"| loss | {' | '.join(RUNS)} |", "|---" * (1 + len(RUNS)) + "|"]
    for model, title in MODELS.items():
        cells = [title]
        for name, (dtype, seed) in RUNS.items():
            losses = losses_of(model, dtype, seed, arguments.steps)
            cells.append(f"{sum(losses[-50:]) / 50:.4f}")
            print(f"{title}, {name}: {cells[-1]} (first step {losses[0]:.4f})", flush=True)
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(["", *lines, *closing_line(1)])
    print(text)
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def losses_of(model: str, dtype: str, seed: int, steps: int) -> list[float]:
    """The loss of each step."""
    program = str(PROGRAMS / "gradient_types.py")
    command = [sys.executable, program, model, dtype, str(seed), str(steps)]
    status, outputs = outputs_of_tasks(command, workers=2)
    log = outputs["worker-0"]
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed: status {status}\n{log[-3000:]}")
    (text,) = re.findall(r"^losses (.*)$", log, re.MULTILINE)
    return list(map(float, json.loads(text)))


if __name__ == "__main__":
    raise SystemExit(main())
