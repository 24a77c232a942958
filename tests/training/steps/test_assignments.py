"""What layers and steps assign to variables, also inside a cond, a loop or a tf.function.

Moving averages of the rows: over all rows they are those of one device, whichever replica has seen
which of them, and every copy of a variable is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    X,
    Y,
    assert_trains_as_keras,
    compiled,
    distributed_fit,
    mirrored,
    stack,
    strategy_of,
)

import tfdist_ext as tfd
from tfdist_ext.training import _keras_private

FIT = {"batch_size": 16, "epochs": 2}


def in_cond(write: Callable[[], tf.Tensor]) -> None:
    tf.cond(tf.random.uniform([]) < 2, write, lambda: tf.constant(1))


def in_loop(write: Callable[[], tf.Tensor]) -> None:
    tf.while_loop(lambda i: i < 3, lambda i: (i + write(),), [0])


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


def between_dense(layer: Callable[..., Any], *args: Any) -> Callable[[], keras.Model]:
    """A builder: `layer(*args)` between two dense layers."""
    dense = keras.layers.Dense
    return lambda: compiled(stack(dense(3), layer(*args), dense(1)))


def assert_copies_are_equal(ours: Any) -> None:
    for variable in ours.keras_model.weights:
        copies = ours.strategy.experimental_local_results(_keras_private.raw_value(variable))
        values = [copy.numpy() for copy in copies]
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0], err_msg=variable.path)


def test_averages_are_of_all_rows() -> None:
    build = between_dense(Average, before_and_after)
    plain, ours = assert_trains_as_keras(build, X[:50], Y[:50], strategy=mirrored(3), **FIT)
    assert_copies_are_equal(ours)
    average = ours.keras_model.layers[1]
    assert np.abs(average.average.numpy()).max() > 0.01
    assert int(average.writes.numpy()) == int(plain.layers[1].writes.numpy()) > 0


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


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mirrored", "in a cond"),
        ("central_storage", "rows"),
    ],
)
def test_trainable_variables_that_a_step_assigns(name: str, what: str) -> None:
    _, ours = assert_trains_as_keras(
        lambda: compiled(Follows(what)), X[:50], Y[:50], strategy=strategy_of(name, 3), **FIT
    )
    assert_copies_are_equal(ours)


def test_one_copy_of_a_variable_cannot_be_written_by_all_in_a_cond() -> None:
    build, central = between_dense(Average, in_cond), strategy_of("central_storage", 3)
    with pytest.raises(Exception, match=r"variable '.*average.*' .* 3 replicas .* share one copy"):
        distributed_fit(build, X[:16], Y[:16], strategy=central)


NONE, FIRST = tf.VariableAggregation.NONE, tf.VariableAggregation.ONLY_FIRST_REPLICA
MEAN, SUM = tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM


def directly(write: Callable[[], tf.Tensor]) -> None:
    write()


def assigned(layer: Any, mean: tf.Tensor) -> None:
    layer.average.assign(0.8 * layer.average + 0.2 * mean)


def subtracted(layer: Any, mean: tf.Tensor) -> None:
    layer.average.assign_sub(0.2 * (layer.average - mean), read_value=False)


def one_entry(layer: Any, mean: tf.Tensor) -> None:
    layer.average[1:2].assign(0.2 * mean[1:2])
    layer.average.scatter_add(tf.IndexedSlices(mean[:1], [0]))


class OwnVariables(keras.layers.Layer):
    """State in variables of TensorFlow's, of which Keras knows nothing."""

    def __init__(
        self,
        where: Callable[..., None] = directly,
        write: Callable[[Any, tf.Tensor], None] = assigned,
        aggregation: tf.VariableAggregation = NONE,
        average: Callable[[], tf.Variable] | None = None,
    ):
        super().__init__()
        self.where, self.change = where, write
        state = {"trainable": False, "aggregation": aggregation}
        self.average = tf.Variable(tf.zeros([3]), **state) if average is None else average()
        state["aggregation"] = FIRST
        self.count = tf.Variable(0, **state, dtype=tf.int64)

    def call(self, x: Any, training: bool = False) -> Any:
        before = tf.convert_to_tensor(self.average)

        def write() -> tf.Tensor:
            self.change(self, tf.reduce_mean(x, axis=0))
            self.count.assign_add(1)
            return tf.constant(1)

        if training:
            self.where(write)
        return x - tf.stop_gradient(before)


