"""Logs of a step: metrics' results are over all rows and replicas, under any key."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import compiled, distributed_fit, plain_fit, strategy_of

import tfdist_ext as tfd

ROWS, BATCH = 41, 8  # the last batch has one row: one replica has none
_rng = np.random.default_rng(5)
X = _rng.normal(size=(ROWS, 3)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")
FIT = {"batch_size": BATCH, "epochs": 2}


class MeanOfEach(keras.metrics.Metric):
    """The means of labels and predictions, as a dict; one of them from a metric inside."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.rows = self.add_weight(shape=(), initializer="zeros", name="rows")
        self.predictions = keras.metrics.Mean()

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(y))
        self.rows.assign_add(tf.cast(tf.shape(y)[0], "float32"))
        self.predictions.update_state(predicted)

    def result(self) -> dict[str, Any]:
        return {"labels": self.total / self.rows, "predicted": self.predictions.result()}


class OwnLogs(keras.Model):
    """Returns values of its metrics under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")
        self.loss_tracker = keras.metrics.Mean(name="total_loss")
        self.in_list = [keras.metrics.Precision(name="precision"), keras.metrics.Recall()]
        self.in_dict = {"acc": keras.metrics.BinaryAccuracy(), "auc": keras.metrics.AUC(name="x")}
        self.means = MeanOfEach(name="means")
        self.of_batch = keras.metrics.Mean(name="of_batch")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(y, predicted))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.logs(y, predicted, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predicted = self(x)
        return self.logs(y, predicted, tf.reduce_mean((y - predicted) ** 2))

    def logs(self, y: Any, predicted: Any, loss: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        called = self.in_dict["acc"](y, predicted)
        for metric in (*self.in_list, self.in_dict["auc"], self.means):
            metric.update_state(y, predicted)
        self.of_batch.reset_state()
        self.of_batch.update_state(y)
        of_batch = self.of_batch.result() * 1.0
        recall = self.in_list[1].result()
        return {
            "loss": self.loss_tracker.result(),
            "acc": self.in_dict["acc"].result(),
            "called": called,
            "precision": recall,  # under the name of another metric
            "of the batch": of_batch,
            "own": tf.reduce_mean(predicted),
            "means": self.means.result(),
        }


def own_logs() -> keras.Model:
    model = OwnLogs()
    model.build((None, 3))
    return compiled(model, 0.5, None)


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Any], dict[str, Any]]:
    """History and evaluation of plain Keras on one device."""
    model, history = plain_fit(own_logs, X, Y, **FIT)
    evaluated = model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)
    return history, evaluated


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=2e-5, err_msg=name)


def test_they_are_those_of_one_device(expected: Any) -> None:
    ours, history = distributed_fit(own_logs, X, Y, **FIT)
    assert_same(history, expected[0])
    evaluated = ours.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)
    assert_same(evaluated, expected[1])


class OneLog(keras.Sequential):
    """Logs the accuracy as the function that it is given says."""

    def __init__(self, log: Callable[[Any, Any, Any], Any], **settings: Any):
        super().__init__(
            [keras.Input((3,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
        )
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")
        self.log = log
        self.compile(keras.optimizers.SGD(0.5), "mse", **settings)

    def train_step(self, data: Any) -> dict[str, Any]:
        super().train_step(data)
        x, y = data
        predicted = self(x)
        self.accuracy.update_state(y, predicted)
        return {"shown": self.log(self.accuracy, y, predicted)}


@pytest.mark.parametrize(
    "log",
    [
        lambda metric, y, p: keras.ops.sqrt(metric.result()),
        lambda metric, y, p: tf.cond(y[0, 0] > 0, lambda: 2 * metric.result(), lambda: 0.0),
    ],
)
def test_what_is_computed_from_a_metric_is_warned_of_by_name(log: Any) -> None:
    def build() -> keras.Model:
        return OneLog(log)

    with pytest.warns(UserWarning, match=r"OneLog.train_step returns 'shown'.*a metric") as told:
        distributed_fit(build, X, Y, **FIT)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed_fit(build, X, Y, strategy=strategy_of("default"), **FIT)


def test_a_metric_that_the_model_does_not_know_is_named() -> None:
    class Apart:
        seen = keras.metrics.Sum(name="seen")

    def log(metric: Any, y: Any, predicted: Any) -> Any:
        Apart.seen.update_state(y)
        return Apart.seen.result()

    with pytest.raises(tfd.TrainingError, match=r"'seen/total'.*attribute of the model"):
        distributed_fit(lambda: OneLog(log), X, Y, **FIT)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda x: tf.shape(x)[0], "int32, which depends on the rows of this replica"),
        (lambda x: tf.reduce_mean(x, 1), "a value for each row as 'log'"),
    ],
)
def test_logs_that_replicas_cannot_combine_are_named(log: Any, message: str) -> None:
    class Returns(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {"log": log(data[0])}

    def build() -> keras.Model:
        return compiled(Returns([keras.Input((3,)), keras.layers.Dense(1)]))

    with pytest.raises(tfd.TrainingError, match=message):
        tfd.distribute(build, strategy_of("mirrored")).fit(X, Y, verbose=0)


class SumOfLosses(keras.Sequential):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total = keras.metrics.Sum(name="total")

    def train_step(self, data: Any) -> Any:
        self.total.update_state(tf.reduce_mean(data[0] ** 2))
        return {"total": self.total.result(), "same": tf.constant(3)}


def test_a_sum_counts_a_mean_once_in_each_step() -> None:
    def build() -> keras.Model:
        return compiled(SumOfLosses([keras.Input((3,)), keras.layers.Dense(1)]))

    _, expected = plain_fit(build, X, Y, **FIT)
    _, history = distributed_fit(build, X, Y, **FIT)
    np.testing.assert_allclose(history["total"], expected["total"], rtol=1e-6)
    assert history["same"] == expected["same"] == [3, 3]
