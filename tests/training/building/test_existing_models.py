"""distribute(model): weights, compile settings and optimizer state come along."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    classifier,
    mirrored,
    plain_fit,
    stack,
    steps_taken,
    weights_of,
)

import tfdist_ext as tfd

FIT = {"batch_size": 16, "verbose": 0, "shuffle": False}


def compiled(model: keras.Model, optimizer=None, **settings) -> keras.Model:
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, **{"loss": "mse", "metrics": ["mae"], **settings})
    return model


def swish_of_mine(x):
    return x * tf.nn.sigmoid(x)


class Scaling(keras.layers.Layer):
    """Has a config, and an activation that the config does not tell."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.activation = None

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), regularizer="l2")

    def call(self, x):
        out = x @ self.kernel
        return self.activation(out) if self.activation else out

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class WithConfig(keras.Model):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first = keras.layers.Dense(units, activation=swish_of_mine)
        self.second = Scaling(1)

    def call(self, x):
        return self.second(self.first(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class WithoutConfig(keras.Model):
    """Nothing to configure, so nothing to tell."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, activation="tanh")
        self.second = keras.layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))


class NotCopyable(keras.Model):
    """Would come out with another rate, and the same weights."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.dropout = keras.layers.Dropout(rate)
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(self.dropout(x, training=training))


class TellsLessThanAll(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return super().get_config()


class OwnSGD(keras.optimizers.SGD):
    pass


def functional_with_lambdas() -> keras.Model:
    """With shared and nested layers, and operations between layers."""
    x = keras.Input((5,))
    shared = keras.layers.Dense(5, activation="tanh")
    h = keras.layers.Lambda(lambda v: v * 2)(keras.ops.relu(shared(shared(x * 2.0))) + x)
    inner = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), Scaling(2)])
    h = keras.layers.Dense(4, activation=lambda v: tf.nn.relu(v) + 0.1)(inner(h))
    h = keras.layers.Dense(4, activation=lambda v: tf.tanh(v) - 0.2)(h)
    return compiled(
        keras.Model(x, keras.layers.Dense(1)(h)),
        loss=lambda true, predicted: tf.reduce_mean((true - predicted) ** 2, -1),
        metrics=[lambda true, predicted: tf.reduce_mean(tf.abs(true - predicted), -1)],
    )


def with_a_function_set_afterwards() -> keras.Model:
    model = WithConfig(3)
    model.second.activation = lambda v: tf.tanh(v) * 3
    return compiled(model)


def partly_frozen() -> keras.Model:
    model = WithoutConfig()
    model.first.trainable = False
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    return compiled(model, OwnSGD(rate, momentum=0.9))


MODELS = [
    pytest.param(functional_with_lambdas, id="functional with lambdas"),
    pytest.param(with_a_function_set_afterwards, id="subclass with config"),
    pytest.param(partly_frozen, id="frozen layer, own optimizer, schedule"),
]


@pytest.mark.parametrize("build", MODELS)
def test_training_goes_on_as_in_keras(build: Callable[[], keras.Model]) -> None:
    original, _ = plain_fit(build, X, Y, batch_size=16, epochs=2)
    before = weights_of(original)
    ours = tfd.distribute(original, mirrored())
    assert_same_weights(original, ours, tolerance=0)
    assert steps_taken(ours) == 8
    history = ours.fit(X, Y, **FIT).history
    # The original stays as it was, compiled and all.
    assert all((a == b).all() for a, b in zip(before, weights_of(original), strict=True))
    assert steps_taken(original) == 8
    assert original.compiled
    expected = original.fit(X, Y, **FIT).history
    assert_same_weights(original, ours)
    assert_same_history(expected, history)


def test_a_model_that_is_not_compiled_predicts() -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    ours = tfd.distribute(model, mirrored())
    np.testing.assert_allclose(
        ours.predict(X[:7], verbose=0), model.predict(X[:7], verbose=0), atol=1e-6
    )
    for call in (ours.fit, ours.evaluate):
        with pytest.raises(tfd.TrainingError, match="the model must be compiled for"):
            call(X, Y)


def test_frozen_after_training_and_not_compiled_again() -> None:
    """The optimizer keeps what it was built for, in its order."""
    original, _ = plain_fit(lambda: compiled(WithoutConfig()), X, Y, batch_size=16)
    original.first.trainable = False
    ours = tfd.distribute(original, mirrored())
    # Keras's step, once traced, would train on what is frozen now: let it look again.
    original.make_train_function(force=True)
    expected = original.fit(X, Y, **FIT).history
    history = ours.fit(X, Y, **FIT).history
    assert_same_weights(original, ours)
    assert_same_history(expected, history)
    optimizers = original.optimizer, ours.keras_model.optimizer
    for a, b in zip(*(optimizer.variables for optimizer in optimizers), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6, err_msg=a.path)


def test_a_model_that_cannot_be_copied_needs_a_builder() -> None:
    for model, what in [
        (NotCopyable(0.1), "argument 'rate'"),
        (TellsLessThanAll(1), "shapes"),
    ]:
        compiled(model, run_eagerly=True).fit(X, Y, **FIT)
        with pytest.raises(tfd.TrainingError, match=f"{what}.*Pass a function that builds"):
            tfd.distribute(model, mirrored())


