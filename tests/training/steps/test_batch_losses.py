"""Losses that say something of the whole batch, and losses of layers among sums over replicas.

Three replicas and batches of 16: parts of 5, 5 and 6 rows; at the end of 50 rows two replicas
have one row and one has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    X,
    assert_trains_as_keras,
    compiled,
    distributed_fit,
    mirrored,
    stack,
)

import tfdist_ext as tfd
from tfdist_ext.errors import TrainingError

KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
ROWS = 50
FIT = {"batch_size": 16, "epochs": 3}
CLASSES = (X[:ROWS, :1] > 0).astype("float32")
WEIGHTS = np.linspace(0.1, 3, ROWS).astype("float32")
WORDS = np.random.default_rng(4).integers(1, 8, (ROWS, 6))
WORDS[:, 4:] = 0
NEXT = np.random.default_rng(5).integers(0, 3, (ROWS, 6))


def classifier(loss: Any, rate: float = 0.3, **settings: Any) -> Callable[[], keras.Model]:
    return lambda: compiled(stack(keras.layers.Dense(1, "sigmoid")), rate, loss, **settings)


def one_number(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.losses.binary_crossentropy(y, p))


def test_ratios_over_the_batch() -> None:
    loss = keras.losses.Tversky(alpha=0.8, beta=0.3, reduction="sum")
    assert_trains_as_keras(classifier(loss), X[:ROWS], CLASSES, strategy=mirrored(3), **FIT)


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [("mean_with_sample_weight", "rows"), ("sum", "classes")],
)
def test_a_function_that_returns_one_number(reduction: str, weights: str) -> None:
    class OneNumber(keras.losses.Loss):
        def call(self, y: Any, p: Any) -> Any:
            return one_number(y, p)

    given: dict[str, Any] = {
        "rows": {"sample_weight": WEIGHTS},
        "classes": {"class_weight": {0: 1.0, 1: 4.0}},
    }[weights]
    rate = 0.02 if reduction == "sum" else 0.3
    build = classifier(OneNumber(reduction=reduction), rate)
    assert_trains_as_keras(build, X[:ROWS], CLASSES, strategy=mirrored(3), **FIT, **given)


class SquaresAdded(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


def before_synchronized_statistics() -> keras.Model:
    layers = keras.layers
    regularizer = keras.regularizers.L2(0.1)
    return compiled(
        stack(
            layers.Dense(4, activity_regularizer=regularizer),
            SquaresAdded(),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(1),
        )
    )


def before_a_masked_loss() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    words = layers.Embedding(8, 4, mask_zero=True)(inputs)
    regularizer = keras.regularizers.L2(0.1)
    states = layers.LSTM(4, return_sequences=True, activity_regularizer=regularizer)(words)
    added = SquaresAdded()
    added.supports_masking = True
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(added(states)))
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    return model


def test_losses_of_layers_before_a_sum_over_replicas() -> None:
    fit: dict[str, Any] = {"batch_size": 16, "epochs": 2}
    if KERAS < (3, 14):
        with pytest.raises(TrainingError, match="adds the sum over the examples of a replica"):
            distributed_fit(before_a_masked_loss, WORDS, NEXT, **fit)
        return
    for build, x, y in (
        (before_synchronized_statistics, X[:ROWS], CLASSES),
        (before_a_masked_loss, WORDS, NEXT),
    ):
        plain, ours = assert_trains_as_keras(build, x, y, **fit)
        np.testing.assert_allclose(
            ours.evaluate(x, y, batch_size=16, verbose=0),
            plain.evaluate(x, y, batch_size=16, verbose=0),
            rtol=1e-5,
        )


def tokens(y: Any, p: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """The loss of each word, and which words count: a number that differs from row to row."""
    losses = keras.losses.sparse_categorical_crossentropy(y, p)
    return losses, tf.cast(y > 0, losses.dtype)


def masked_mean_of_all_rows(y: Any, p: Any) -> tf.Tensor:
    losses, mask = tfd.all_rows(tokens(y, p))
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


def tagger(loss: Any) -> Callable[[], keras.Model]:
    layers = keras.layers
    return lambda: compiled(
        keras.Sequential([keras.Input([6]), layers.Embedding(8, 4), layers.Dense(3, "softmax")]),
        0.5,
        loss,
    )


def test_a_masked_mean_over_all_rows() -> None:
    build = tagger(masked_mean_of_all_rows)
    assert_trains_as_keras(build, WORDS, NEXT, strategy=mirrored(3), **FIT)


def test_a_masked_mean_by_an_ignored_class() -> None:
    build = tagger(keras.losses.SparseCategoricalCrossentropy(ignore_class=0))
    assert_trains_as_keras(build, WORDS, NEXT, strategy=mirrored(3), **FIT)


class HalfDice(keras.losses.Loss):
    """A loss of the user's own, with one of Keras's that is a ratio over the batch inside."""

    def call(self, y: Any, p: Any) -> Any:
        return 0.5 * keras.losses.Dice()(y, p)


def dice(y: Any, p: Any) -> Any:
    return keras.losses.Dice()(y, p)


def test_losses_of_keras_over_the_batch_inside_of_others() -> None:
    assert_trains_as_keras(
        classifier(HalfDice(), metrics=[dice]), X[:ROWS], CLASSES, strategy=mirrored(3), **FIT
    )


def test_circle_compares_the_rows_of_all_replicas() -> None:
    def build() -> keras.Model:
        layers = keras.layers.Dense(3), keras.layers.UnitNormalization()
        return compiled(stack(*layers), 0.001, keras.losses.Circle(gamma=2))

    given = {"sample_weight": WEIGHTS, "strategy": mirrored(3), **FIT}
    assert_trains_as_keras(build, X[:ROWS], NEXT[:, 0], **given)
