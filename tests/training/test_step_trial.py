"""Models whose `call` is missing, or takes other things than the data: only their step knows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, distributed_fit, mirrored, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.building.build_from_step import recording_updates

FIT = {"batch_size": 12, "epochs": 2}  # 64 rows: the last batch has 4
Dense = keras.layers.Dense


def stack(rows: int | None, *units: int) -> keras.Model:
    """Dense layers, without variables before the first call where `rows` is None."""
    inputs = [] if rows is None else [keras.Input((rows,))]
    return keras.Sequential([*inputs, *(Dense(n, activation="tanh") for n in units)])


class VAE(keras.Model):
    """As in Keras's examples, its noise made from the data."""

    def __init__(self, built: bool):
        super().__init__()
        self.encoder = stack(5 if built else None, 4)
        self.decoder = stack(2 if built else None, 5)
        self.total = keras.metrics.Mean(name="total")
        self.divergence = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.divergence]

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(data), 2, axis=1)
            noise = tf.sin(100 * data[:, :2])
            made = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
            rebuilt = tf.reduce_mean(tf.reduce_sum((data - made) ** 2, axis=1))
            parts = 1 + log_variance - mean**2 - tf.exp(log_variance)
            divergence = tf.reduce_mean(tf.reduce_sum(-0.5 * parts, axis=1))
            total = rebuilt + divergence
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.divergence.update_state(divergence)
        return {"loss": self.total.result(), "divergence": self.divergence.result()}


class GAN(keras.Model):
    """As in Keras's examples: two optimizers that no one has built, and two tapes."""

    def __init__(self, built: bool):
        super().__init__()
        self.judge = stack(5 if built else None, 4, 1)
        self.maker = stack(3 if built else None, 5)
        self.judge_loss = keras.metrics.Mean(name="judge_loss")
        self.maker_loss = keras.metrics.Mean(name="maker_loss")

    def compile(self, for_judge: Any, for_maker: Any, loss_of: Any) -> None:
        super().compile()
        self.for_judge, self.for_maker, self.loss_of = for_judge, for_maker, loss_of

    @property
    def metrics(self) -> list[Any]:
        return [self.judge_loss, self.maker_loss]

    def train_step(self, real: Any) -> dict[str, Any]:
        noise = tf.sin(100 * real[:, :3])
        rows = tf.shape(real)[0]
        mixed = tf.concat([self.maker(noise), real], axis=0)
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            loss = self.loss_of(labels, self.judge(mixed))
        weights = self.judge.trainable_weights
        self.for_judge.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.judge_loss.update_state(loss)
        with tf.GradientTape() as tape:
            loss = self.loss_of(tf.zeros((rows, 1)), self.judge(self.maker(noise)))
        weights = self.maker.trainable_weights
        self.for_maker.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.maker_loss.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


class Siamese(keras.Model):
    """Called with a pair; the data begins with one image of it."""

    def __init__(self, built: bool):
        super().__init__()
        self.tower = stack(5 if built else None, 4, 3)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, inputs: Any) -> Any:
        one, other = inputs
        return tf.reduce_sum((self.tower(one) - self.tower(other)) ** 2, axis=1)

    def loss_of(self, data: Any) -> Any:
        return tf.reduce_mean(tf.maximum(self(data[:2]) - self((data[0], data[1] + 3)) + 1, 0))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(self.loss_of(data))
        return {"loss": self.tracker.result()}

    def predict_step(self, data: Any) -> Any:
        return self(data[:2])


def vae(built: bool) -> keras.Model:
    model = VAE(built)
    model.compile(keras.optimizers.Adam(0.01))
    return model


def gan(built: bool) -> keras.Model:
    model = GAN(built)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def siamese(built: bool) -> keras.Model:
    model = Siamese(built)
    model.compile(keras.optimizers.Adam(0.01))
    return model


def pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, X[::-1] * 0.5)).batch(12)


@pytest.mark.long("default", "vae-central", "gan-mirrored", "vae-mirrored")
@pytest.mark.parametrize("name", ["default", "mirrored", "central_storage"])
@pytest.mark.parametrize("build", [vae, gan])
def test_models_without_a_call(build: Callable[[bool], keras.Model], name: str) -> None:
    plain, ours = assert_trains_as_keras(lambda: build(True), X, strategy=strategy_of(name), **FIT)
    for optimizer in ("optimizer",) if build is vae else ("for_judge", "for_maker"):
        one, other = (getattr(model, optimizer) for model in (plain, ours.keras_model))
        for a, b in zip(one.variables, other.variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6, err_msg=a.path)
    # Nothing is tried again, and the training goes on.
    assert_same_after_another_epoch(plain, ours)


def assert_same_after_another_epoch(plain: Any, ours: Any) -> None:
    for model in (plain, ours):
        model.fit(X, batch_size=12, shuffle=False, verbose=0)
    for a, b in zip(plain.weights, ours.keras_model.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6, err_msg=a.path)