@pytest.mark.parametrize(
    ("given", "strategy", "message"),
    [
        (3, mirrored, "must be a keras.Model, or a function"),
        (lambda: 3, mirrored, "must return a keras.Model, got 3"),
        (classifier(), lambda: "mirrored", r"create_strategy\(name\)"),
    ],
)
def test_other_things_than_a_model_and_a_strategy_are_refused(given, strategy, message) -> None:
    with pytest.raises(tfd.TrainingError, match=message):
        tfd.distribute(given, strategy())


def test_variables_from_outside_of_the_strategy() -> None:
    """The model gets a copy inside; what is outside stays as it is."""
    outside = keras.layers.Dense(4)
    outside.build((None, 5))

    def around_it() -> keras.Model:
        return compiled(keras.Sequential([keras.Input((5,)), outside, keras.layers.Dense(1)]))

    before = outside.get_weights()[0]
    model = tfd.distribute(around_it, mirrored())
    np.testing.assert_array_equal(weights_of(model)[0], before)
    model.fit(X, Y, **FIT)
    assert steps_taken(model) == 4
    assert abs(weights_of(model)[0] - before).max() > 0.001
    np.testing.assert_array_equal(outside.get_weights()[0], before)


@keras.saving.register_keras_serializable("tests")
class TwoOptimizers(keras.Model):
    """Has a compile() with arguments of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.one = keras.layers.Dense(1)
        self.two = keras.layers.Dense(1)

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)
        self.built = True

    def call(self, x):
        return self.one(x) + self.two(x)

    def compile(self, for_one, for_two, loss_of, scale=1.0):
        super().compile()
        self.for_one, self.for_two = for_one, for_two
        self.loss_of, self.scale = loss_of, scale

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.scale * self.loss_of(y, self(x, training=True))
        for layer, optimizer in ((self.one, self.for_one), (self.two, self.for_two)):
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@keras.saving.register_keras_serializable("tests")
class WithProtocol(TwoOptimizers):
    """Keras can compile it after loading."""

    def compile(self, for_one, for_two, loss_of, factor):
        super().compile(for_one, for_two, loss_of, scale=2 * factor)
        self.factor = factor

    def get_compile_config(self):
        to_config = keras.saving.serialize_keras_object
        names = ("for_one", "for_two", "loss_of", "factor")
        return {name: to_config(getattr(self, name)) for name in names}

    def compile_from_config(self, config):
        from_config = keras.saving.deserialize_keras_object
        self.compile(**{name: from_config(value) for name, value in config.items()})


class Transforming(TwoOptimizers):
    """Keeps something else under the name of an argument."""

    def compile(self, for_one, for_two, loss_of, scale=1.0):
        super().compile(for_one, for_two, loss_of, scale / 2)


class KeepsLoss(TwoOptimizers):
    """Takes a loss that Keras does not get."""

    def compile(self, for_one, for_two, loss):
        super().compile(for_one, for_two, loss)


class ChecksLoss(TwoOptimizers):
    """As `keras.distillation.Distiller`."""

    def compile(self, for_one, for_two, loss=None):
        if loss is None:
            raise ValueError("'loss' cannot be `None`.")
        super().compile(for_one, for_two, loss)


def two(kind: type[keras.Model], **settings) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = kind()
    model.build((None, 5))
    config = {
        "for_one": keras.optimizers.Adam(0.05),
        "for_two": keras.optimizers.SGD(0.1, momentum=0.9),
        **settings,
    }
    model.compile(**config)
    model.run_eagerly = True
    return model


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(WithProtocol, {"factor": 1.5}), (TwoOptimizers, {"scale": 3.0})],
    ids=["compile_from_config", "arguments under their names"],
)
def test_a_compile_of_its_own_comes_along(kind, settings) -> None:
    """Trained, then copied: both optimizers go on with their moments and momenta."""
    plain = two(kind, loss_of=keras.losses.MeanSquaredError(), **settings)
    plain.fit(X, Y, **FIT)
    ours = tfd.distribute(plain, mirrored())
    assert type(ours.keras_model.for_one) is keras.optimizers.Adam
    assert ours.keras_model.scale == 3.0
    plain.fit(X, Y, **FIT)
    ours.keras_model.run_eagerly = False
    ours.fit(X, Y, **FIT)
    assert_same_weights(plain, ours)


def test_a_compile_that_cannot_be_repeated_names_the_argument() -> None:
    model = two(Transforming, loss_of=keras.losses.MeanSquaredError(), scale=4.0)
    with pytest.raises(tfd.TfDistError, match=r"'scale' of its compile.*get_compile_config"):
        tfd.distribute(model, mirrored())
    for kind in (KeepsLoss, ChecksLoss):
        model = two(kind, loss=keras.losses.MeanSquaredError())
        with pytest.raises(tfd.TrainingError, match=r"copied: .*'loss'.* Pass a function that bui"):
            tfd.distribute(model, mirrored())


def test_lora_and_single_frozen_weights_come_along() -> None:
    keras.utils.set_random_seed(1)
    plain = stack(keras.layers.Dense(4, "tanh"), keras.layers.Dense(1))
    plain.layers[0].enable_lora(2)
    plain.layers[1].bias.trainable = False
    compiled(plain)
    plain.run_eagerly = True
    ours = tfd.distribute(plain, mirrored())
    ours.keras_model.run_eagerly = False
    before = weights_of(plain)
    plain.fit(X, Y, **FIT)
    ours.fit(X, Y, **FIT)
    assert_same_weights(plain, ours)
    trained = [(a != b).any() for a, b in zip(before, weights_of(plain), strict=True)]
    assert sum(trained) == 4  # not the kernel of the first, nor the bias of the second
