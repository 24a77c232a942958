"""Fits the arithmetic of `tfdist plan --network` on measured rows, and predicts other rows.

The time of a step on one worker is the measured row "alone". The fit chooses how much of the
bandwidth gradients get, how fast a processor handles bytes, the time of a collective, and the part
of a step that overlaps with sums. Workers share the cores of this machine, so each number of
workers has its own fit.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tfdist_ext as tfd
from tfdist_ext.placement.scaling import Network, StepCost, parse_rate, parse_seconds, step_seconds

__all__ = ["Row", "prediction_table"]

PASSING = 2e-4  # seconds that programs/delayed_links.py adds to the latency, about
SETTINGS = {"fit": {}, "narrow": {"narrow": True}, "sharded": {"sharded": True}}
CHOICES = {
    "usable": (0.85, 0.9, 0.95, 1.0),
    "host": (3e8, 5e8, 7e8, 1e9, 2e9, math.inf),
    "overhead": (1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3, 6e-3),
    "overlap": (0.0, 0.2, 0.4, 0.6),
    "per_table": (0.0, 1e-4, 2e-4, 3e-4, 4e-4, 6e-4),
}


class Row(NamedTuple):
    """A measured row.

    Attributes:
        rate: such as "1gbit", or "1gbit 1ms" with a latency.
        way: the method, as in networks.py.
        turns: the seconds of a step, in each round.
        sent: the megabytes that a worker sends in a step.
    """

    workers: int
    rate: str
    model: str
    way: str
    turns: Sequence[float]
    sent: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.turns)


def prediction_table(
    rows: Sequence[Row], unseen: Collection[str], models: Mapping[str, tuple[int, Any]]
) -> list[str]:
    """Lines of a table: each row, predicted from a fit on rows without the words `unseen`.

    Args:
        models: name of a model -> (rows of a global batch, steps).
    """
    lines = [
        "| workers, rate, model, method | measured | computed | difference | |",
        "|---" * 5 + "|",
    ]
    errors = []
    steps = {model: cost_of(model, models[model][0]) for model in {row.model for row in rows}}
    for workers in sorted({row.workers for row in rows}):
        mine = [row for row in rows if row.workers == workers]
        step_of = {row.model: alone(steps[row.model], row.model, mine) for row in mine}
        trained = [row for row in mine if row.way in SETTINGS]
        seen = [row for row in trained if not {*row.rate.split(), row.model, row.way} & {*unseen}]
        fitted = fit(seen, step_of)
        print(f"{workers} workers, fitted on {len(seen)} rows: {fitted}")
        for row in trained:
            computed = seconds_of(row, step_of, fitted)
            difference = computed / row.seconds - 1
            errors += [] if row in seen else [abs(difference)]
            name = f"{workers}, {row.rate}, {row.model}, {row.way}"
            kind = "fitted" if row in seen else "unseen"
            lines.append(
                f"| {name} | {row.seconds:.4f} s | {computed:.4f} s | {difference:+.0%} | {kind} |"
            )
    if errors:
        median, most = statistics.median(errors), max(errors)
        lines += ["", f"Unseen rows: median difference {median:.0%}, largest {most:.0%}."]
    return lines


def cost_of(model: str, rows: int) -> StepCost:
    """The bytes of a step. The time is measured elsewhere."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
    import first_models
    import keras

    def dense() -> Any:
        layers = [keras.layers.Dense(5000), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((5000,)), *layers])

    def build() -> Any:
        built = first_models.MODELS.get(model, dense)()
        built.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return built

    data: Any = np.zeros((rows, 5000), "float32"), np.zeros(rows, "int32")
    if model in first_models.MODELS:
        data = first_models.batch(model, rows)
    return tfd.plan_workers(build, data, step_seconds=1.0, batch_size=rows).step


def alone(step: StepCost, model: str, rows: Iterable[Row]) -> StepCost:
    """The step of a part of the global batch on one worker, with its measured time."""
    times = [row.seconds for row in rows if (row.model, row.way) == (model, "alone")]
    if not times:
        raise SystemExit(f'{model} has no row of the method "alone", which the fit needs.')
    return replace(step, seconds=statistics.median(times))


def fit(rows: Sequence[Row], step_of: Mapping[str, StepCost]) -> dict[str, float]:
    """The choices with the smallest mean square of logarithms of ratios."""

    def error(choice: Sequence[float]) -> float:
        setting = dict(zip(CHOICES, choice, strict=True))
        ratios = [seconds_of(row, step_of, setting) / row.seconds for row in rows]
        return sum(math.log(ratio) ** 2 for ratio in ratios)

    return dict(zip(CHOICES, min(itertools.product(*CHOICES.values()), key=error), strict=True))


def seconds_of(row: Row, step_of: Mapping[str, StepCost], setting: Mapping[str, float]) -> float:
    rate, *latency = row.rate.split()
    seconds = 5e-5 if not latency else PASSING + parse_seconds(latency[0], "latency")
    network = Network(bandwidth=parse_rate(rate), latency=seconds, **setting)
    step = step_of[row.model]
    # A worker's step was measured on its part of the batch, which reads fewer rows of tables.
    part = replace(step, seconds=step.seconds * row.workers)
    return step_seconds(part, network, row.workers, step.rows // row.workers, **SETTINGS[row.way])
