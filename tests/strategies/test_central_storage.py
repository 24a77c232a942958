"""Keras metrics in a custom training loop under central storage count as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd


def make_metrics() -> list[keras.Metric]:
    return [
        keras.metrics.AUC(),
        keras.metrics.F1Score(),  # makes its variables in the first step
        keras.metrics.OneHotMeanIoU(3),  # counts in integers
    ]


def test_metrics_count_each_row_once_in_each_epoch() -> None:
    """44 rows: in batches of 16, three replicas get unequal parts of each."""
    rng = np.random.default_rng(0)
    y = keras.utils.to_categorical(rng.integers(3, size=44), 3)
    rows = y, rng.dirichlet(np.ones(3), size=44).astype("float32")
    strategy = tfd.create_strategy("central_storage", devices=3, parameter_device="CPU:3")
    with strategy.scope():
        metrics = make_metrics()
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(16)
    batches = strategy.experimental_distribute_dataset(batches)

    def update(*batch: Any) -> None:
        for metric in metrics:
            metric.update_state(*batch)

    @tf.function
    def count(iterator: Any, steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            strategy.run(update, args=next(iterator))

    alone = make_metrics()
    for metric in alone:
        metric.update_state(*rows)
    for _ in range(2):
        for metric in metrics:
            metric.reset_state()
        count(iter(batches), tf.constant(3))
        for found, wanted in zip(metrics, alone, strict=True):
            np.testing.assert_allclose(found.result(), wanted.result(), atol=1e-6)
