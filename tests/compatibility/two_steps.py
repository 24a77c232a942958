"""Two steps of models of the table, on strategies and by Keras itself, compared by `tfd.verify`."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.testing import logical_cpus

BOUND = 1e-5  # of a difference in float64; deep networks with few rows make much of rounding
BATCH = 5  # of 8 rows: two steps, and on 2 and 3 replicas parts of different sizes
LARGE = 10_000_000  # parameters; from here on not on clusters, where each task has a copy


class Timer(keras.callbacks.Callback):
    """Builds models, and measures the seconds from there to the end of their first step."""

    def __init__(self, build: Callable[[], keras.Model]):
        super().__init__()
        self._build = build
        self._started: float | None = None
        self.seconds: list[float] = []

    def __deepcopy__(self, _: Any) -> Timer:
        return self  # for all trainings

    def __call__(self) -> keras.Model:
        self._started = time.monotonic()
        return self._build()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._started is not None:
            self.seconds.append(time.monotonic() - self._started)
            self._started = None


class Compared(NamedTuple):
    """What a process finds out about a model.

    Attributes:
        parameters: how many numbers the weights have.
        differences: to plain Keras, on each strategy; or what was raised.
        seconds: to the first step in plain Keras, then on each strategy.
        rounding: the difference of plain Keras to itself after the last bits of weights and
            inputs were changed; 0 where nobody needs it.
    """

    parameters: int
    differences: list[float | str]
    seconds: list[float]
    rounding: float


def train_on_replicas(titles: Sequence[str]) -> dict[str, Compared | str]:
    """Trains models in plain Keras, and on 2 and 3 logical CPUs of this process."""
    logical_cpus(3)
    devices = ["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]
    return _for_each(titles, [tfd.create_strategy("mirrored", devices=each) for each in devices])


def train_in_task(titles: Sequence[str]) -> dict[str, Compared | str] | None:
    """Trains models in a task of a cluster; returns None in a task that only serves."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    def train_all() -> dict[str, Compared | str]:
        return _for_each(titles, [tfd.create_strategy()])

    return tfd.run(train_all)


def _for_each(
    titles: Sequence[str], strategies: Sequence[tf.distribute.Strategy]
) -> dict[str, Compared | str]:
    """Compares each model; what plain Keras raises becomes a text."""
    from model_rows import rows

    for package in ("keras_hub", "keras_rs", "keras_tuner"):
        importlib.import_module(package)  # an import takes seeds, which a model would get after it
    found: dict[str, Compared | str] = {}
    for title in titles:
        row = rows()[title]
        keras.config.set_floatx("float64" if row.float64 else "float32")
        keras.config.set_dtype_policy(keras.config.floatx())
        try:
            found[title] = _compared(row, strategies)
        except Exception as error:
            found[title] = f"{type(error).__name__}: {error}"
        gc.collect()  # a model may have gigabytes
    return found


def _compared(row: Any, strategies: Iterable[tf.distribute.Strategy]) -> Compared:
    timer = Timer(row.build)
    trainings = row.trainings(timer)
    weights = [value for name, value in trainings.plain.items() if name[:3] in ("wei", "var")]
    floats = [value for value in weights if np.issubdtype(value.dtype, np.floating)]
    differences: list[float | str] = []
    for strategy in strategies:
        try:
            differences.append(max(trainings.differences(strategy).values()))
        except Exception as error:
            differences.append(f"{type(error).__name__}: {error}")
        gc.collect()
    rounding = 0.0
    if any(isinstance(each, float) and each > BOUND for each in differences):
        rounding = max(trainings.differences(last_bit=True).values())
    return Compared(sum(each.size for each in floats), differences, timer.seconds, rounding)
