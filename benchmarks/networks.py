"""Compares trainings of several workers on slow networks. Needs root.

    sudo .venv/bin/python benchmarks/networks.py --markdown docs/performance.md \\
        --picture docs/networks.svg --json rows.json
    sudo .venv/bin/python benchmarks/networks.py --rates 1gbit --models "Dense 5000x5000"
    sudo .venv/bin/python benchmarks/networks.py --rates 1gbit --latencies 0.1ms 1ms
    .venv/bin/python benchmarks/networks.py --predict rows.json --unseen 1gbit \\
        --markdown docs/performance.md

Each worker runs in its own network namespace, and `tc` limits what it sends. With --latencies, a
process delays each packet. It needs time itself, a fraction of a millisecond. All workers share the
cores of this machine, so the figures compare methods on one network, not numbers of workers.
The methods of a model are trained by processes that start once for all rates, and take turns: in
each round each method trains once. The table shows medians, the megabytes that a worker sends in a
step, and how much of the time of the sums passes during the rest of the step.

With --predict, the program measures nothing. It fits the arithmetic of `tfdist plan --network` on
some rows of a file of --json, and prints predictions for the other rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusters import SlowNetwork
from fit_speed import LEGACY_PYTHON, prepare_legacy
from large_models import HAND, PROGRAM
from prediction import Row, prediction_table
from report import closing_line, put_into

MARKERS = ("<!-- networks begin -->", "<!-- networks end -->")
PREDICTED = ("<!-- predictions begin -->", "<!-- predictions end -->")
WAYS = ("fit", "narrow", "sharded", HAND, "tf_keras", "collectives", "alone")
TABLES = "26 tables of 1,000 x 16"  # "collectives" would sum whole tables
# model -> (rows of a global batch, steps of a turn at 100 Mbit/s, 1 Gbit/s, and more)
MODELS = {
    "MLP 64-256-10": (64, (64, 256, 256)),
    "4-layer transformer, d=128": (32, (8, 32, 32)),
    TABLES: (128, (32, 64, 64)),
    "Dense 5000x5000": (64, (2, 8, 16)),
    "ResNet50": (32, (2, 4, 8)),
}
TURN = re.compile(r"seconds ([\d.]+) sent ([\d.]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--latencies", nargs="+", default=[""], help="of messages, such as 1ms")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    parser.add_argument("--picture", type=Path, help="draw what gradient_dtype gives")
    parser.add_argument("--json", type=Path, help="also keep the rows in this file")
    parser.add_argument("--predict", type=Path, metavar="JSON", help="predict rows of this file")
    unseen = "with --predict: rates, models or methods that the fit does not use"
    parser.add_argument("--unseen", nargs="+", default=["1gbit"], help=unseen)
    arguments = parser.parse_args()
    if arguments.predict:
        rows = [Row(*row) for row in json.loads(arguments.predict.read_text())]
        text = "\n".join(["", *prediction_table(rows, arguments.unseen, MODELS)])
        print(text)
        if arguments.markdown:
            put_into(arguments.markdown, PREDICTED, text)
        return 0
    if missing := {"fit", *(["narrow"] if arguments.picture else [])} - {*arguments.ways}:
        parser.error(f"--ways lacks {' and '.join(missing)}, which the results need")
    if "tf_keras" in arguments.ways:
        prepare_legacy()
    rows = []
    for workers, model in itertools.product(arguments.workers, arguments.models):
        for rate, rounds in rounds_of(arguments, workers, model):
            rows += rows_of(rounds, workers, rate, model)
            print(table(rows)[-1], flush=True)
        if arguments.json:
            lines = ",\n".join(map(json.dumps, rows))
            arguments.json.write_text(f"[\n{lines}\n]\n")
    if arguments.markdown:
        text = "\n".join(["", *table(rows), *closing_line(arguments.rounds)])
        put_into(arguments.markdown, MARKERS, text)
    if arguments.picture:
        draw(rows, arguments.picture)
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
    """Yields each rate and latency, and for each of its rounds the turns of all methods."""
    rows, steps = MODELS[model]
    ways = [way for way in arguments.ways if (model, way) != (TABLES, "collectives")]
    with SlowNetwork(workers, has_latency=any(arguments.latencies)) as network:
        jobs: dict[str, list[subprocess.Popen[str]]] = {}
        for way in ways:
            if way not in jobs:
                ours = [name for name in ways if name != "tf_keras"]
                names = ours if way in ours else [way]
                words = [model, "sgd", ",".join(names), str(rows), str(max(steps)), "turns"]
                python = LEGACY_PYTHON if way == "tf_keras" else sys.executable
                job = network.started([python, str(PROGRAM), *words])
                jobs.update(dict.fromkeys(names, job))
                for process in job:
                    answer_of(process, "ready")
        for rate, latency in itertools.product(arguments.rates, arguments.latencies):
            network.limit(rate, latency)
            count = steps[("100mbit", "1gbit").index(rate) if rate in ("100mbit", "1gbit") else 2]
            rounds = []
            for number in range(arguments.rounds):
                order = ways if number % 2 else ways[::-1]
                rounds.append({way: turn(jobs[way], way, count) for way in order})
            yield f"{rate} {latency}".strip(), rounds


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


def rows_of(rounds: list[dict[str, Turn]], workers: int, rate: str, model: str) -> list[Row]:
    rows = []
    for way in rounds[0]:
        seconds = [measured[way].seconds for measured in rounds]
        sent = statistics.median(measured[way].sent for measured in rounds)
        rows.append(Row(workers, rate, model, way, seconds, sent))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Lines: a row for each model on a network. Methods are shown relative to `fit`."""
    others = {"narrow": "bfloat16", "sharded": "sharded", HAND: HAND, "tf_keras": "tf_keras"}
    titles = ["workers, network", "model", "`fit`, steps/s", *others.values()]
    titles += ["MB sent", "MB sent, bfloat16", "sums during the step"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (workers, rate, model), group in itertools.groupby(rows, key=lambda row: row[:3]):
        by_way = {row.way: row for row in group}
        speeds = [1 / seconds for seconds in by_way["fit"].turns]
        spread = f"{statistics.median(speeds):.3g} ({min(speeds):.3g} to {max(speeds):.3g})"
        cells = [f"{workers}, {rate}", model, spread]
        for way in others:
            cells.append(f"{gain(by_way, way):.2f} x" if way in by_way else "")
        cells += [f"{by_way[way].sent:.2f}" if way in by_way else "" for way in ("fit", "narrow")]
        lines.append(f"| {' | '.join([*cells, hidden(by_way)])} |")
    return lines


def gain(by_way: dict[str, Row], way: str) -> float:
    """How many times as fast as `fit` a method is."""
    turns = zip(by_way["fit"].turns, by_way[way].turns, strict=True)
    return statistics.median(fit_seconds / way_seconds for fit_seconds, way_seconds in turns)


def hidden(by_way: dict[str, Row]) -> str:
    """Which part of the sums' time passes during the rest of the step; "" if not measured."""
    if not {"collectives", "alone"} <= by_way.keys():
        return ""
    turns = zip(*(by_way[way].turns for way in ("fit", "collectives", "alone")), strict=True)
    # In sequence, the sums and the step would take longer than `fit`.
    parts = [
        (sum_seconds + step_seconds - fit_seconds) / sum_seconds
        for fit_seconds, sum_seconds, step_seconds in turns
    ]
    return f"{min(1.0, max(0.0, statistics.median(parts))):.0%}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws how many times as fast as `fit` a training with bfloat16 is."""
    from matplotlib.figure import Figure

    from tfdist_ext.placement.placement_plan import save_figure

    def figure() -> Any:
        axes = Figure(figsize=(8, 4)).add_subplot()
        rates = list(dict.fromkeys(row.rate for row in rows))
        groups = itertools.groupby(rows, key=lambda row: (row.workers, row.model, row.rate))
        lines: dict[tuple[int, str], list[float]] = {}
        for (workers, model, _), group in groups:
            by_way = {row.way: row for row in group}
            lines.setdefault((workers, model), []).append(gain(by_way, "narrow"))
        for (workers, model), gains in lines.items():
            color = f"C{list(MODELS).index(model)}"
            style = "-o" if workers == rows[0].workers else "--s"
            axes.plot(rates, gains, color + style, label=f"{model}, {workers} workers")
        axes.axhline(1, color="grey", linewidth=1)
        axes.set_ylabel('gradient_dtype="bfloat16", relative to fit')
        axes.legend(frameon=False, fontsize=7, bbox_to_anchor=(1, 1))
        return axes.figure

    save_figure(path, figure)


if __name__ == "__main__":
    raise SystemExit(main())
