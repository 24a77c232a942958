"""Keras metrics in a custom training loop under central storage count as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd


def make_metrics() -> dict[str, keras.Metric]:
    return {
        "accuracy": keras.metrics.CategoricalAccuracy(),
        "auc": keras.metrics.AUC(),
        "f1": keras.metrics.F1Score(),  # makes its variables in the first step
        "iou": keras.metrics.OneHotMeanIoU(3),  # counts in integers
        "recall": keras.metrics.Recall(),
        "weighted mean": keras.metrics.Mean(),
    }


def predictions() -> tuple[np.ndarray, np.ndarray]:
    """44 rows: in batches of 16, three replicas get unequal parts of each."""
    rng = np.random.default_rng(0)
    y = keras.utils.to_categorical(rng.integers(3, size=44), 3)
    return y, rng.dirichlet(np.ones(3), size=44).astype("float32")


def update(metrics: dict[str, keras.Metric], y: Any, p: Any) -> None:
    for name, metric in metrics.items():
        if name == "weighted mean":
            metric.update_state(p[:, 0], sample_weight=y[:, 0] + 1.0)
        else:
            metric.update_state(y, p)


def results(metrics: dict[str, keras.Metric]) -> dict[str, Any]:
    return {name: np.asarray(metric.result()).tolist() for name, metric in metrics.items()}


@pytest.fixture
def strategy() -> tf.distribute.Strategy:
    return tfd.create_strategy("central_storage", devices=3, parameter_device="CPU:3")


@pytest.fixture
def counted(strategy: tf.distribute.Strategy) -> dict[str, keras.Metric]:
    """Metrics after one pass; the second and the third batch are counted in a loop."""
    with strategy.scope():
        metrics = make_metrics()
    batches = tf.data.Dataset.from_tensor_slices(predictions()).batch(16)
    iterator = iter(strategy.experimental_distribute_dataset(batches))

    @tf.function
    def count(steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            strategy.run(lambda *batch: update(metrics, *batch), args=next(iterator))

    count(tf.constant(1))
    count(tf.constant(2))
    return metrics


@pytest.fixture
def on_one_device() -> dict[str, Any]:
    metrics = make_metrics()
    update(metrics, *predictions())
    return results(metrics)


def test_metrics_count_each_row_once(
    strategy: tf.distribute.Strategy, counted: Any, on_one_device: Any
) -> None:
    found = results(counted)
    with strategy.scope():
        assert results(counted) == found
    for name, wanted in on_one_device.items():
        assert found[name] == pytest.approx(wanted, abs=1e-6), name


def test_a_reset_metric_counts_from_zero(strategy: tf.distribute.Strategy, counted: Any) -> None:
    mean = counted["weighted mean"]

    def step() -> tf.Tensor:
        mean.update_state(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return mean.result()

    mean.reset_state()
    in_replicas = strategy.experimental_local_results(strategy.run(step))
    assert [float(each) for each in in_replicas] == [0.0, 1.0, 2.0]  # each replica's own count
    assert float(mean.result()) == 1.0
    strategy.run(mean.reset_state)
    mean.update_state(7.0)  # outside of replicas it counts once
    assert [float(variable.numpy()) for variable in mean.variables] == [7.0, 1.0]


def test_optimizers_count_their_steps(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([weight])

    @tf.function
    def loop() -> None:
        for _ in tf.range(4):
            strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    loop()
    assert int(optimizer.iterations.numpy()) == 4
    assert float(weight.numpy()) == 1.0 - 4 * 0.5 * 3  # gradients of three replicas are added
