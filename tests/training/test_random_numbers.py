"""`keras.random` without a seed in steps: new numbers each step, the same on all replicas."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, strategy_of

import tfdist_ext as tfd

STEPS = 8  # 4 batches, 2 epochs
FIT = {"batch_size": 16, "epochs": 2}


class Noisy(keras.layers.Layer):
    """Notes what it draws, and lets the rows through as they are."""

    seen: list[tuple[float, ...]] = []  # noqa: RUF012

    def call(self, x: Any) -> Any:
        return x + 0 * self._noted(keras.random.normal((3,)))[0]

    def _noted(self, noise: Any) -> Any:
        tf.py_function(lambda value: self.seen.append(tuple(value.numpy())), [noise], [])
        return noise


class NoisyInALoop(Noisy):
    def call(self, x: Any) -> Any:
        def draw(i: Any, x: Any) -> Any:
            return i + 1, x + 0 * self._noted(keras.random.uniform((3,)))[0]

        return tf.while_loop(lambda i, _: i < 2, draw, (tf.constant(0), x))[1]


def noisy(layer: type[Noisy] = Noisy, **settings: Any) -> keras.Model:
    model = keras.Sequential([layer(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", **settings)
    return model


def drawn() -> list[tuple[float, ...]]:
    seen, Noisy.seen[:] = list(Noisy.seen), []
    return seen


@pytest.mark.long("default", "central_storage")
@pytest.mark.parametrize("name", ["default", "mirrored", "central_storage"])
def test_noise_is_new_in_each_step_of_each_epoch(name: str) -> None:
    drawn()
    strategy = strategy_of(name)
    replicas = strategy.num_replicas_in_sync
    _, ours = assert_trains_as_keras(noisy, X, Y, strategy=strategy, **FIT)
    seen = drawn()[STEPS:]  # the plain model's first
    assert len(seen) == STEPS * replicas
    # TensorFlow runs the steps one after another, and one draw of a step on each replica.
    by_step = [seen[i : i + replicas] for i in range(0, len(seen), replicas)]
    assert all(len(set(step)) == 1 for step in by_step)
    assert len(set(seen)) == STEPS
    ours.evaluate(X, Y, batch_size=16, verbose=0)
    ours.predict(X, batch_size=16, verbose=0)
    ours.fit(X, Y, batch_size=16, verbose=0)
    later = drawn()
    assert len(later) == 12 * replicas
    assert len({*seen, *later}) == STEPS + 12


@pytest.mark.long("central_storage")
@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_noise_in_a_loop_of_the_layer(name: str) -> None:
    drawn()
    assert_trains_as_keras(lambda: noisy(NoisyInALoop), X, Y, strategy=strategy_of(name), **FIT)
    seen = drawn()[2 * STEPS :]
    assert len(seen) == 2 * STEPS * 2
    assert len(set(seen)) == 2 * STEPS


def test_noise_of_eager_steps() -> None:
    drawn()
    assert_trains_as_keras(lambda: noisy(run_eagerly=True), X, Y, **FIT)
    assert len(set(drawn()[STEPS:])) == STEPS


def test_a_seed_for_all_makes_it_repeatable() -> None:
    def once(seed: int) -> set[tuple[float, ...]]:
        drawn()
        keras.utils.set_random_seed(seed)
        tfd.distribute(noisy, strategy_of("mirrored")).fit(X, Y, verbose=0)
        return set(drawn())

    assert once(5) == once(5)
    assert not once(5) & once(6)
