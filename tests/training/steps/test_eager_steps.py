"""Under `run_eagerly=True` a step runs once on the global batch, and all copies follow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, compiled, strategy_of

import tfdist_ext as tfd

FIT = {"batch_size": 16, "epochs": 2}


class Eager(keras.Model):
    """Depends on the order of rows, counts in Python, and updates in each third step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
        self.drop = keras.layers.Dropout(0.5, seed=1)  # the mask of 8 rows has a kernel's shape
        self.last = keras.layers.Dense(1)
        self.count = 0
        self.rows = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        x = x + keras.random.normal(keras.ops.shape(x)) if training else x
        for layer in self.hidden:
            x = layer(x, training=training)
        return self.last(self.drop(x - x[::-1], training=training))

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.count += 1
        self.rows.assign_add(tf.shape(x, tf.int64)[0])
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean(tf.square(outputs - y)[y > 0])
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.count % 3 == 0:
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"counted": float(self.rows), "wrong": loss, "steps": self.count}


def build() -> keras.Model:
    model = compiled(Eager(), keras.optimizers.Adam(0.1), run_eagerly=True)
    model(X[:2])
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_a_step_runs_once_as_in_plain_keras(name: str) -> None:
    """On PlacedStrategy: tests/strategies/test_placed.py."""
    _, ours = assert_trains_as_keras(build, X[:43], Y[:43], strategy=strategy_of(name), **FIT)
    assert ours.keras_model.count == 6
    for variable in [*ours.keras_model.variables, *ours.keras_model.optimizer.variables]:
        copies = ours.strategy.experimental_local_results(variable.value)
        assert len({np.asarray(copy).tobytes() for copy in copies}) == 1, variable.path


def test_predictions_are_those_of_the_whole_batch() -> None:
    def twice(x: Any) -> Any:
        return keras.ops.concatenate([x, -x], axis=0)

    model = keras.Sequential([keras.Input((5,)), keras.layers.Lambda(twice)])
    expected = model.predict(X[:20], batch_size=8, verbose=0)
    ours = tfd.distribute(model, strategy_of("mirrored"))
    ours.run_eagerly = True
    np.testing.assert_array_equal(ours.predict(X[:20], batch_size=8, verbose=0), expected)
