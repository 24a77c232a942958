"""fit, evaluate and predict give what Keras gives on one device, on every strategy."""

from typing import Any

import keras
import numpy as np
import pytest
from training_cases import (
    CLASSIFIER,
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    assert_trains_as_keras,
    batches,
    classifier,
    distributed_fit,
    mirrored,
    plain_fit,
    steps_taken,
    strategy_of,
    weights_of,
)

import tfdist_ext as tfd


@pytest.mark.long("one_device", "mirrored-2", "central_storage")
@pytest.mark.parametrize(
    ("name", "replicas", "optimizer"),
    [
        ("default", 1, "adam"),
        ("one_device", 1, "sgd"),
        ("mirrored", 2, "sgd"),
        ("mirrored", 2, "adam"),
        ("mirrored", 4, "sgd"),
        ("central_storage", 2, "adam"),
    ],
)
def test_fit_evaluate_predict(name: str, replicas: int, optimizer: str) -> None:
    strategy = strategy_of(name, replicas)
    assert strategy.num_replicas_in_sync == replicas
    plain, ours = assert_trains_as_keras(
        classifier(optimizer),
        X,
        Y,
        strategy=strategy,
        batch_size=16,
        epochs=3,
        validation_data=(X[:32], Y[:32]),
    )
    assert steps_taken(ours) == steps_taken(plain) == 12
    np.testing.assert_allclose(
        ours.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-6
    )
    np.testing.assert_allclose(ours.predict(X, verbose=0), plain.predict(X, verbose=0), atol=1e-6)


@pytest.mark.long("central_storage")
@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_evaluate_and_predict_take_every_row_once_at_uneven_ends(name: str) -> None:
    plain, _ = plain_fit(classifier(), X, Y)
    ours = tfd.distribute(plain, strategy_of(name))
    for rows, batch in [(61, 16), (33, 16), (17, 16), (1, 16), (7, 3)]:
        x, y = X[:rows], Y[:rows]
        np.testing.assert_allclose(
            ours.evaluate(x, y, batch_size=batch, verbose=0),
            plain.evaluate(x, y, batch_size=batch, verbose=0),
            rtol=1e-5,
        )
        predicted = ours.predict(x, batch_size=batch, verbose=0)
        np.testing.assert_allclose(predicted, plain.predict(x, verbose=0), atol=1e-6)


def test_metrics_of_training_count_every_row_once_at_uneven_ends() -> None:
    def build() -> keras.Model:
        model = classifier()()
        model.optimizer.learning_rate = 0.0  # so that all steps see the same model
        return model

    _, expected = plain_fit(build, X[:33], Y[:33], batch_size=16)
    _, history = distributed_fit(build, X[:33], Y[:33], batch_size=16, strategy=mirrored(4))
    assert_same_history(expected, history)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(lambda: [keras.layers.BatchNormalization()], id="mean of no rows is NaN"),
        pytest.param(
            lambda: [
                keras.layers.Reshape((5, 1)),
                keras.layers.Conv1D(2, 2),
                keras.layers.Flatten(),
            ],
            id="convolution refuses no rows",
        ),
    ],
)
def test_replicas_without_rows_do_no_harm(layers) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), *layers(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    parts = {"strategy": mirrored(4), "synchronize_batch_norm": False}
    ours, history = distributed_fit(build, X[:33], Y[:33], batch_size=16, **parts)
    assert np.isfinite(history["loss"]).all()
    assert all(np.isfinite(weight).all() for weight in weights_of(ours))
    assert steps_taken(ours) == 3
    predicted = ours.predict(X[:33], batch_size=16, verbose=0)
    np.testing.assert_allclose(predicted, ours.predict(X[:33], batch_size=33, verbose=0), atol=1e-6)


def test_training_goes_on_where_it_ended() -> None:
    plain, ours = assert_trains_as_keras(classifier("adam"), X, Y, batch_size=16)
    for model in (plain, ours):
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0, initial_epoch=3, epochs=5)
    assert_same_weights(plain, ours)
    assert ours.keras_model.history.epoch == [3, 4]


