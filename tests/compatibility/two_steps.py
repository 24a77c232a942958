"""Two steps of models of the table, on strategies and by Keras itself, compared by `tfd.verify`."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

import tfdist_ext as tfd
from tfdist_ext.testing import logical_cpus
from tfdist_ext.training.verification import Results, relative_differences
from tfdist_ext.training.verify import Trainings

BOUND = 1e-5  # of a difference in float64; deep networks with few rows make much of rounding
BATCH = 5  # of 8 rows: two steps, and on 2 and 3 replicas parts of different sizes
LARGE = 10_000_000  # parameters; from here on not on clusters, where each task has a copy


class Trained(NamedTuple):
    """The result of a training.

    Attributes:
        numbers: variables, logs and predictions after two steps, by name.
        seconds: from the creation of the model to the end of the first step.
    """

    numbers: Results
    seconds: float

    @property
    def parameters(self) -> int:
        """How many numbers the weights have."""
        found = [value for name, value in self.numbers.items() if name[:3] in ("wei", "var")]
        return sum(value.size for value in found if np.issubdtype(value.dtype, np.floating))


class FirstStep(keras.callbacks.Callback):
    """Measures the seconds from its creation to the end of the first step."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()
        self.seconds = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds = self.seconds or time.monotonic() - self._started


def train(
    build: Callable[[], keras.Model],
    data: dict[str, Any],
    strategy: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    last_bit: bool,
) -> Trained:
    """Trains the model that `build` creates, on a strategy, or in plain Keras if it is None.

    Args:
        data: arguments of `fit`: x, and perhaps y, sample_weight and epochs.
    """
    fit = {"batch_size": BATCH, "epochs": data.get("epochs", 1)}
    parts = tuple(data[name] for name in ("x", "y", "sample_weight") if name in data)
    trainings = Trainings(build, parts, 2, fit, synchronize_batch_norm=True)
    first = FirstStep()
    numbers = trainings.train(strategy, last_bit=last_bit, callbacks=[*callbacks, first])
    return Trained(numbers, first.seconds)


def difference(ours: Trained, plain: Trained) -> float:
    """The largest relative difference of a variable, a log or a prediction."""
    return max(relative_differences(ours.numbers, plain.numbers).values())


class OnReplicas(NamedTuple):
    """What a process finds out about a model.

    Attributes:
        plain: by Keras's own `fit`, without its numbers if the model is not trained on clusters.
        parameters: how many numbers the weights have.
        differences: to plain Keras, on 2 and 3 replicas; or what was raised.
        seconds: to the first step on 2 replicas.
        rounding: the difference of plain Keras to itself after the last bit of the inputs was
            changed; 0 where nobody needs it.
    """

    plain: Trained
    parameters: int
    differences: list[float | str]
    seconds: float
    rounding: float


def train_on_replicas(titles: Sequence[str]) -> dict[str, OnReplicas | str]:
    """Trains models in plain Keras, and on 2 and 3 logical CPUs of this process."""
    logical_cpus(3)
    return _for_each(titles, _on_replicas)


def train_in_task(titles: Sequence[str]) -> dict[str, Trained | str] | None:
    """Trains models in a task of a cluster; returns None in a task that only serves."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    def train_all() -> dict[str, Trained | str]:
        strategy = tfd.create_strategy()
        return _for_each(titles, lambda row: row.train(strategy))

    return tfd.run(train_all)


def _for_each(titles: Sequence[str], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Calls a function with each row; what it raises becomes a text."""
    from model_rows import rows

    for package in ("keras_hub", "keras_rs", "keras_tuner"):
        importlib.import_module(package)  # an import takes seeds, which a model would get after it
    found: dict[str, Any] = {}
    for title in titles:
        row = rows()[title]
        keras.config.set_floatx("float64" if row.float64 else "float32")
        keras.config.set_dtype_policy(keras.config.floatx())
        try:
            found[title] = function(row)
        except Exception as error:
            found[title] = f"{type(error).__name__}: {error}"
        gc.collect()  # a model may have gigabytes
    return found


def _on_replicas(row: Any) -> OnReplicas:
    plain = row.train(None)
    parameters, differences = plain.parameters, []
    seconds = 0.0
    for replicas in (2, 3):
        devices = [f"CPU:{number}" for number in range(replicas)]
        try:
            ours = row.train(tfd.create_strategy("mirrored", devices=devices))
        except Exception as error:
            differences.append(f"{type(error).__name__}: {error}")
            continue
        differences.append(difference(ours, plain))
        seconds = seconds or ours.seconds
        del ours
        gc.collect()
    rounding = 0.0
    if any(isinstance(each, float) and each > BOUND for each in differences):
        rounding = difference(row.train(None, last_bit=True), plain)
    if not row.on_clusters or parameters >= LARGE:
        plain = Trained({}, plain.seconds)
    return OnReplicas(plain, parameters, differences, seconds, rounding)
