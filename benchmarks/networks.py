"""Compares trainings of several workers on slow networks. Needs root.

    sudo .venv/bin/python benchmarks/networks.py [--rounds 3] [--markdown docs/performance.md]
    sudo .venv/bin/python benchmarks/networks.py --rates 1gbit --models "Dense 5000x5000"
    sudo .venv/bin/python benchmarks/networks.py --json rows.json
    .venv/bin/python benchmarks/networks.py --predict rows.json --unseen 1gbit

Each worker runs in its own network namespace, and `tc` limits what it sends. All workers share the
cores of this machine, so the figures compare methods on one network, not numbers of workers. Each
round runs each method once. The tables show medians, the megabytes that a worker sends in a step,
and how much of the time of the sums passes during the rest of the step.

With --predict, the program measures nothing. It fits the arithmetic of `tfdist plan --network` on
some rows of a file of --json, and prints predictions for the other rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path

from clusters import outputs_in_namespaces
from fit_speed import prepare_legacy
from large_models import HAND, TITLES, Measured, measure
from prediction import Row, prediction_table
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
    parser.add_argument("--json", type=Path, help="also write the medians into this file")
    parser.add_argument("--predict", type=Path, metavar="JSON", help="predict rows of this file")
    unseen = "with --predict: rates, models or methods that the fit does not use"
    parser.add_argument("--unseen", nargs="+", default=["1gbit"], help=unseen)
    arguments = parser.parse_args()
    if arguments.predict:
        rows = [Row(*row) for row in json.loads(arguments.predict.read_text())]
        print("\n".join(prediction_table(rows, arguments.unseen, MODELS)))
        return 0
    if "tf_keras" in arguments.ways:
        prepare_legacy()
    lines: list[str] = []
    medians: list[Row] = []
    for workers in arguments.workers:
        for model in arguments.models:
            for rate in arguments.rates:
                run = functools.partial(outputs_in_namespaces, rate=rate, latency=arguments.latency)
                rounds: list[dict[str, Measured]] = []
                for number in range(arguments.rounds):
                    order = arguments.ways if number % 2 else arguments.ways[::-1]
                    setting = (workers, model, "sgd", *MODELS[model])
                    rounds.append({way: measure(way, *setting, run=run) for way in order})
                medians += medians_of(rounds, workers, rate, model)
                title = f"{workers} workers, {rate} {arguments.latency}".strip()
                lines += table_of(f"{title}, {model}", rounds)
                print("\n".join(lines[-len(arguments.ways) - 4 :]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(medians, indent=1))
    if arguments.markdown:
        text = "\n".join(lines + closing_line(arguments.rounds))
        put_into(arguments.markdown, MARKERS, text)
    return 0


def medians_of(rounds: list[dict[str, Measured]], workers: int, rate: str, model: str) -> list[Row]:
    rows = []
    for way in rounds[0]:
        seconds = statistics.median(1 / measured[way].speed for measured in rounds)
        sent = statistics.median(measured[way].sent for measured in rounds)
        rows.append(Row(workers, rate, model, way, seconds, sent))
    return rows


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
