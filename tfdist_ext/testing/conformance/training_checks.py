"""Keras on a strategy through `tfd.distribute`, compared with Keras on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.testing.conformance.strategy_case import (
    StrategyCase,
    expect_close,
    expect_equal,
)
from tfdist_ext.training import distribute

__all__ = ["TrainingChecks"]

BATCH, EPOCHS, CLASSES = 12, 2, 3
# Rows of an epoch. Those of "uneven" leave one row for all replicas in the last batch.
SIZES = {"even batches": 36, "uneven batches": 37}

_RNG = np.random.default_rng(0)
NUMBERS = _RNG.normal(size=(37, 5)).astype("float32")
IDS = _RNG.integers(0, 12, (37, 3))
LABELS = _RNG.integers(0, CLASSES, 37)
WEIGHTS = np.linspace(0.1, 2, 37)  # so that a mean of means is none of the rows


def _dense() -> tuple[keras.Model, list[np.ndarray], keras.optimizers.Optimizer]:
    layers = keras.layers
    inputs = keras.Input([5])
    hidden = layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.05))(inputs)
    model = keras.Model(inputs, layers.Dense(CLASSES)(hidden))
    return model, [NUMBERS], keras.optimizers.SGD(0.1, momentum=0.9)


def _table() -> tuple[keras.Model, list[np.ndarray], keras.optimizers.Optimizer]:
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
    return keras.Model([numbers, ids], layers.Dense(CLASSES)(hidden)), [NUMBERS, IDS], optimizer


MODELS = {"dense": _dense, "table": _table}


class Training:
    """A model with its optimizer; its compiled steps are kept for all sizes.

    Args:
        model: of MODELS.
        distribute: builder -> something with Keras's fit, evaluate and predict.
    """

    def __init__(
        self,
        model: str,
        distribute: Callable[[Callable[[], keras.Model]], Any] = lambda build: build(),
    ):
        def build() -> keras.Model:
            keras.utils.set_random_seed(7)
            made, self._inputs, optimizer = MODELS[model]()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            made.compile(optimizer, loss, weighted_metrics=["accuracy"])
            made.optimizer.build(made.trainable_variables)
            return made

        self.model = distribute(build)
        self.plain: keras.Model = getattr(self.model, "keras_model", self.model)
        self.variables = [*self.plain.weights, *self.plain.optimizer.variables]
        self._start = self.values()

    def values(self) -> list[np.ndarray]:
        """Of weights and optimizer variables."""
        return [variable.numpy() for variable in self.variables]

    def train_from_start(self, rows: int) -> dict[str, Any]:
        """Train from the initial weights, evaluate and predict.

        Returns:
            Losses and metrics of all epochs, weights, optimizer variables and predictions.
        """
        for variable, value in zip(self.variables, self._start, strict=True):
            variable.assign(value)
        inputs = [part[:rows] for part in self._inputs]
        data: dict[str, Any] = {
            "x": inputs if len(inputs) > 1 else inputs[0],
            "y": LABELS[:rows],
            "sample_weight": WEIGHTS[:rows],
            "batch_size": BATCH,
            "verbose": 0,
        }
        fitted = self.model.fit(**data, epochs=EPOCHS, shuffle=False)
        result: dict[str, Any] = {f"{name} of fit": log for name, log in fitted.history.items()}
        for number, value in enumerate(self.values()):
            result[f"variable {number} of shape {value.shape}"] = value
        tested = self.model.evaluate(**data, return_dict=True)
        result |= {f"{name} of evaluate": value for name, value in tested.items()}
        result["predictions"] = self.model.predict(data["x"], batch_size=BATCH, verbose=0)
        return result


@functools.cache
def single_device_results(model: str) -> dict[str, dict[str, Any]]:
    """The results of Keras alone, without a strategy, for each of SIZES."""
    training = Training(model)
    return {size: training.train_from_start(rows) for size, rows in SIZES.items()}


class TrainingChecks(StrategyCase):
    """Weights, optimizer, losses, metrics and predictions against Keras on one device.

    Each of its models is trained on batches that the replicas share evenly, and on others.
    """

    def test_trains_dense_with_sgd(self) -> None:
        """With weights of rows and of regularization, and momentum."""
        self._expect_single_device_results("dense")

    def test_trains_table_with_adamw(self) -> None:
        """With slices as gradients, BatchNormalization, clipping, and averages of the weights."""
        self._expect_single_device_results("table")

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
        expect_close("the accuracy of all rows", float(accuracy.result()), (size - 2) / size, 1e-6)
        mean.reset_state()
        expect_equal("the mean after reset_state", float(mean.result()), 0.0)

    def _training(self, model: str) -> Training:
        on_strategy = functools.partial(distribute, strategy=self.under_test())
        return self._cached(model, functools.partial(Training, model, on_strategy))

    def _expect_single_device_results(self, model: str) -> None:
        training = self._training(model)
        for size, right in single_device_results(model).items():
            found = training.train_from_start(SIZES[size])
            for name, value in right.items():
                expect_close(f"{size}, {name}", found[name], value, self.tolerance)
        for weight in training.plain.weights:
            one, *others = self.under_test().experimental_local_results(weight.value)
            for copy in others:
                expect_close(f"a copy of {weight.path}", copy.numpy(), one.numpy(), 0)
