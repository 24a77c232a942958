"""fit, evaluate and predict give what Keras gives, and the model has all that keras.Model has."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    CLASSIFIER,
    X,
    Y,
    assert_same_weights,
    assert_trains_as_keras,
    batches,
    classifier,
    distributed_fit,
    mirrored,
    plain_fit,
    steps_taken,
    weights_of,
)

import tfdist_ext as tfd


def test_fit_evaluate_predict() -> None:
    plain, ours = assert_trains_as_keras(
        CLASSIFIER, X, Y, batch_size=16, epochs=3, validation_data=(X[:32], Y[:32])
    )
    assert steps_taken(ours) == steps_taken(plain) == 12
    np.testing.assert_allclose(
        ours.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-6
    )
    np.testing.assert_allclose(ours.predict(X, verbose=0), plain.predict(X, verbose=0), atol=1e-6)


def test_replicas_without_rows_do_no_harm() -> None:
    """The mean of no rows is NaN, and a convolution refuses no rows."""

    def build() -> keras.Model:
        layers = [keras.layers.BatchNormalization(), keras.layers.Reshape((5, 1))]
        layers += [keras.layers.Conv1D(2, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "mse")
        return model

    parts = {"strategy": mirrored(4), "synchronize_batch_norm": False}
    ours, _ = distributed_fit(build, X[:33], Y[:33], batch_size=16, **parts)
    assert all(np.isfinite(weight).all() for weight in weights_of(ours))
    assert steps_taken(ours) == 3
    predicted = ours.predict(X[:33], batch_size=16, verbose=0)
    np.testing.assert_allclose(predicted, ours.predict(X[:33], batch_size=33, verbose=0), atol=1e-6)


def test_training_goes_on_where_it_ended() -> None:
    ours, _ = distributed_fit(CLASSIFIER, X, Y, batch_size=16)
    ours.fit(X, Y, batch_size=16, shuffle=False, verbose=0, initial_epoch=3, epochs=5)
    assert ours.keras_model.history.epoch == [3, 4]
    assert_same_weights(plain_fit(CLASSIFIER, X, Y, batch_size=16, epochs=3)[0], ours)


def test_weights_of_samples_and_a_part_for_validation() -> None:
    assert_trains_as_keras(
        classifier(weighted_metrics=["mae"]),
        X,
        Y,
        batch_size=16,
        sample_weight=np.linspace(0, 2, 64).astype("float32"),
        validation_split=0.5,
    )


def test_weights_of_classes_and_some_validations_of_the_same_first_steps() -> None:
    assert_trains_as_keras(
        CLASSIFIER,
        X,
        Y,
        batch_size=16,
        epochs=4,
        class_weight={0: 0.3, 1: 2.0},
        validation_data=batches().repeat(),
        validation_steps=3,
        validation_freq=[2, 4],
    )
    with pytest.raises(tfd.TrainingError, match="validation_freq"):
        distributed_fit(CLASSIFIER, X, Y, validation_split=0.25, validation_freq="all")


def rows_seen(shuffle: Any) -> list[list[float]]:
    """The numbers 0 to 23 in the order of three epochs of batches of 6, on two replicas."""
    seen: list[float] = []

    class Noting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            tf.py_function(lambda rows: seen.extend(rows.numpy()[:, 0].tolist()), [x], [])
            return self.dense(x)

    def build() -> keras.Model:
        model = Noting()
        model.compile("sgd", "mse")
        return model

    numbers = np.arange(24, dtype="float32")[:, None]
    keras.utils.set_random_seed(3)
    ours = tfd.distribute(build, mirrored())
    ours.fit(numbers, numbers, batch_size=6, epochs=3, verbose=0, shuffle=shuffle)
    return [seen[:24], seen[24:48], seen[48:]]


def steps_of(rows: list[float]) -> list[frozenset[float]]:
    """Two replicas note their rows in either order, so compare what each step of six rows held."""
    return [frozenset(rows[i : i + 6]) for i in range(0, 24, 6)]


IN_ORDER = [float(number) for number in range(24)]


def test_shuffle_takes_every_row_once_in_an_order_of_each_epoch_and_seed() -> None:
    passes = rows_seen(True)
    assert all(sorted(one) == IN_ORDER for one in passes)
    steps = [steps_of(one) for one in passes]
    assert steps_of(IN_ORDER) not in steps
    assert steps[0] != steps[1] != steps[2]
    # Under one seed, and by another value that is true.
    assert steps == [steps_of(one) for one in rows_seen(np.True_)]


def test_steps_are_made_again_when_settings_change() -> None:
    plain, ours = classifier()(), tfd.distribute(classifier(), mirrored())
    ours.set_weights(plain.get_weights())
    for model in (plain, ours):
        model.predict(X, verbose=0)
        for eagerly in (True, False):
            model.run_eagerly = eagerly
            model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    for mine, keras_ in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, keras_, atol=1e-6)
    assert (
        tfd.explain(ours).steps[0]
        == "train: none: run_eagerly=True runs each step once, on the whole global batch"
    )
    np.testing.assert_allclose(ours.predict(X, verbose=0), plain.predict(X, verbose=0), atol=1e-6)
    assert (
        tfd.explain(ours).steps[-1]
        == "predict: none: run_eagerly=True runs each step once, on the whole global batch"
    )


class Frozen(keras.Model):
    """Its `metrics` do not change with `compile`, as in Keras's guides of GANs and VAEs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(3, kernel_initializer="ones")
        self.last = keras.layers.Dense(1, kernel_initializer="ones")
        self.tracker = keras.metrics.Mean()

    metrics = property(lambda self: [self.tracker])

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def test_steps_are_made_again_when_only_a_layer_is_frozen() -> None:
    model, data = Frozen(), (X, Y.reshape(-1, 1))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    ours = tfd.distribute(model, mirrored())
    ours.fit(*data, batch_size=16, verbose=0)
    model.first.trainable = False
    before = [variable.numpy() for variable in model.weights]
    with ours.strategy.scope():
        ours.compile(ours.optimizer, "mse")
    ours.fit(*data, batch_size=16, verbose=0)
    changed = [
        bool((old != new.numpy()).any()) for old, new in zip(before, model.weights, strict=True)
    ]
    assert changed == [False, False, True, True]


