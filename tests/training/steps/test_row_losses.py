"""Losses that are one number for each example: their gradient is that of the sum, as in Keras.

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
    Y,
    assert_trains_as_keras,
    compiled,
    mirrored,
    stack,
    strategy_of,
)

FIT = {"batch_size": 16, "epochs": 2}


def same(build: Callable[[], keras.Model], **arguments: Any) -> tuple[Any, Any]:
    arguments = {"strategy": mirrored(3), **FIT, **arguments}
    return assert_trains_as_keras(build, X[:50], Y[:50], **arguments)


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def errors(self, data: Any) -> tf.Tensor:
        x, y = data
        return tf.reduce_sum((y - self(x)) ** 2, axis=1)


RATE = 0.005


class MeanOfCompiled(Net):
    """Reduces what the compiled loss has left as it is: now it is a mean, and no sum."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(super().compute_loss(x, y, y_pred))


class CompiledAndOwn(Net):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred) + 0.1 * tf.abs(y[:, 0] - y_pred[:, 0])


@pytest.mark.parametrize(
    "model", [MeanOfCompiled, CompiledAndOwn], ids=lambda model: model.__name__
)
def test_what_compute_loss_returns(model: type[Net]) -> None:
    plain, ours = same(
        lambda: compiled(model(), RATE, keras.losses.MeanSquaredError(reduction=None))
    )
    assert ours.evaluate(X[:50], Y[:50], batch_size=16, verbose=0) == pytest.approx(
        plain.evaluate(X[:50], Y[:50], batch_size=16, verbose=0), rel=1e-5
    )


class Step(Net):
    """Differentiates `targets`, whatever they are."""

    weights_of_rows: Any = None

    def targets(self, data: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            targets = self.targets(data)
        upstream = None if self.weights_of_rows is None else self.weights_of_rows(data)
        gradients = tape.gradient(targets, self.trainable_variables, output_gradients=upstream)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(self.errors(data))
        return {"loss": self._loss_tracker.result()}


class Weighted(Step):
    targets = Net.errors
    weights_of_rows = staticmethod(lambda data: tf.abs(data[0][:, 0]))


class TwoMeans(Step):
    """A vector that has no rows: a loss for each task."""

    def targets(self, data: Any) -> Any:
        mean = tf.reduce_mean(self.errors(data))
        return tf.stack([mean, 2 * mean, 0.5 * mean])


def test_a_gradient_that_weights_the_rows() -> None:
    same(lambda: compiled(Weighted(), RATE))


class Columns(Step):
    """Numbers for each row in a second dimension."""

    def targets(self, data: Any) -> Any:
        return (data[0] - self(data[0])) ** 2


@pytest.mark.parametrize("model", [Columns, TwoMeans])
def test_batches_of_one_size(model: type[Step]) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=True)
    assert_trains_as_keras(lambda: compiled(model(), RATE), dataset, epochs=2)


class AddsLosses(keras.layers.Layer):
    """One loss for each row, and one for each column of a weight."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * tf.reduce_sum(x**2, axis=1))
        self.add_loss(0.1 * (self.scale * 1.0) ** 2)
        return x * self.scale


def test_losses_of_rows_that_a_layer_adds() -> None:
    dense = keras.layers.Dense
    plain, ours = same(lambda: compiled(stack(dense(3), AddsLosses(), dense(1)), RATE))
    assert ours.evaluate(X[:50], Y[:50], batch_size=16, verbose=0) == pytest.approx(
        plain.evaluate(X[:50], Y[:50], batch_size=16, verbose=0), rel=1e-5
    )


class Averages(Net):
    """A step of TensorFlow's tutorial: weighted rows, and a regularizer divided by replicas."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            weights = data[0][:, 0] ** 2
            loss = tf.nn.compute_average_loss(self.errors(data), weights)
            kernel = self.dense.kernel
            loss += tf.nn.scale_regularization_loss(0.1 * tf.nn.l2_loss(kernel))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"average": loss}


def test_a_sum_over_the_rows_of_the_global_batch() -> None:
    same(lambda: compiled(Averages(), RATE), strategy=strategy_of("central_storage", 3))


def test_a_compiled_loss_over_the_global_batch_size() -> None:
    """The last batch has 2 rows, and its sum is divided by 16 on one device, too."""

    def loss(y: Any, p: Any) -> tf.Tensor:
        losses = tf.reduce_sum((y - p) ** 2, 1)
        return tf.nn.compute_average_loss(losses, global_batch_size=16)

    same(lambda: compiled(Net(), RATE, loss))


class SumOfOutputs(keras.losses.Loss):
    """One number for each output, not for each row."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=0)


def test_a_sum_of_numbers_that_belong_to_no_row() -> None:
    def build() -> keras.Model:
        return compiled(stack(keras.layers.Dense(3)), RATE, SumOfOutputs(reduction="sum"))

    assert_trains_as_keras(build, X[:48], Y[:48], strategy=mirrored(3), **FIT)


class AddsTwoForEachRow(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.reshape(x[:, :2] ** 2, [-1]))
        return x


def test_an_added_loss_with_two_numbers_for_each_row() -> None:
    def build() -> keras.Model:
        layers = keras.layers.Dense(4), AddsTwoForEachRow(), keras.layers.Dense(1)
        return compiled(stack(*layers), RATE)

    same(build)


def known(y: Any, p: Any) -> Any:
    return tf.square(y - p)[~tf.math.is_nan(y)]


class Positive(keras.losses.Loss):
    def call(self, y: Any, p: Any) -> Any:
        return tf.boolean_mask(tf.abs(y - p), y > 0)


def by_place(y: Any, p: Any) -> Any:
    return tf.gather_nd(tf.square(y - p), tf.where(y < 0.5))


def test_losses_of_selected_entries_are_divided_by_all_of_them() -> None:
    """The replicas select different numbers of entries, and some none."""

    def build() -> keras.Model:
        inputs = keras.Input((5,))
        outputs = [keras.layers.Dense(3, name=f"output{i}")(inputs) for i in range(3)]
        return compiled(keras.Model(inputs, outputs), RATE, [known, Positive(), by_place])

    labels = X[:50, :3].copy()
    labels[::3] = np.nan
    targets = [labels, X[:50, :3], X[:50, 1:4]]
    assert_trains_as_keras(build, X[:50], targets, strategy=mirrored(3), eager=False, **FIT)


class AddsMeansOfWords(keras.layers.Layer):
    """A mean for each word. The number of words is unknown while the step is traced."""

    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_mean(x**2, [0, 2]))
        return x


def test_an_added_loss_with_one_number_for_each_word() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((None, 5))
        words = AddsMeansOfWords()(keras.layers.Dense(4)(inputs))
        outputs = keras.layers.Dense(1)(keras.ops.mean(words, axis=1))
        return compiled(keras.Model(inputs, outputs), RATE)

    words = np.stack([X[:50], 2 * X[:50]], axis=1)
    assert_trains_as_keras(build, words, Y[:50], strategy=mirrored(3), **FIT)
