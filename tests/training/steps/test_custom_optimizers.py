"""Optimizers and steps of the user's that do something with gradients that is not linear.

They must see the gradient of the global batch. Batches of 16 on three replicas are parts of 5, 5
and 6 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, compiled, mirrored, stack, strategy_of

import tfdist_ext as tfd

ROWS = 50
FIT = {"batch_size": 16, "epochs": 2}


def build_with(optimizer: Callable[[], Any], kind: Any = keras.Model) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, "tanh")(inputs)
        return compiled(kind(inputs, keras.layers.Dense(1)(hidden)), optimizer())

    return build


class Normalized(keras.optimizers.Adam):
    """Gives each gradient the same norm, whose mean it keeps."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.norms = self.add_variable((len(variables),), name="norms")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        norms = keras.ops.stack([keras.ops.norm(g) for g in grads])
        self.norms.assign(0.5 * self.norms + 0.5 * norms)
        scaled = [g / (self.norms[i] + 1e-3) for i, g in enumerate(grads)]
        super().apply(scaled, trainable_variables)


class Adaptive:
    """A mixin: clips each gradient by the norm of what it is for."""

    def apply_gradients(self, grads_and_vars: Any, **more: Any) -> Any:
        pairs = []
        for g, variable in grads_and_vars:
            largest = 0.05 * keras.ops.maximum(keras.ops.norm(variable), 1e-3)
            norm = keras.ops.maximum(keras.ops.norm(g), 1e-6)
            pairs.append((keras.ops.where(norm > largest, g * largest / norm, g), variable))
        return super().apply_gradients(pairs, **more)


class AdaptiveSGD(Adaptive, keras.optimizers.SGD):
    pass


class Lookahead(keras.optimizers.Optimizer):
    """Every second step, weights go half of the way from slow ones to the inner optimizer's."""

    def __init__(self, inner: Any, **arguments: Any):
        super().__init__(learning_rate=0.0, **arguments)
        self.inner = inner

    def build(self, variables: Any) -> None:
        self.inner.build(variables)
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        self.inner.apply([tf.sign(g) for g in grads], trainable_variables)

        def follow() -> None:
            for slow, fast in zip(self.slow, trainable_variables, strict=True):
                slow.assign(slow + 0.5 * (fast - slow))
                fast.assign(slow)

        keras.ops.cond(self.inner.iterations % 2 == 0, follow, lambda: None)
        self.iterations.assign_add(1)


def scaled_loss() -> Any:
    return keras.optimizers.LossScaleOptimizer(Normalized(0.02), initial_scale=4.0)


OPTIMIZERS = {
    "apply_gradients": lambda: AdaptiveSGD(0.1, momentum=0.9),
    "around loss scaling": lambda: Lookahead(scaled_loss()),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_the_users_gets_the_gradient_of_the_global_batch(optimizer: str) -> None:
    plain, ours = assert_trains_as_keras(
        build_with(OPTIMIZERS[optimizer]), X[:ROWS], Y[:ROWS], strategy=mirrored(3), **FIT
    )
    theirs = ours.keras_model.optimizer.variables
    for one, other in zip(plain.optimizer.variables, theirs, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), atol=1e-6, err_msg=one.path)
        for copy in mirrored(3).experimental_local_results(other.value):
            np.testing.assert_array_equal(copy.numpy(), other.numpy(), err_msg=one.path)


class SharpnessAware(keras.Model):
    """Takes the gradient a step uphill, as SAM does."""

    def gradients(self, data: Any) -> list[Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        gradients = self.gradients(data)
        norm = tf.linalg.global_norm(gradients)
        away = [0.1 * g / (norm + 1e-6) for g in gradients]
        for weight, step in zip(self.trainable_variables, away, strict=True):
            weight.assign_add(step)
        there = self.gradients(data)
        for weight, step in zip(self.trainable_variables, away, strict=True):
            weight.assign_sub(step)
        self.optimizer.apply(there, self.trainable_variables)
        return {"norm": norm}


def test_a_step_gets_the_gradient_of_the_global_batch() -> None:
    build = build_with(lambda: keras.optimizers.Adam(0.02), SharpnessAware)
    assert_trains_as_keras(
        build, X[:ROWS], Y[:ROWS], strategy=strategy_of("central_storage", 3), **FIT
    )


class Noisy(keras.optimizers.SGD):
    """Adds noise to the gradients, as for privacy."""

    by_keras = False

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.generator = keras.random.SeedGenerator(5)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if self.by_keras:
            noise = [keras.random.normal(g.shape, seed=self.generator) for g in grads]
        else:
            noise = [tf.random.normal(g.shape) for g in grads]
        super().apply(list(map(keras.ops.add, grads, noise)), trainable_variables)


class NoisyByKeras(Noisy):
    by_keras = True


def test_noise_of_an_optimizer_is_the_same_on_all_replicas() -> None:
    """tf.random draws on each replica by itself, so the copies of a variable would drift apart."""

    def build(kind: type) -> keras.Model:
        return compiled(stack(keras.layers.Dense(1)), kind(0.1))

    for one_trace in (True, False):
        model = tfd.distribute(lambda: build(Noisy), mirrored(3), one_trace=one_trace)
        with pytest.raises(tfd.TrainingError, match=r"keras.random.SeedGenerator"):
            model.fit(X, Y, verbose=0)
    assert_trains_as_keras(lambda: build(NoisyByKeras), X[:ROWS], Y[:ROWS], **FIT)
