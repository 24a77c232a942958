"""Two steps of a model of the table, on one strategy: what came out, how long the first took."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.testing import logical_cpus

BOUND = 1e-5  # of a difference in float64; deep networks with few rows make much of rounding
BATCH = 5  # of 8 rows: two steps, and on 2 and 3 replicas parts of different sizes


class Trained(NamedTuple):
    """What a training gives.

    Attributes:
        values: the weights after two steps, then what was logged.
        seconds: from the making of the model to the end of the first step.
        parameters: how many numbers the weights are.
    """

    values: list[np.ndarray]
    seconds: float
    parameters: int


class FirstStep(keras.callbacks.Callback):
    """Notes when the first step is done."""

    ended = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended = self.ended or time.monotonic()


def prepare(*, float64: bool) -> None:
    """Set the precision of all that is made from here on."""
    for package in ("keras_hub", "keras_rs", "keras_tuner"):
        importlib.import_module(package)  # takes seeds, which a model would get after it
    keras.config.set_floatx("float64" if float64 else "float32")
    keras.config.set_dtype_policy(keras.config.floatx())


def train(
    build: Callable[[], keras.Model],
    data: dict[str, Any],
    strategy: tf.distribute.Strategy | None,
    callbacks: Callable[[], list[Any]] = list,
) -> Trained:
    """Train the model that `build` makes, on a strategy or by Keras itself.

    Args:
        data: what `fit` is given.
    """

    def seeded() -> keras.Model:
        keras.utils.set_random_seed(7)
        return build()

    started = time.monotonic()
    model: Any
    if strategy is None:
        model = seeded()
    else:
        model = tfd.distribute(seeded, strategy, synchronize_batch_norm=True)
    first = FirstStep()
    given = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **data}
    history = model.fit(callbacks=[*callbacks(), first], **given).history
    weights = model.get_weights()
    logs = [np.array(history[name]) for name in sorted(history)]
    size = sum(weight.size for weight in weights)
    return Trained([*weights, *logs], first.ended - started, size)


def with_last_bit_changed(x: Any) -> Any:
    """The inputs, each number that is no integer one step higher."""

    def next_number(array: Any) -> Any:
        floats = isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)
        return np.nextafter(array.astype(keras.config.floatx()), np.inf) if floats else array

    return keras.tree.map_structure(next_number, x)


def difference(ours: Trained, plain: Trained) -> float:
    """The largest difference of a weight or a log, relative to the largest number in it."""
    return max(
        float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-3))
        for a, b in zip(ours.values, plain.values, strict=True)
        if np.issubdtype(a.dtype, np.floating)
    )


class OnReplicas(NamedTuple):
    """What a process of a model's own tells.

    Attributes:
        plain: by Keras's own `fit`.
        differences: to it, on 2 and 3 replicas; what was raised, where something was.
        seconds: to the first step on 2 replicas.
        rounding: of Keras's own `fit` to itself, where the last bit of the inputs is changed; 0
            where nobody needs it.
    """

    plain: Trained
    differences: list[float | str]
    seconds: float
    rounding: float


def train_on_replicas(title: str) -> OnReplicas:
    """In a process: by Keras itself, and on 2 and 3 logical CPUs."""
    from model_rows import rows

    logical_cpus(3)
    row = rows()[title]
    prepare(float64=row.float64)
    plain = row.train(None)
    differences: list[float | str] = []
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
        gc.collect()  # the model, of which there may be gigabytes
    rounding = 0.0
    if any(isinstance(each, float) and each > BOUND for each in differences):
        rounding = difference(row.train(None, last_bit=True), plain)
    return OnReplicas(plain, differences, seconds, rounding)


def train_in_task(title: str) -> Trained | None:
    """In a task of a cluster: on its strategy; None where the task only serves."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from model_rows import rows

    row = rows()[title]
    prepare(float64=row.float64)
    return tfd.run(lambda: row.train(tfd.create_strategy()))
