"""distribute(model): the variables of a trained model move to the strategy, and out of it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    Net,
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


class Scaling(keras.layers.Layer):
    """A layer without a config."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), regularizer="l2")

    def call(self, x):
        return x @ self.kernel


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


def partly_frozen() -> keras.Model:
    model = Net()
    model.hidden.trainable = False
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    return compiled(model, OwnSGD(rate, momentum=0.9))


def test_training_goes_on_as_in_keras() -> None:
    build = functional_with_lambdas
    plain, model = (plain_fit(build, X, Y, batch_size=16, epochs=2)[0] for _ in range(2))
    kept = model, model.layers[-1], model.optimizer, model.metrics[-1], model.weights[0]
    ours = tfd.distribute(model, mirrored())
    ours.run_eagerly = False
    assert_same_weights(plain, ours, tolerance=0)
    assert steps_taken(ours) == 8
    history = ours.fit(X, Y, **FIT).history
    expected = plain.fit(X, Y, **FIT).history
    assert_same_weights(plain, ours)
    assert_same_history(expected, history)
    now = ours, ours.layers[-1], ours.optimizer, ours.metrics[-1], ours.weights[0]
    assert all(one is other for one, other in zip(kept, now, strict=True))
    copies = mirrored().experimental_local_results(kept[-1].value)
    assert len(copies) == 2
    np.testing.assert_array_equal(*copies)


def test_a_model_that_is_not_compiled_predicts() -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    expected = model.predict(X[:7], verbose=0)
    ours = tfd.distribute(model, mirrored())
    np.testing.assert_allclose(ours.predict(X[:7], verbose=0), expected, atol=1e-6)
    for call in (ours.fit, ours.evaluate):
        with pytest.raises(tfd.TrainingError, match="the model must be compiled for"):
            call(X, Y)


def test_frozen_after_training_and_thawed_later() -> None:
    """The optimizer keeps what it was built for, and a tape watches a thawed weight again."""
    results = []
    for strategy in (None, mirrored()):
        model, _ = plain_fit(lambda: compiled(Net()), X, Y, batch_size=16)
        model.hidden.trainable = False
        if strategy is not None:
            tfd.distribute(model, strategy)
            model.run_eagerly = False
        histories = []
        for trainable in (False, True):
            model.hidden.trainable = trainable
            if strategy is None:
                # Keras's step, once traced, would train on what is frozen now.
                model.make_train_function(force=True)
            else:
                model.compile(model.optimizer, "mse", metrics=["mae"])
            histories.append(model.fit(X, Y, **FIT).history)
        results.append((model, histories))
    (plain, expected), (ours, histories) = results
    assert_same_weights(plain, ours)
    for one, other in zip(expected, histories, strict=True):
        assert_same_history(one, other)
    for a, b in zip(plain.optimizer.variables, ours.optimizer.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6, err_msg=a.path)


def test_a_model_moves_to_a_second_strategy_and_out_of_it() -> None:
    plain, model = (plain_fit(partly_frozen, X, Y, batch_size=16)[0] for _ in range(2))
    model.run_eagerly = False
    default = tf.distribute.get_strategy()
    for strategy in (mirrored(2), mirrored(3), default):
        assert tfd.distribute(model, strategy).strategy is strategy
        assert all(map(strategy.extended.variable_created_in_scope, raw_variables(model)))
        assert_same_history(plain.fit(X, Y, **FIT).history, model.fit(X, Y, **FIT).history)
    assert_same_weights(plain, model)


def raw_variables(model: keras.Model) -> list[tf.Variable]:
    return [variable.value for variable in (*model.variables, *model.optimizer.variables)]


class HoldsAVariable(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.counter = tf.Variable(0.0)

    def call(self, x):
        return self.dense(x)


def test_a_tf_variable_from_outside_of_the_strategy_is_named() -> None:
    model = compiled(HoldsAVariable())
    model.fit(X, Y, **FIT)
    with pytest.raises(tfd.TrainingError, match=r"HoldsAVariable\.counter .*distribute\(build"):
        tfd.distribute(model, mirrored())
    assert type(model) is HoldsAVariable
    model.fit(X, Y, **FIT)  # the model has not changed
    tfd.distribute(lambda: compiled(HoldsAVariable()), mirrored()).fit(X, Y, **FIT)


def test_other_things_than_a_model_and_a_strategy_are_refused() -> None:
    with pytest.raises(tfd.TrainingError, match=r"must return a keras\.Model"):
        tfd.distribute(lambda: 3, mirrored())
    with pytest.raises(tfd.TrainingError, match=r"create_strategy\(name\)"):
        tfd.distribute(classifier(), "mirrored")


def test_lora_and_single_frozen_weights_come_along() -> None:
    results = []
    for strategy in (None, mirrored()):
        keras.utils.set_random_seed(1)
        model = stack(keras.layers.Dense(4, "tanh"), keras.layers.Dense(1))
        model.layers[0].enable_lora(2)
        model.layers[1].bias.trainable = False
        compiled(model)
        if strategy is not None:
            tfd.distribute(model, strategy)
        before = weights_of(model)
        model.fit(X, Y, **FIT)
        results.append(model)
    assert_same_weights(*results)
    trained = [(a != b).any() for a, b in zip(before, weights_of(model), strict=True)]
    assert sum(trained) == 4  # not the kernel of the first, nor the bias of the second
