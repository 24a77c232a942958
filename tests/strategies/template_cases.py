"""Strategies on the template, where their variables are, and a model to train on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.strategies import StrategyTemplate

ON_DEVICE = "/job:localhost/replica:0/task:0/device:"


def devices_of(strategy: Any, variable: Any) -> list[str]:
    return [copy.device.removeprefix(ON_DEVICE) for copy in strategy.copies(variable)]


def values_of(strategy: Any, variable: Any) -> list[Any]:
    return [copy.numpy().tolist() for copy in strategy.copies(variable)]


class Shared(StrategyTemplate):
    """One copy of everything, on a device that has no replica."""

    def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
        return create("CPU:3")


class Owned(StrategyTemplate):
    """Updated on the second device, where the slots are, and sent out."""

    def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
        return create(self.devices if beside is None else self.devices[1:2])

    def update_variable(
        self, variable: Any, copies: Sequence[Any], update: Callable[[int], Any]
    ) -> list[Any]:
        owner = min(1, len(copies) - 1)
        done = update(owner)
        for copy in copies:
            if copy is not copies[owner]:
                with tf.device(copy.device):
                    copy.assign(copies[owner])
        return [done] * len(copies)


class Pairwise(StrategyTemplate):
    """Sums pairs of neighbors first, then the pairs; remembers what it was asked."""

    def __init__(self, devices: Any = None):
        self.asked: list[tuple[Any, int, tuple[str, ...]]] = []
        super().__init__(devices)

    def reduce_values(
        self, op: Any, values: Sequence[Any], devices: Sequence[str], what: Any = None
    ) -> list[Any]:
        self.asked.append((op, len(values), tuple(devices)))
        if any(isinstance(value, tf.IndexedSlices) for value in values):
            return list(super().reduce_values(op, values, devices))
        level = list(values)
        while len(level) > 1:
            level = [sum(level[i : i + 2][1:], level[i]) for i in range(0, len(level), 2)]
        mean = op == tf.distribute.ReduceOp.MEAN
        return [level[0] / len(values) if mean else level[0]] * len(devices)


ROWS = np.random.default_rng(0).normal(size=(41, 5)).astype("float32")
IDS = np.random.default_rng(1).integers(0, 12, (41, 3))
LABELS = (ROWS.sum(axis=1, keepdims=True) > 0).astype("float32")
DATA = [ROWS, IDS]

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "AdamW, clipped, EMA": lambda: keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    ),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, clipnorm=0.2), initial_scale=8.0, dynamic_growth_steps=3
    ),
}


def build(optimizer: str = "AdamW, clipped, EMA", **compiling: Any) -> keras.Model:
    """A table, regularized weights and a synchronized BatchNormalization."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    rows, ids = keras.Input([5], name="rows"), keras.Input([3], dtype="int32", name="ids")
    embedded = layers.Flatten()(layers.Embedding(12, 4, name="table")(ids))
    regularizer = keras.regularizers.L2(0.05)
    hidden = layers.Dense(8, "tanh", kernel_regularizer=regularizer, name="hidden")(
        layers.Concatenate()([rows, embedded])
    )
    hidden = layers.BatchNormalization(synchronized=True, name="norm")(hidden)
    model = keras.Model([rows, ids], layers.Dense(1, "sigmoid", name="head")(hidden))
    model.compile(OPTIMIZERS[optimizer](), "binary_crossentropy", metrics=["accuracy"], **compiling)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model: Any) -> None:
    """One epoch of uneven batches of 12 rows."""
    model.fit(DATA, LABELS, batch_size=12, shuffle=False, verbose=0)
