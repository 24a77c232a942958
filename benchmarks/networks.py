"""Compares trainings of several workers on slow networks. Needs root.

    sudo .venv/bin/python benchmarks/networks.py [--rounds 3] [--markdown docs/performance.md]
    sudo .venv/bin/python benchmarks/networks.py --rates 1gbit --models "Dense 5000x5000"

Each worker runs in its own network namespace, and `tc` limits what it sends. All workers share the
cores of this machine, so the figures compare methods on one network, not numbers of workers. Each
round runs each method once. The tables show medians, the megabytes that a worker sends in a step,
and how much of the time of the sums passes during the rest of the step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

from clusters import outputs_in_namespaces
from fit_speed import prepare_legacy
from large_models import HAND, TITLES, Measured, measure
from report import closing_line, put_into

MARKERS = ("<!-- networks begin -->", "<!-- networks end -->")
WAYS = ("fit", "narrow", "sharded", HAND, "tf_keras", "collectives", "alone")
# model -> (rows of a global batch, steps of an epoch)
MODELS = {
    "MLP 64-256-10": (64, 256),
    "4-layer transformer, d=128": (32, 32),
    "Dense 5000x5000": (64, 6),
    "ResNet50": (32, 4),
    "26 tables of 1,000 x 16": (128, 64),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--latency", default="", help="such as 1ms; needs the module sch_netem")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    arguments = parser.parse_args()
    if "tf_keras" in arguments.ways:
        prepare_legacy()
    lines: list[str] = []
    for workers in arguments.workers:
        for model in arguments.models:
            for rate in arguments.rates:
                run = functools.partial(outputs_in_namespaces, rate=rate, latency=arguments.latency)
                rounds: list[dict[str, Measured]] = []
                for number in range(arguments.rounds):
                    order = arguments.ways if number % 2 else arguments.ways[::-1]
                    setting = (workers, model, "sgd", *MODELS[model])
                    rounds.append({way: measure(way, *setting, run=run) for way in order})
                title = f"{workers} workers, {rate} {arguments.latency}".strip()
                lines += table_of(f"{title}, {model}", rounds)
                print("\n".join(lines[-len(arguments.ways) - 4 :]), flush=True)
    if arguments.markdown:
        text = "\n".join(lines + closing_line(arguments.rounds))
        put_into(arguments.markdown, MARKERS, text)
    return 0


def table_of(title: str, rounds: list[dict[str, Measured]]) -> list[str]:
    lines = [
        "",
        f"| {title} | steps/s | relative to fit | MB sent in a step |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        if way not in rounds[0]:
            continue
        speeds = [measured[way].speed for measured in rounds]
        ratios = [measured[way].speed / measured["fit"].speed for measured in rounds]
        spread = f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})"
        sent = statistics.median(measured[way].sent for measured in rounds)
        ratio = f"{statistics.median(ratios):.2f} x"
        lines.append(f"| {TITLES.get(way, way)} | {spread} | {ratio} | {sent:.2f} |")
    if {"fit", "collectives", "alone"} <= rounds[0].keys():
        hidden = []
        for measured in rounds:
            fit, sums, step = (1 / measured[way].speed for way in ("fit", "collectives", "alone"))
            hidden.append(min(1.0, max(0.0, (step + sums - fit) / sums)))
        lines.append(f"| part of the sums during the step | {statistics.median(hidden):.0%} | | |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
