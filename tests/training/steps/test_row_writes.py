"""Rows of a part that a step writes into a variable are an error; statistics of them are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from training_cases import (
    X,
    Y,
    assert_same_weights,
    assert_trains_as_keras,
    compiled,
    distributed_fit,
    plain_fit,
    stack,
    strategy_of,
)

import tfdist_ext as tfd

ROWS, WIDTH = 30, 3


class Keeps(keras.layers.Layer):
    """A queue of rows, and other state; `write` is called in each step of training."""

    def __init__(self, write: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.write = write

    def build(self, shape: Any) -> None:
        state = {"initializer": "ones", "trainable": False}
        self.queue = self.add_weight(shape=(ROWS, WIDTH), name="queue", **state)
        self.pointer = self.add_weight(shape=(), dtype="int32", name="pointer", **state)
        self.counts = self.add_weight(shape=(ROWS,), name="counts", **state)
        self.square = self.add_weight(shape=(WIDTH, WIDTH), name="square", **state)
        self.last = keras.metrics.Sum(name="last")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.write(self, x)
        return x


def concat(layer: Any, x: Any) -> None:
    kept = layer.queue[: -ops.shape(x)[0]]
    layer.queue.assign(ops.concatenate([ops.stop_gradient(ops.normalize(x, axis=1)), kept]))


def slice_update(layer: Any, x: Any) -> None:
    queue = tf.convert_to_tensor(layer.queue)
    layer.queue.assign(ops.slice_update(queue, tf.stack([layer.pointer * 1, 0]), x))


def in_loop(layer: Any, x: Any) -> None:
    tf.while_loop(lambda i: i < 2, lambda i: [concat(layer, x), (i + 1,)][1], [0])


def labels(layer: Any, x: Any) -> Any:
    """For each row of the batch a row of the queue, as its class in center loss."""
    return tf.cast(tf.abs(x[:, :1]) * 9, tf.int32) % ROWS


def scatter_of_a_tensor(layer: Any, x: Any) -> None:
    queue = tf.convert_to_tensor(layer.queue)
    layer.queue.assign(tf.tensor_scatter_nd_add(queue, labels(layer, x), 0.1 * x))


def slices(layer: Any, x: Any) -> None:
    shape = tf.constant([ROWS, WIDTH])
    layer.queue.assign_add(tf.IndexedSlices(0.1 * x, labels(layer, x)[:, 0], shape))


def scatter_of_the_variable(layer: Any, x: Any) -> None:
    layer.queue.value.scatter_add(tf.IndexedSlices(0.1 * x, labels(layer, x)[:, 0]))


def one_class(layer: Any, x: Any) -> None:
    layer.queue.value[labels(layer, x)[0, 0]].assign(tf.zeros(WIDTH))


def model_that_writes(write: Any) -> keras.Model:
    return compiled(stack(keras.layers.Dense(WIDTH), Keeps(write), keras.layers.Dense(1)), "sgd")


BY_CLASS = [scatter_of_a_tensor, slices, scatter_of_the_variable]


@pytest.mark.parametrize("write", [concat, in_loop, *BY_CLASS, one_class])
def test_rows_of_a_part_are_refused(write: Any) -> None:
    strategy = strategy_of("central_storage" if write is in_loop else "mirrored")
    model = tfd.distribute(lambda: model_that_writes(write), strategy)
    message = "assigns to '.*/queue(:0)?' must be the same on all 2 replicas, .* rows .*all_rows"
    with pytest.raises(tfd.TrainingError, match=message):
        model.fit(X, Y, batch_size=16, verbose=0)


@pytest.mark.parametrize("write", BY_CLASS)
def test_rows_of_all_replicas_are_written_by_class(write: Any) -> None:
    def of_all(layer: Any, x: Any) -> None:
        write(layer, tf.stop_gradient(tfd.all_rows(x)))

    _, ours = assert_trains_as_keras(
        lambda: model_that_writes(of_all), X[:50], Y[:50], batch_size=16, epochs=2
    )
    assert np.abs(ours.keras_model.layers[1].queue.numpy() - 1).max() > 0.01


def statistics(layer: Any, x: Any) -> None:
    """What is written without single rows of the batch."""
    count = ops.cast(ops.shape(x)[0], "float32")
    average = ops.mean(x, axis=0)
    layer.pointer.assign_add(1)
    codes = ops.argmax(ops.matmul(x, ops.transpose(layer.queue)), axis=1)
    codes = ops.one_hot(codes, ROWS)  # as in a vector quantizer
    layer.counts.assign(0.9 * layer.counts + 0.1 * ops.mean(codes, axis=0))
    sums = ops.matmul(ops.transpose(codes), x) / count
    layer.queue.assign(0.9 * layer.queue + 0.1 * sums)
    covariance = ops.matmul(ops.transpose(x), x) / count
    some = ops.stack([average, layer.square[0], ops.zeros(WIDTH)])
    layer.square.assign(0.8 * layer.square + 0.1 * covariance + 0.1 * some)


def test_statistics_of_the_rows_are_not() -> None:
    """Beside Keras's own layers that write: and they are those of one device."""

    def build() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = keras.layers.SpectralNormalization(keras.layers.Dense(WIDTH))(inputs)
        hidden = keras.layers.BatchNormalization(synchronized=True)(Keeps(statistics)(hidden))
        return compiled(keras.Model(inputs, keras.layers.Dense(1)(hidden)), "sgd")

    fit = {"batch_size": 16, "epochs": 2}
    # A last batch of two rows that are nearly alike would have a variance of little but rounding.
    plain, _ = plain_fit(build, X[:51], Y[:51], eager=False, **fit)
    ours, _ = distributed_fit(build, X[:51], Y[:51], **fit)
    assert_same_weights(plain, ours, 1e-5)


def test_rows_of_all_replicas_are_not() -> None:
    def gathered(layer: Any, x: Any) -> None:
        every = tfd.all_rows(x)
        slice_update(layer, every)
        layer.pointer.assign((layer.pointer + ops.shape(every)[0]) % 14)
        concat(layer, every)

    assert_trains_as_keras(
        lambda: model_that_writes(gathered),
        X[:50],
        Y[:50],
        strategy=strategy_of("central_storage"),
        eager=False,
        batch_size=16,
        epochs=2,
    )