@pytest.mark.parametrize(
    ("where", "write", "aggregation"),
    [
        (directly, one_entry, NONE),
        (in_cond, assigned, FIRST),
        (directly, subtracted, MEAN),
    ],
)
def test_own_variables_of_a_layer_are_averaged_over_rows(
    where: Any, write: Any, aggregation: Any
) -> None:
    """Whatever the parts are: 50 rows on three replicas, in batches of 16."""
    plain, ours = assert_trains_as_keras(
        between_dense(OwnVariables, where, write, aggregation),
        X[:50],
        Y[:50],
        strategy=mirrored(3),
        **FIT,
    )
    theirs, mine = plain.layers[1], ours.keras_model.layers[1]
    for expected, variable in [(theirs.average, mine.average), (theirs.count, mine.count)]:
        for copy in ours.strategy.experimental_local_results(variable):
            np.testing.assert_allclose(copy.numpy(), expected.numpy(), rtol=0, atol=1e-6)
    assert np.abs(theirs.average.numpy()).max() > 0.01
    assert int(theirs.count.numpy()) == 8


@functools.cache
def outside() -> tf.Variable:
    """One that was made before the strategy's scope."""
    return tf.Variable(tf.zeros([3]), trainable=False, name="outside")


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("mirrored", (directly, assigned, NONE, outside), "'outside:0' .* share one copy"),
        ("central_storage", (directly, assigned), "'Variable:0' .* share one copy .*add_weight"),
        ("mirrored", (directly, assigned, SUM), "'Variable:0' .* aggregation is SUM.*add_weight"),
    ],
)
def test_own_variables_that_replicas_cannot_combine(
    name: str, args: tuple[Any, ...], message: str
) -> None:
    outside()
    build = between_dense(OwnVariables, *args)
    with pytest.raises(tfd.TrainingError, match=message):
        distributed_fit(build, X[:16], Y[:16], strategy=strategy_of(name))


class Counts(keras.layers.Layer):
    """Counts rows in an integer, and adds up numbers of rows, in variables of aggregation "sum"."""

    def __init__(self, aggregation: str = "sum", dtype_of_count: str = "int64") -> None:
        super().__init__()
        self.aggregation, self.dtype_of_count = aggregation, dtype_of_count

    def build(self, shape: Any) -> None:
        settings = {"initializer": "zeros", "trainable": False, "aggregation": self.aggregation}
        self.rows = self.add_weight(shape=(), dtype=self.dtype_of_count, **settings)
        self.total = self.add_weight(shape=(shape[-1],), **settings)
        self.calls = self.add_weight(shape=(), dtype="int32", **settings)

    def call(self, x: Any) -> Any:
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], self.rows.dtype))
        self.total.assign_add(0.01 * keras.ops.sum(x, axis=0))
        self.calls.assign_add(1)
        return x


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_a_variable_of_aggregation_sum_adds_up_all_rows(name: str) -> None:
    _, ours = assert_trains_as_keras(
        between_dense(Counts), X[:41], Y[:41], strategy=strategy_of(name), **FIT
    )
    layer = ours.keras_model.layers[1]
    assert (int(layer.rows), int(layer.calls)) == (82, 6)


def test_other_variables_cannot_count_the_rows_of_a_part() -> None:
    def build(kind: str) -> keras.Model:
        return compiled(stack(Counts("none", kind), keras.layers.Dense(1)))

    with pytest.raises(tfd.TrainingError, match="same on all 2 replicas"):
        distributed_fit(lambda: build("int64"), X[:16], Y[:16])
    with pytest.warns(UserWarning, match="averaged over 2 replicas.*aggregation=.sum."):
        distributed_fit(lambda: build("float32"), X[:16], Y[:16])
