"""Gradients that a step computes in other ways than with respect to the weights of a mean loss.

Each is clipped or squared before the optimizer gets it, so that a gradient of one replica, or one
that is weighted twice, gives other norms than one device. Batches of 16 rows on three replicas,
and 3 rows at the end of an epoch.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from training_cases import (
    X,
    Y,
    assert_trains_as_keras,
    compiled,
    mirrored,
)

ROWS = 35
FIT = {"batch_size": 16, "epochs": 2}


class Gradients(keras.Model):
    """Trains with the sum of all gradients, and returns their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def errors(self, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(self(x) - y), -1)

    def train_step(self, data: Any) -> Any:
        x, y = data
        made = {name: getattr(self, name)(x, y) for name in NAMES}
        logs = {}
        for name in made.keys() - OF_ROWS:
            made[name], logs[name] = tf.clip_by_global_norm(made[name], 0.1)
        total = [tf.add_n(each) for each in zip(*made.values(), strict=True)]
        self.optimizer.apply(total, self.trainable_variables)
        return logs

    def beside_inputs(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(self.errors(x, y))
        _, *gradients = tape.gradient(loss, [x, *self.trainable_variables])
        return gradients

    def inside_of_the_tape(self, x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(self.errors(x, y))
            return tape.gradient(loss, self.trainable_variables)

    def by_output_gradients(self, x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x)
            loss = tf.reduce_mean(tf.square(outputs - y))
        upstream = tape.gradient(loss, outputs)
        return tape.gradient(outputs, self.trainable_variables, output_gradients=upstream)

    def of_changed_inputs(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(self.errors(x, y))
        x = x + 5 * tape.gradient(loss, x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.errors(x, y))
        return tape.gradient(loss, self.trainable_variables)

    def of_a_gradient_penalty(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x) ** 2
            slopes = tf.norm(inner.gradient(outputs, x), axis=1)
            loss = tf.reduce_mean(self.errors(x, y)) + tf.reduce_mean(slopes**2)
        return outer.gradient(loss, self.trainable_variables)

    def of_a_tensor(self, x: Any, y: Any) -> Any:
        weights = [tf.convert_to_tensor(each) for each in self.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = tf.matmul(x, weights[0]) + weights[1]
            loss = tf.reduce_mean(tf.square(outputs - y))
        return tape.gradient(loss, weights)

    def of_a_selection(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.square(self(x) - y)
            loss = self.compute_loss(x, y, tf.where(y > 0, self(x), y))
            loss += keras.losses.MeanSquaredError()(errors[y > 0][:, None], 0.0)
            loss += tf.nn.compute_average_loss(errors[y > 0])
        return tape.gradient(loss, self.trainable_variables)

    def of_rows_by_jacobian(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            errors = self.errors(x, y)
        of_rows = tape.jacobian(errors, self.trainable_variables)
        return [tf.reduce_mean(tf.clip_by_value(each, -0.5, 0.5), 0) for each in of_rows]

    def of_rows_by_vectorized_map(self, x: Any, y: Any) -> Any:
        def of_row(row: Any) -> Any:
            with tf.GradientTape() as tape:
                error = tf.reduce_sum(self.errors(row[0][None], row[1][None]))
            gradients = tape.gradient(error, self.trainable_variables)
            return [tf.clip_by_norm(each, 0.5) for each in gradients]

        return [tf.reduce_mean(each, 0) for each in tf.vectorized_map(of_row, (x, y))]


NAMES = [name for name in vars(Gradients) if name.startswith(("beside", "inside", "by_", "of_"))]


OF_ROWS = {"of_rows_by_jacobian", "of_rows_by_vectorized_map"}  # means of a part's rows


def build() -> keras.Model:
    model = Gradients()
    model.build((None, 5))
    return compiled(model, 0.5)


def test_gradients_are_those_of_one_device() -> None:
    assert_trains_as_keras(build, X[:ROWS], Y[:ROWS], strategy=mirrored(3), **FIT)


class Complex(keras.Model):
    def build(self, shape: Any) -> None:
        self.kernel = tf.Variable(np.linspace(1, 2, 5) * (1 - 0.5j), dtype=tf.complex64)

    def call(self, x: Any) -> Any:
        return tf.cast(x, tf.complex64) * self.kernel

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self(data[0])) ** 2)
        self.kernel.assign_sub(0.1 * tape.gradient(loss, self.kernel))
        return {"real": tf.math.real(self.kernel), "imaginary": tf.math.imag(self.kernel)}


def test_complex_gradients_are_weighted_by_rows() -> None:
    def build_complex() -> keras.Model:
        model = Complex()
        model.build((None, 5))
        model.compile()
        return model

    assert_trains_as_keras(
        build_complex, X[:ROWS], Y[:ROWS], strategy=mirrored(2), eager=False, **FIT
    )