def test_weights_in_classes_samples_and_validation() -> None:
    assert_trains_as_keras(CLASSIFIER, X, Y, batch_size=16, class_weight={0: 0.3, 1: 2.0})
    assert_trains_as_keras(
        classifier(weighted_metrics=["mae"]),
        X,
        Y,
        batch_size=16,
        sample_weight=np.linspace(0, 2, 64).astype("float32"),
        validation_split=0.5,
    )


def test_validation_frequency() -> None:
    arguments = {"batch_size": 16, "epochs": 4, "validation_split": 0.25}
    assert_trains_as_keras(CLASSIFIER, X, Y, validation_freq=3, **arguments)
    assert_trains_as_keras(CLASSIFIER, X, Y, validation_freq=[2, 4], **arguments)
    with pytest.raises(tfd.TrainingError, match="validation_freq"):
        distributed_fit(CLASSIFIER, X, Y, validation_freq="all", **arguments)


@pytest.mark.long("arrays")
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: (X, Y), id="arrays"),
        pytest.param(batches, id="dataset"),
        pytest.param(lambda: batches().repeat(), id="infinite dataset"),
    ],
)
def test_each_validation_sees_the_same_first_steps(data) -> None:
    assert_trains_as_keras(
        CLASSIFIER,
        X,
        Y,
        batch_size=16,
        epochs=3,
        validation_data=data(),
        validation_batch_size=16,
        validation_steps=3,
    )


def test_answers_have_keras_types() -> None:
    plain, ours = assert_trains_as_keras(CLASSIFIER, X, Y, batch_size=16)
    assert all(type(value) is float for value in ours.evaluate(X, Y, verbose=0))
    named = ours.evaluate(X, Y, verbose=0, return_dict=True)
    assert list(named) == list(plain.evaluate(X, Y, verbose=0, return_dict=True))
    assert isinstance(ours.predict(X, verbose=0), np.ndarray)
    assert isinstance(ours.fit(X, Y, verbose=0), keras.callbacks.History)


def rows_seen(shuffle: Any) -> list[list[float]]:
    """The numbers 0 to 23 in the order of three epochs of batches of 6, on two replicas."""
    import tensorflow as tf

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


@pytest.mark.parametrize("shuffle", [True, 1, np.True_], ids=repr)
def test_shuffle_takes_every_row_once_in_an_order_of_each_epoch(shuffle: Any) -> None:
    passes = rows_seen(shuffle)
    assert all(sorted(one) == IN_ORDER for one in passes)
    steps = [steps_of(one) for one in passes]
    assert steps_of(IN_ORDER) not in steps
    assert steps[0] != steps[1] != steps[2]


def test_shuffle_of_each_batch() -> None:
    """As Keras's: the batches are those of the data's order, the rows within them are not."""
    passes = rows_seen("batch")
    assert all(steps_of(one) == steps_of(IN_ORDER) for one in passes)

    def halves(rows: list[float]) -> tuple[frozenset[frozenset[float]], ...]:
        """What the two replicas held in each step."""
        pairs = [(rows[i : i + 3], rows[i + 3 : i + 6]) for i in range(0, 24, 6)]
        return tuple(frozenset(map(frozenset, pair)) for pair in pairs)

    assert len({halves(one) for one in [IN_ORDER, *passes]}) == 4  # new in each epoch
    assert_trains_as_keras(CLASSIFIER, X[:61], Y[:61], batch_size=16, epochs=2, shuffle="batch")


def test_shuffled_training_repeats_itself_under_one_seed() -> None:
    def once(seed: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(seed)
        model = tfd.distribute(classifier(), mirrored())
        model.fit(X, Y, batch_size=8, verbose=0)
        return weights_of(model)

    first, again, other = once(5), once(5), once(6)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
