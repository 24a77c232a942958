"""Compares `fit` of large dense models on several workers with the alternatives.

    .venv/bin/python benchmarks/large_models.py [--rounds 3] [--markdown docs/performance.md]
    .venv/bin/python benchmarks/large_models.py --traffic [--markdown docs/performance.md]

Each round runs each method once, in separate processes. The tables show the median, the smallest
and the largest figure, and the median of the ratios of all rounds. If a step of `fit` did not
overlap computation with communication, it would take as long as the sum of the gradients plus a
step without sums.

With --traffic, each worker runs in its own network namespace, and the program counts the bytes that
the worker sends. It does not measure speed.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from clusters import outputs_in_namespaces, outputs_of_tasks
from fit_speed import LEGACY_PYTHON, prepare_legacy
from report import closing_line, put_into

PROGRAM = Path(__file__).resolve().parent / "programs" / "large_models.py"
MARKERS = ("<!-- large_models begin -->", "<!-- large_models end -->")
HAND = "hand-written loop"
WAYS = ("fit", "sharded", "one pack", HAND, "tf_keras", "collectives", "alone")
TRAFFIC_MARKERS = ("<!-- traffic begin -->", "<!-- traffic end -->")
TITLES = {
    "sharded": "fit, `shard_optimizer=True`",
    "narrow": 'fit, `gradient_dtype="bfloat16"`',
    "one pack": "fit, `bucket_bytes=0`",
    "collectives": "only the sum of the gradients",
    "alone": "a step without sums",
}
MEASURED = re.compile(
    r"^steps/s ([\d.]+)\npeak MB (\d+)\noptimizer MB ([\d.]+)\nsent MB ([\d.]+)$", re.M
)
# model, optimizer, rows of a global batch, steps of an epoch
SETTINGS = [
    ("Dense 5000x5000", "sgd", 64, 12),
    ("Dense 5000x5000", "adam", 64, 12),
    ("ResNet50", "adam", 64, 6),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--models", nargs="+", help="begin of a model's name, and its optimizer")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    parser.add_argument("--traffic", action="store_true", help="count bytes sent; needs root")
    arguments = parser.parse_args()
    if arguments.traffic:
        return traffic(arguments)
    if "tf_keras" in arguments.ways:
        prepare_legacy()
    lines: list[str] = []
    for workers in arguments.workers:
        for setting in SETTINGS:
            name = f"{setting[0]}, {setting[1]}"
            if arguments.models and not name.startswith(tuple(arguments.models)):
                continue
            rounds: list[dict[str, Measured]] = []
            for number in range(arguments.rounds):
                order = arguments.ways if number % 2 else arguments.ways[::-1]
                rounds.append({way: measure(way, workers, *setting) for way in order})
            lines += table_of(f"{workers} workers, {name}", rounds, arguments.ways)
            print("\n".join(lines[-len(arguments.ways) - 4 :]), flush=True)
    text = "\n".join(lines + closing_line(arguments.rounds))
    if arguments.markdown:
        put_into(arguments.markdown, MARKERS, text)
    return 0


def traffic(arguments: argparse.Namespace) -> int:
    lines = [
        "",
        "| workers, model | optimizer on one worker, MB | relative to `fit` | sent in a step, MB |"
        " relative to `fit` |",
        "|---|---|---|---|---|",
    ]
    for workers in arguments.workers:
        for model, optimizer, rows, steps in SETTINGS[1:]:
            fit, sharded = (
                measure(way, workers, model, optimizer, rows, steps, run=outputs_in_namespaces)
                for way in ("fit", "sharded")
            )
            lines.append(
                f"| {workers}, {model}, {optimizer} | {sharded.optimizer:.1f}"
                f" | {sharded.optimizer / fit.optimizer:.3f} | {sharded.sent:.1f}"
                f" | {sharded.sent / fit.sent:.3f} |"
            )
            print(lines[-1], flush=True)
    if arguments.markdown:
        put_into(arguments.markdown, TRAFFIC_MARKERS, "\n".join(lines + closing_line(1)))
    return 0


class Measured(NamedTuple):
    """Of one worker, that which has or sends most: steps a second, and megabytes.

    Attributes:
        peak: the most memory of its process.
        optimizer: the variables of its optimizer.
        sent: what it sends in a step, in a network namespace.
    """

    speed: float
    peak: float
    optimizer: float
    sent: float


def measure(
    way: str,
    workers: int,
    model: str,
    optimizer: str,
    rows: int,
    steps: int,
    *,
    run: Callable[..., tuple[int, dict[str, str]]] = outputs_of_tasks,
) -> Measured:
    python = LEGACY_PYTHON if way == "tf_keras" else sys.executable
    command = [python, str(PROGRAM), model, optimizer, way, str(rows), str(steps)]
    status, outputs = run(command, workers=workers)
    found = [MEASURED.search(outputs[f"worker-{number}"]) for number in range(workers)]
    if status or None in found:
        raise SystemExit(f"{' '.join(command)} failed: status {status}\n{outputs['worker-0']}")
    of_each = [Measured(*map(float, each.groups())) for each in found if each is not None]
    print(f"{workers} workers, {model}, {optimizer}, {way}: {of_each[0]}", flush=True)
    return Measured(of_each[0].speed, *(max(each[i] for each in of_each) for i in (1, 2, 3)))


def table_of(title: str, rounds: list[dict[str, Measured]], ways: list[str]) -> list[str]:
    lines = ["", f"| {title} | steps/s | relative to hand-written loop | MB |", "|---|---|---|---|"]
    for way in ways:
        speeds = [each[way].speed for each in rounds]
        spread = f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})"
        of_hand = [each[way].speed / each[HAND].speed for each in rounds if HAND in each]
        ratio = f"{statistics.median(of_hand):.2f} x" if of_hand else ""
        megabytes = statistics.median(each[way].peak for each in rounds)
        lines.append(f"| {TITLES.get(way, way)} | {spread} | {ratio} | {megabytes:.0f} |")
    if {"fit", "collectives", "alone"} <= {*ways}:
        parts = [1 / each["collectives"].speed + 1 / each["alone"].speed for each in rounds]
        times = [1 / each["fit"].speed / part for each, part in zip(rounds, parts, strict=True)]
        lines.append(
            f"| time of fit / time of the two rows above | {statistics.median(times):.2f} x | | |"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