@pytest.mark.long("default")
@pytest.mark.parametrize("name", ["default", "mirrored"])
def test_a_model_called_with_pairs(name: str) -> None:
    strategy = strategy_of(name)
    plain, ours = assert_trains_as_keras(
        lambda: siamese(True), pairs(), strategy=strategy, epochs=2
    )
    assert ours.evaluate(pairs(), verbose=0) == pytest.approx(
        plain.evaluate(pairs(), verbose=0), rel=1e-5
    )
    expected = plain.predict(pairs(), verbose=0)
    np.testing.assert_allclose(ours.predict(pairs(), verbose=0), expected, atol=1e-5)
    fresh = tfd.distribute(lambda: siamese(False), strategy)
    assert fresh.predict(pairs(), verbose=0).shape == expected.shape
    assert tfd.distribute(lambda: siamese(False), strategy).evaluate(pairs(), verbose=0) > 0


@pytest.mark.long("vae", "siamese")
@pytest.mark.parametrize(("build", "data"), [(vae, X), (gan, X), (siamese, None)])
def test_layers_get_their_variables_from_the_step(build: Any, data: Any) -> None:
    """Layers without `keras.Input` too; their initial weights are other ones, so it must learn."""
    ours, history = distributed_fit(
        lambda: build(False), pairs() if data is None else data, batch_size=None, epochs=4
    )
    assert len(ours.keras_model.trainable_weights) in (4, 6)
    for values in history.values():
        assert len(values) == 4
        assert values[0] != values[-1]


def test_a_step_that_cannot_be_tried_is_named() -> None:
    class Fails(VAE):
        def train_step(self, data: Any) -> dict[str, Any]:
            raise KeyError("of its own")

    def build() -> keras.Model:
        model = Fails(False)
        model.compile("sgd")
        return model

    with pytest.raises(tfd.TrainingError, match=r"Fails has layers without.*its train_step.*own"):
        tfd.distribute(build, mirrored()).fit(X, verbose=0)


def test_a_wrong_call_under_keras_own_steps_stays_keras_error() -> None:
    class Wrong(keras.Model):
        def call(self, inputs: Any) -> Any:
            raise KeyError("of its own")

    def build() -> keras.Model:
        model = Wrong()
        model.compile("sgd", "mse")
        return model

    with pytest.raises(RuntimeError, match="of its own"):
        tfd.distribute(build, mirrored()).fit(X, Y, verbose=0)


def unbuilt_warnings(build: Callable[[], keras.Model]) -> list[str]:
    """Names of the layers of which a short training says that they have unbuilt state."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with contextlib.suppress(tfd.TrainingError, RuntimeError):
            tfd.distribute(build, mirrored()).fit(X[:12], Y[:12], verbose=0)
    texts = [str(warning.message) for warning in told]
    return [text.split("'")[1] for text in texts if "unbuilt state" in text]


class CallFails(VAE):
    def call(self, inputs: Any) -> Any:
        raise KeyError("of its own")


class FromInputsAlone(VAE):
    """Takes the data as Keras gives it to a step, x and y."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data[0])


def test_a_call_that_nothing_uses_is_not_warned_of() -> None:
    class NoCall(FromInputsAlone):
        pass

    class Fails(FromInputsAlone, CallFails):
        pass

    for kind in (NoCall, Fails):

        def build(kind: Any = kind) -> keras.Model:
            model = kind(False)
            model.compile("sgd")
            return model

        assert unbuilt_warnings(build) == []


def test_state_that_stays_unbuilt_is_warned_of() -> None:
    class Forgets(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="forgets")
            self.used, self.unused = Dense(4), Dense(4)

        def call(self, x: Any) -> Any:
            return self.used(x)

    class Inside(FromInputsAlone):
        def __init__(self) -> None:
            super().__init__(False)
            self.encoder = keras.Sequential([Forgets()])

    def own_step() -> keras.Model:
        model = Inside()
        model.compile("sgd")
        return model

    class StepOfKeras(VAE):
        train_step = keras.Model.train_step

    def step_of_keras() -> keras.Model:
        model = StepOfKeras(False)
        model.compile("sgd", "mse")
        return model

    assert "forgets" in unbuilt_warnings(own_step)
    assert len(unbuilt_warnings(step_of_keras)) == 2


def test_steps_tell_what_they_would_train() -> None:
    weight = keras.Variable(np.ones(2, "float32"))
    for optimizer in (
        keras.optimizers.SGD(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        told = []

        def step(x, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * x)
            optimizer.apply_gradients(zip(tape.gradient(loss, [weight]), [weight], strict=True))

        with recording_updates(lambda *args, told=told: told.append(args)):
            kp.call_symbolically(step, keras.KerasTensor((None, 2)))
        assert told == [(optimizer, [weight])]
        assert not optimizer.built
        step(tf.ones((1, 2)))
        assert optimizer.built
        assert len(told) == 1
