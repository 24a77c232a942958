"""`tfd.all_rows`: losses over the rows of the global batch train as on one device.

Queues of all rows: test_row_writes.py. A step with one loss for each row of the global batch:
synchronous/test_exact_workers.py.
"""

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
    assert_same_history,
    assert_same_weights,
    compiled,
    distributed_fit,
    plain_fit,
    stack,
    strategy_of,
)

import tfdist_ext as tfd

VIEWS = np.stack([X[:41], X[:41] + 0.3 * X[::-1][:41]], axis=1)  # (rows, 2 views, 5)
WIDTH = 3


def similarity(one: Any, other: Any) -> Any:
    one, other = ops.normalize(one, axis=1), ops.normalize(other, axis=1)
    return ops.matmul(one, ops.transpose(other)) / 0.5


class InLayer(keras.layers.Layer):
    """Gathers in `call`, where a layer gives a loss to `add_loss`."""

    def call(self, x: Any, training: bool = False) -> Any:
        every = tfd.all_rows(x)
        distances = ops.sum(ops.square(every[:, None] - every[None]), axis=-1)
        spread = ops.exp(-ops.mean(distances, axis=1))
        self.add_loss(0.02 * spread)
        return x - ops.mean(every, axis=0)


def with_layer() -> keras.Model:
    def gathered_loss(y: Any, x: Any) -> Any:
        return ops.mean(ops.square(similarity(*tfd.all_rows((x, x))) - 1.0)) + ops.mean(
            (x - y) ** 2
        )

    layers = keras.layers.Dense(WIDTH, "tanh"), InLayer(), keras.layers.Dense(1)
    return compiled(stack(*layers), keras.optimizers.Adam(0.02), gathered_loss)


def test_in_a_layer_and_a_loss_function() -> None:
    """Batches of 8, 8, 8 and 1 rows: in the last one a single replica has a row."""
    data, fit = (X[:25], X[:25, :1]), {"batch_size": 8, "epochs": 3}
    plain, expected = plain_fit(with_layer, *data, eager=False, **fit)
    ours, history = distributed_fit(with_layer, *data, **fit)
    assert_same_weights(plain, ours, 1e-5)
    assert_same_history(expected, history)


class Gathers(keras.layers.Layer):
    """Of each row: all rows, in several types."""

    def call(self, x: Any) -> Any:
        given = {"half": tf.cast(x, "float16"), "flag": x > 0, "other": [None, tf.cast(x, "int8")]}
        every = tfd.all_rows(given)
        assert every["other"][0] is None
        of_types = [every["half"], every["flag"], every["other"][1]]
        assert [each.dtype.name for each in of_types] == ["float16", "bool", "int8"]
        rows = tf.stack([tf.cast(each, "float32") for each in of_types])
        assert rows.shape[1:] == [None, 5]
        return tf.tile(rows[None], [tf.shape(x)[0], 1, 1, 1])


def test_rows_are_in_the_order_of_the_batch() -> None:
    ours = tfd.distribute(stack(Gathers()), strategy_of("mirrored", 3))
    for rows in (2, 7):
        x = np.round(10 * X[:rows])
        assert tfd.all_rows(x) is x  # outside of steps
        every = ours.predict(x, verbose=0)
        assert every.shape == (rows, 3, rows, 5)
        np.testing.assert_array_equal(every, np.broadcast_to([[x, x > 0, x]], every.shape))


def trained_with(gathered: Callable[[Any], Any]) -> None:
    """A step of a model whose layer calls `gathered`, on two replicas."""

    class Calls(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                gathered(x)
            return x

    model = compiled(stack(Calls(), keras.layers.Dense(1)))
    tfd.distribute(model, strategy_of("mirrored")).fit(X[:8], X[:8, :1], batch_size=8, verbose=0)


@pytest.mark.parametrize(
    ("gathered", "message"),
    [
        (
            lambda x: tfd.all_rows(tf.concat([x, x], axis=0)),
            "axis 0 of x must hold the rows of this replica.* before rows are dropped",
        ),
        (lambda x: tfd.all_rows(tf.as_string(x)), "got a tensor of .* string"),
        (lambda x: tfd.all_rows(1.0), r"got a tensor of shape \(\)"),
    ],
)
def test_what_cannot_be_gathered(gathered: Any, message: str) -> None:
    """Inside of a tf.function: test_custom_steps.py."""
    with pytest.raises(tfd.TrainingError, match=message):
        trained_with(gathered)


def test_in_batch_negatives_of_a_part_are_warned_of() -> None:
    def loss(candidates: Callable[[Any], Any]) -> Callable[..., Any]:
        def of_rows(y: Any, x: Any) -> Any:
            logits = tf.matmul(x, candidates(x), transpose_b=True)
            return tf.reduce_mean(tf.nn.log_softmax(logits))

        return of_rows

    def train(loss: Any) -> None:
        inputs = keras.Input((None, 5))  # a sequence of any length: attention compares its places
        hidden = keras.layers.MultiHeadAttention(1, 2)(inputs, inputs)
        hidden = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(hidden))
        gram = ops.matmul(hidden[:, :, None], hidden[:, None, :])
        outputs = keras.layers.Dense(2)(keras.layers.Flatten()(gram))
        ours = tfd.distribute(
            compiled(keras.Model(inputs, outputs), "sgd", loss), strategy_of("mirrored")
        )
        ours.fit(VIEWS[:8], VIEWS[:8, 0, :1], batch_size=8, verbose=0)

    with pytest.warns(
        UserWarning, match="step compares rows of the batch.*of 2 replicas.*all_rows"
    ):
        train(loss(lambda x: x))
    train(loss(tfd.all_rows))  # warnings are errors
    train("mse")
