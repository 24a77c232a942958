"""Compares trainings of several workers on slow networks. Needs root.

    sudo .venv/bin/python benchmarks/networks.py [--rounds 3] [--markdown docs/performance.md]
    sudo .venv/bin/python benchmarks/networks.py --rates 1gbit --models "Dense 5000x5000"
    sudo .venv/bin/python benchmarks/networks.py --json rows.json
    .venv/bin/python benchmarks/networks.py --predict rows.json --unseen 1gbit

Each worker runs in its own network namespace, and `tc` limits what it sends. All workers share the
cores of this machine, so the figures compare methods on one network, not numbers of workers. The
methods of a model are trained by processes that start once for all rates, and take turns: in each
round each method trains once. The tables show medians, the megabytes that a worker
sends in a step, and how much of the time of the sums passes during the rest of the step.

With --predict, the program measures nothing. It fits the arithmetic of `tfdist plan --network` on
some rows of a file of --json, and prints predictions for the other rows.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from clusters import SlowNetwork
from fit_speed import LEGACY_PYTHON, prepare_legacy
from large_models import HAND, PROGRAM, TITLES
from prediction import Row, prediction_table
from report import closing_line, put_into

MARKERS = ("<!-- networks begin -->", "<!-- networks end -->")
WAYS = ("fit", "narrow", "sharded", HAND, "tf_keras", "collectives", "alone")
# model -> (rows of a global batch, steps of a turn at 100 Mbit/s, 1 Gbit/s, and more)
MODELS = {
    "MLP 64-256-10": (64, (64, 256, 256)),
    "4-layer transformer, d=128": (32, (8, 32, 32)),
    "Dense 5000x5000": (64, (3, 8, 16)),
    "ResNet50": (32, (2, 4, 8)),
    "26 tables of 1,000 x 16": (128, (32, 64, 64)),
}
TURN = re.compile(r"seconds ([\d.]+) sent ([\d.]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--latency", default="", help="such as 1ms; needs the module sch_netem")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--markdown", type=Path, help="also write the tables into this page")
    parser.add_argument("--json", type=Path, help="also add the medians to this file")
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
            for rate, rounds in rounds_of(arguments, workers, model):
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


class Turn(NamedTuple):
    """A step of one method.

    Attributes:
        seconds: its time, the mean of some steps.
        sent: the megabytes that a worker sends, of the worker that sends most.
    """

    seconds: float
    sent: float


def rounds_of(
    arguments: argparse.Namespace, workers: int, model: str
) -> Iterator[tuple[str, list[dict[str, Turn]]]]:
    """Yields each rate, and for each of its rounds the turns of all methods."""
    rows, steps = MODELS[model]
    with SlowNetwork(workers) as network:
        jobs: dict[str, list[subprocess.Popen[str]]] = {}
        for way in arguments.ways:
            if way not in jobs:
                ours = [name for name in arguments.ways if name != "tf_keras"]
                names = ours if way in ours else [way]
                words = [model, "sgd", ",".join(names), str(rows), str(max(steps)), "turns"]
                python = LEGACY_PYTHON if way == "tf_keras" else sys.executable
                job = network.started([python, str(PROGRAM), *words])
                jobs.update(dict.fromkeys(names, job))
                for process in job:
                    answer_of(process, "ready")
        for rate in arguments.rates:
            network.limit(rate, arguments.latency)
            count = steps[("100mbit", "1gbit").index(rate) if rate in ("100mbit", "1gbit") else 2]
            rounds = []
            for number in range(arguments.rounds):
                order = arguments.ways if number % 2 else arguments.ways[::-1]
                rounds.append({way: turn(jobs[way], way, count) for way in order})
            yield rate, rounds


def turn(job: Sequence[subprocess.Popen[str]], way: str, steps: int) -> Turn:
    """Lets the workers of a job train some steps with a method."""
    for process in job:
        assert process.stdin is not None
        process.stdin.write(f"{way},{steps}\n")
        process.stdin.flush()
    turns = []
    for process in job:
        match = TURN.fullmatch(answer_of(process, "seconds "))
        assert match is not None
        turns.append(Turn(float(match[1]), float(match[2])))
    result = Turn(turns[0].seconds, max(turn.sent for turn in turns))
    print(f"{way}: {result}", file=sys.stderr, flush=True)
    return result


def answer_of(process: subprocess.Popen[str], begin: str) -> str:
    """The next line of a worker's output that begins with a text."""
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        if line.startswith(begin):
            return line.strip()
        before.append(line)
    raise SystemExit("".join(before) + f"a worker has ended with {process.wait()}")


def medians_of(rounds: list[dict[str, Turn]], workers: int, rate: str, model: str) -> list[Row]:
    rows = []
    for way in rounds[0]:
        seconds = statistics.median(measured[way].seconds for measured in rounds)
        sent = statistics.median(measured[way].sent for measured in rounds)
        rows.append(Row(workers, rate, model, way, seconds, sent))
    return rows


def table_of(title: str, rounds: list[dict[str, Turn]]) -> list[str]:
    lines = [
        "",
        f"| {title} | steps/s | relative to fit | MB sent in a step |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        if way not in rounds[0]:
            continue
        speeds = [1 / measured[way].seconds for measured in rounds]
        ratios = [measured["fit"].seconds / measured[way].seconds for measured in rounds]
        spread = f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})"
        sent = statistics.median(measured[way].sent for measured in rounds)
        ratio = f"{statistics.median(ratios):.2f} x"
        lines.append(f"| {TITLES.get(way, way)} | {spread} | {ratio} | {sent:.2f} |")
    if {"fit", "collectives", "alone"} <= rounds[0].keys():
        hidden = []
        for measured in rounds:
            fit, sums, step = (measured[way].seconds for way in ("fit", "collectives", "alone"))
            hidden.append(min(1.0, max(0.0, (step + sums - fit) / sums)))
        lines.append(f"| part of the sums during the step | {statistics.median(hidden):.0%} | | |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
