"""Keras on a strategy through `tfd.distribute`, compared with Keras on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.testing.assertions import assert_close, train_both
from tfdist_ext.testing.conformance.strategy_case import StrategyCase, expect_equal

__all__ = ["TrainingChecks"]

ROWS, BATCH, CLASSES = 37, 12, 3  # one row is left for all replicas in the last batch

_RNG = np.random.default_rng(0)
NUMBERS = _RNG.normal(size=(ROWS, 5)).astype("float32")
IDS = _RNG.integers(0, 12, (ROWS, 3))
LABELS = _RNG.integers(0, CLASSES, ROWS)
WEIGHTS = np.linspace(0.1, 2, ROWS)  # with these, a mean of means is not the mean of the rows


def _dense() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input([5])
    hidden = layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.05))(inputs)
    return _compiled(inputs, hidden, keras.optimizers.SGD(0.1, momentum=0.9))


def _table() -> keras.Model:
    """An embedding, whose gradients are slices, and BatchNormalization.

    The optimizer clips by the norm of the whole gradient, and averages the weights.
    """
    layers = keras.layers
    numbers, ids = keras.Input([5]), keras.Input([3], dtype="int32")
    rows = layers.Flatten()(layers.Embedding(12, 4)(ids))
    hidden = layers.Dense(8, "tanh")(layers.Concatenate()([numbers, rows]))
    hidden = layers.BatchNormalization(synchronized=True, momentum=0.8)(hidden)
    optimizer = keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    )
    return _compiled([numbers, ids], hidden, optimizer)


def _compiled(inputs: Any, hidden: Any, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


class TrainingChecks(StrategyCase):
    """Weights, optimizer, losses and metrics against Keras on one device."""

    def test_trains_dense_with_sgd(self) -> None:
        """With sample weights, regularization and momentum."""
        self._expect_single_device_results(_dense, NUMBERS)

    def test_trains_table_with_adamw(self) -> None:
        """With slices as gradients, BatchNormalization, clipping, and averages of the weights."""
        self._expect_single_device_results(_table, [NUMBERS, IDS])

    def test_keras_metrics(self) -> None:
        """In a custom loop: what all replicas have seen, and nothing after reset_state."""
        strategy, count = self.under_test(), self.replicas()
        with strategy.scope():
            total, mean = keras.metrics.Sum(), keras.metrics.Mean()
            accuracy = keras.metrics.BinaryAccuracy()

        @tf.function
        def step(rows: tf.Tensor) -> None:
            total.update_state(rows)
            mean.update_state(rows)
            accuracy.update_state(tf.ones_like(rows), tf.cast(rows >= 2, tf.float32))

        size = 4 * count
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(size, dtype="float32"))
        for batch in strategy.experimental_distribute_dataset(dataset.batch(2 * count)):
            strategy.run(step, args=(batch,))
        expect_equal("the sum of all rows", float(total.result()), size * (size - 1) / 2)
        expect_equal("the mean of all rows", float(mean.result()), (size - 1) / 2)
        right = float(np.float32((size - 2) / size))
        expect_equal("the accuracy of all rows", float(accuracy.result()), right)
        mean.reset_state()
        expect_equal("the mean after reset_state", float(mean.result()), 0.0)

    def _expect_single_device_results(self, build: Callable[[], keras.Model], x: Any) -> None:
        data = (x, LABELS, WEIGHTS)
        fit = {"batch_size": BATCH, "epochs": 2}
        validation = {"validation_data": data, "validation_batch_size": BATCH}
        wanted, found, model = train_both(build, data, self.under_test(), **fit, **validation)
        assert_close(found, wanted, self.tolerance)
        for weight in model.keras_model.weights:
            one, *others = self.under_test().experimental_local_results(weight.value)
            for copy in others:
                expect_equal(
                    f"a copy of {weight.path}", copy.numpy().tolist(), one.numpy().tolist()
                )
