"""What layers and steps assign to variables, also inside a cond, a loop or a tf.function.

Moving averages of the rows: over all rows they are those of one device, whichever replica has seen
which of them, and every copy of a variable is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, distributed_fit, mirrored, strategy_of

from tfdist_ext.training import _keras_private as kp

FIT = {"batch_size": 16, "epochs": 2}


def in_cond(write: Callable[[], tf.Tensor]) -> None:
    tf.cond(tf.random.uniform([]) < 2, write, lambda: tf.constant(1))


def in_loop(write: Callable[[], tf.Tensor]) -> None:
    tf.while_loop(lambda i: i < 3, lambda i: (i + write(),), [0])


def in_function(write: Callable[[], tf.Tensor]) -> None:
    tf.function(write)()


def before_and_after(write: Callable[[], tf.Tensor]) -> None:
    """The loop goes on from what the layer has written before it, and the layer from the loop."""
    for _ in range(2):
        write()
        in_loop(write)


class Average(keras.layers.Layer):
    def __init__(self, where: Callable[..., None]):
        super().__init__()
        self.where = where

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="average"
        )
        self.writes = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, name="writes"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        before = tf.convert_to_tensor(self.average)

        def write() -> tf.Tensor:
            self.average.assign(0.8 * self.average + 0.2 * tf.reduce_mean(x, axis=0))
            self.writes.assign_add(1)
            return tf.constant(1)

        if training:
            self.where(write)
        return x - tf.stop_gradient(before)


def with_average(where: Callable[..., None], **settings: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(3), Average(where), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), "mse", **settings)
        return model

    return build


def assert_copies_are_equal(ours: Any) -> None:
    for variable in ours.keras_model.weights:
        copies = ours.strategy.experimental_local_results(kp.raw_value(variable))
        values = [copy.numpy() for copy in copies]
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0], err_msg=variable.path)


@pytest.mark.long("central_storage", "in_function", "before_and_after", "in_loop")
@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
@pytest.mark.parametrize("where", [in_cond, in_loop, in_function, before_and_after])
def test_averages_are_of_all_rows(name: str, where: Callable[..., None]) -> None:
    plain, ours = assert_trains_as_keras(
        with_average(where), X[:50], Y[:50], strategy=strategy_of(name, 3), **FIT
    )
    assert_copies_are_equal(ours)
    average = ours.keras_model.layers[1]
    assert np.abs(average.average.numpy()).max() > 0.01
    assert int(average.writes.numpy()) == int(plain.layers[1].writes.numpy()) > 0


@pytest.mark.long("central_storage")
@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_averages_in_eager_steps(name: str) -> None:
    """A tf.function that a layer keeps is traced in the first of them only."""

    class Counts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.see = tf.function(lambda x: self.seen.assign(0.5 * self.seen + tf.reduce_mean(x)))

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.see(x)
            return x

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), Counts(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        return model

    strategy = strategy_of(name, 3)
    _, ours = assert_trains_as_keras(build, X[:50], Y[:50], strategy=strategy, **FIT)
    assert_copies_are_equal(ours)


class Follows(keras.Model):
    """A second set of weights, trainable in name, that follows the first slowly; or the rows."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.dense = keras.layers.Dense(1)
        self.target = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.target.build(shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        old, new = self.target.kernel, self.dense.kernel

        def follow() -> tf.Tensor:
            value = tf.reduce_mean(data[0], axis=0)[:, None] if self.what == "rows" else new
            old.assign(0.5 * old + 0.5 * value)
            return tf.constant(1)

        in_cond(follow) if self.what == "in a cond" else follow()
        return logs


def following(what: str) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = Follows(what)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return build


@pytest.mark.long("central_storage", "mirrored-weights", "mirrored-rows")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mirrored", "weights"),
        ("mirrored", "rows"),
        ("mirrored", "in a cond"),
        ("central_storage", "weights"),
        ("central_storage", "rows"),
    ],
)
def test_trainable_variables_that_a_step_assigns(name: str, what: str) -> None:
    _, ours = assert_trains_as_keras(
        following(what), X[:50], Y[:50], strategy=strategy_of(name, 3), **FIT
    )
    assert_copies_are_equal(ours)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_one_copy_of_a_trainable_variable_cannot_be_written_by_all() -> None:
    central = strategy_of("central_storage", 3)
    with pytest.raises(Exception, match=r"trainable variable '.*kernel' must .* cond") as told:
        distributed_fit(following("in a cond"), X[:16], Y[:16], strategy=central)
    assert "CentralStorageStrategy" in str(told.value)


def test_one_replica_writes_as_keras() -> None:
    assert_trains_as_keras(
        with_average(before_and_after), X[:50], Y[:50], strategy=mirrored(1), **FIT
    )