def test_limits_of_keras() -> None:
    """`keras.config.set_max_epochs` and its like, for short trials."""
    model = tfd.distribute(CLASSIFIER, mirrored())
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        assert model.fit(X, Y, batch_size=8, epochs=4, verbose=0).epoch == [0, 1]
        assert len(model.predict(X, batch_size=8, verbose=0)) == 3 * 8
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert int(model.optimizer.iterations) == 2 * 3
    with pytest.raises(tfd.TrainingError, match=r"validation_freq must be .* got 0"):
        model.fit(X, Y, validation_data=(X, Y), validation_freq=0, verbose=0)


def test_shuffle_of_each_batch() -> None:
    """As Keras's: the batches are those of the data's order, the rows within them are not."""
    assert all(steps_of(one) == steps_of(IN_ORDER) for one in rows_seen("batch"))
    assert_trains_as_keras(CLASSIFIER, X[:61], Y[:61], batch_size=16, epochs=2, shuffle="batch")


def test_batches_by_hand() -> None:
    plain = classifier()()
    ours = tfd.distribute(classifier(), mirrored())
    ours.set_weights(plain.get_weights())
    for begin in range(0, 64, 13):
        batch = X[begin : begin + 13], Y[begin : begin + 13]
        for method in ("train_on_batch", "test_on_batch"):
            np.testing.assert_allclose(
                getattr(ours, method)(*batch), getattr(plain, method)(*batch), rtol=1e-5, atol=1e-6
            )
    np.testing.assert_allclose(ours.predict_on_batch(X), plain.predict_on_batch(X), atol=1e-6)
    np.testing.assert_allclose(ours(X), plain(X), atol=1e-6)
    for x in (tf.sparse.from_dense(X[:13]), pytest.importorskip("scipy.sparse").csr_matrix(X[:13])):
        found = ours.train_on_batch(x, Y[:13])
        np.testing.assert_allclose(found, plain.train_on_batch(X[:13], Y[:13]), atol=1e-6)
        np.testing.assert_allclose(ours.predict_on_batch(x), plain.predict_on_batch(X[:13]), 1e-5)


def test_batch_normalization_that_is_not_synchronized_is_warned_of() -> None:
    """Its numbers: test_verify.py."""
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="BatchNormalization is not synchronized in.*each replica"):
        ours = tfd.distribute(model, mirrored())
    assert "BatchNormalization is not synchronized in" in str(tfd.explain(ours))


def test_sparse_predictions_of_replicas_without_rows() -> None:
    class Sparse(keras.Model):
        def call(self, x: tf.Tensor) -> tf.SparseTensor:
            return tf.sparse.from_dense(tf.where(x > 0, x, 0.0))

    found = tfd.distribute(Sparse, mirrored(4)).predict(X[:33], batch_size=32, verbose=0)
    np.testing.assert_array_equal(tf.sparse.to_dense(found), np.where(X[:33] > 0, X[:33], 0))
