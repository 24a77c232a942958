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


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> tf.distribute.Strategy:
    return tfd.create_strategy("central_storage", devices=3, parameter_device="CPU:3")


def test_metrics_count_each_row_once_in_each_epoch(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        metrics = make_metrics()
    batches = tf.data.Dataset.from_tensor_slices(predictions()).batch(16)
    batches = strategy.experimental_distribute_dataset(batches)

    @tf.function
    def count(iterator: Any, steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            strategy.run(lambda *batch: update(metrics, *batch), args=next(iterator))

    alone = make_metrics()
    update(alone, *predictions())
    for _ in range(2):
        for metric in metrics.values():
            metric.reset_state()
        count(iter(batches), tf.constant(3))
        found = results(metrics)
        for name, wanted in results(alone).items():
            assert found[name] == pytest.approx(wanted, abs=1e-6), name
