"""Models that only their custom step can build, and stateful layers, which need one replica."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    X,
    Y,
    assert_same_weights,
    assert_trains_as_keras,
    distributed_fit,
    mirrored,
    plain_fit,
)

import tfdist_ext as tfd
from tfdist_ext.training.building import reject_stateful_rnns

FIT = {"batch_size": 12, "epochs": 2}  # 64 rows: the last batch has 4
Dense = keras.layers.Dense


def stack(rows: int | None, *units: int) -> keras.Model:
    """Dense layers, without variables before the first call where `rows` is None."""
    inputs = [] if rows is None else [keras.Input((rows,))]
    return keras.Sequential([*inputs, *(Dense(n, activation="tanh") for n in units)])


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


def gan(built: bool, kind: type[GAN] = GAN) -> keras.Model:
    model = kind(built)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def test_models_without_a_call() -> None:
    plain, ours = assert_trains_as_keras(lambda: gan(True), X, **FIT)
    for optimizer in ("for_judge", "for_maker"):
        one, other = (getattr(model, optimizer) for model in (plain, ours.keras_model))
        for a, b in zip(one.variables, other.variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6, err_msg=a.path)
    # Nothing is tried again, and the training goes on.
    for model in (plain, ours):
        model.fit(X, batch_size=12, shuffle=False, verbose=0)
    assert_same_weights(plain, ours)


def test_several_optimizers_of_an_existing_model_come_along() -> None:
    """Both go on with their moments and momenta, although `compile` has arguments of its own."""
    plain, ours = (plain_fit(lambda: gan(True), X, batch_size=16)[0] for _ in range(2))
    tfd.distribute(ours, mirrored())
    ours.run_eagerly = False
    for model in (plain, ours):
        model.fit(X, batch_size=16, shuffle=False, verbose=0)
    assert_same_weights(plain, ours)


def test_layers_get_their_variables_from_the_step() -> None:
    """Layers without `keras.Input` too; their initial weights are other ones, so it must learn.

    A call of the model that fails is not used, and not warned of.
    """

    class FromInputsAlone(GAN):
        def call(self, inputs: Any) -> Any:
            raise KeyError("of its own")

        def train_step(self, data: Any) -> dict[str, Any]:
            return super().train_step(data[0])

    ours, history = distributed_fit(lambda: gan(False, FromInputsAlone), X, Y, epochs=4)
    assert len(ours.keras_model.trainable_weights) == 6
    for values in history.values():
        assert len(values) == 4
        assert values[0] != values[-1]


def test_a_step_that_cannot_be_tried_is_named() -> None:
    class Fails(GAN):
        def train_step(self, data: Any) -> dict[str, Any]:
            raise KeyError("of its own")

    with pytest.raises(
        tfd.TrainingError, match=r"Fails has layers that are not built.*a train_step.*own"
    ):
        tfd.distribute(lambda: gan(False, Fails), mirrored()).fit(X, verbose=0)


class WithoutSlots(keras.optimizers.SGD):
    def build(self, variables: Any) -> None:
        super().build(variables)
        raise ValueError("no slots")


class WithOwnStep(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data)


@pytest.mark.parametrize("kind", [keras.Sequential, WithOwnStep])
def test_an_optimizer_that_cannot_be_built_fails_with_its_own_error(
    kind: type[keras.Model],
) -> None:
    """Each time: Keras says that it is built before it creates the slots."""
    model = kind([keras.Input((5,)), Dense(1)])
    model.compile(WithoutSlots(0.1, momentum=0.9), "mse")
    ours = tfd.distribute(model, mirrored())
    for _ in range(2):
        with pytest.raises(ValueError, match="no slots"):
            ours.fit(X, Y, verbose=0)


SEQUENCES = np.random.default_rng(3).normal(size=(48, 3, 5)).astype("float32")


def stateful() -> keras.Model:
    first = keras.layers.LSTM(4, stateful=True, return_sequences=True, name="first")
    both = keras.layers.Bidirectional(keras.layers.GRU(4, stateful=True, name="second"))
    inputs = keras.Input(batch_shape=(16, 3, 5))
    model = keras.Sequential([inputs, first, both, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_stateful_layers_keep_their_state_on_one_replica() -> None:
    plain, ours = assert_trains_as_keras(
        stateful, SEQUENCES, Y[:48], strategy=mirrored(1), batch_size=16, epochs=2
    )
    state = ours.keras_model.layers[0].states[0].numpy()
    np.testing.assert_allclose(state, plain.layers[0].states[0].numpy(), atol=1e-6)
    expected = plain.predict(SEQUENCES, batch_size=16, verbose=0)
    predicted = ours.predict(SEQUENCES, batch_size=16, verbose=0)
    np.testing.assert_allclose(predicted, expected, atol=1e-6)


REFUSED = r"'first', 'backward_second', 'forward_second' must not be stateful.* stateful=False"


def test_stateful_layers_are_refused_on_several_replicas() -> None:
    ours = tfd.distribute(stateful, mirrored(2))
    for call in (ours.fit, ours.evaluate):
        with pytest.raises(tfd.TrainingError, match=f"{REFUSED}.*one_device"):
            call(SEQUENCES, Y[:48], batch_size=16, verbose=0)


def test_stateful_layers_are_refused_on_parameter_servers() -> None:
    servers = tf.distribute.ParameterServerStrategy.__new__(tf.distribute.ParameterServerStrategy)
    with pytest.raises(tfd.TrainingError, match="stateful on ParameterServerStrategy"):
        reject_stateful_rnns(stateful(), servers)
