"""The trainings of the conformance kit, and what one device makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

__all__ = ["SIZES", "TESTED", "Training", "on_one_device"]

BATCH, EPOCHS, CLASSES = 12, 2, 3
# Rows of an epoch. Those of "uneven" leave one row for all replicas in the last batch.
SIZES = {"even batches": 36, "uneven batches": 37}

_RNG = np.random.default_rng(0)
NUMBERS = _RNG.normal(size=(37, 5)).astype("float32")
IDS = _RNG.integers(0, 12, (37, 3))
LABELS = _RNG.integers(0, CLASSES, 37)
WEIGHTS = np.linspace(0.1, 2, 37)  # so that a mean of means is none of the rows


def _dense() -> tuple[keras.Model, list[np.ndarray]]:
    layers = keras.layers
    inputs = keras.Input([5])
    hidden = layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.05))(inputs)
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden)), [NUMBERS]


def _table() -> tuple[keras.Model, list[np.ndarray]]:
    """An embedding, whose gradients are slices, and BatchNormalization."""
    layers = keras.layers
    numbers, ids = keras.Input([5]), keras.Input([3], dtype="int32")
    rows = layers.Flatten()(layers.Embedding(12, 4)(ids))
    hidden = layers.Dense(8, "tanh")(layers.Concatenate()([numbers, rows]))
    hidden = layers.BatchNormalization(synchronized=True, momentum=0.8)(hidden)
    return keras.Model([numbers, ids], layers.Dense(CLASSES)(hidden)), [NUMBERS, IDS]


def _adamw() -> keras.optimizers.Optimizer:
    """With clipping by the global norm, which must be that of the whole gradient, and averages."""
    return keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    )


MODELS = {"dense": _dense, "table": _table}
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "adamw": _adamw}
TESTED = ("table", "adamw")


class Training:
    """A model with its optimizer; its compiled steps are kept for all sizes.

    Args:
        model, optimizer: of MODELS and OPTIMIZERS.
        distribute: builder -> something with Keras's fit, evaluate and predict.
    """

    def __init__(
        self,
        model: str,
        optimizer: str,
        distribute: Callable[[Callable[[], keras.Model]], Any] = lambda build: build(),
    ):
        def build() -> keras.Model:
            keras.utils.set_random_seed(7)
            made, self._inputs = MODELS[model]()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            made.compile(OPTIMIZERS[optimizer](), loss, weighted_metrics=["accuracy"])
            made.optimizer.build(made.trainable_variables)
            return made

        self.model = distribute(build)
        self.plain: keras.Model = getattr(self.model, "keras_model", self.model)
        self.variables = [*self.plain.weights, *self.plain.optimizer.variables]
        self._start = self.values()
        # Steps of testing and predicting know no optimizer: one model of all is enough.
        self._tested = (model, optimizer) == TESTED

    def values(self) -> list[np.ndarray]:
        """Of weights and optimizer variables."""
        return [variable.numpy() for variable in self.variables]

    def assign(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def anew(self, rows: int) -> dict[str, Any]:
        """Trained from the beginning: what `go_on` gives; of TESTED predictions and more, too."""
        self.assign(self._start)
        result = self.go_on(rows)
        if not self._tested:
            return result
        inputs, *rest = self._first(rows)
        tested = self.model.evaluate(
            inputs, rest[0], sample_weight=rest[1], batch_size=BATCH, verbose=0, return_dict=True
        )
        result |= {f"{name} of evaluate": value for name, value in tested.items()}
        result["predictions"] = self.predictions(rows)
        return result

    def go_on(self, rows: int) -> dict[str, Any]:
        """Trained from where it is: losses and metrics of all epochs, weights, optimizer."""
        inputs, labels, weights = self._first(rows)
        fitted = self.model.fit(
            inputs,
            labels,
            sample_weight=weights,
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
        )
        result: dict[str, Any] = {f"{name} of fit": log for name, log in fitted.history.items()}
        for number, value in enumerate(self.values()):
            result[f"variable {number} of shape {value.shape}"] = value
        return result

    def predictions(self, rows: int, model: Any = None) -> np.ndarray:
        """Of this model, or of another one with its inputs."""
        inputs, *_ = self._first(rows)
        return (model or self.model).predict(inputs, batch_size=BATCH, verbose=0)

    def _first(self, rows: int) -> tuple[Any, np.ndarray, np.ndarray]:
        inputs = [part[:rows] for part in self._inputs]
        return inputs if len(inputs) > 1 else inputs[0], LABELS[:rows], WEIGHTS[:rows]


@functools.cache
def on_one_device(model: str, optimizer: str) -> dict[str, dict[str, Any]]:
    """What Keras's own `fit` gives without a strategy, for each of SIZES."""
    training = Training(model, optimizer)
    return {size: training.anew(rows) for size, rows in SIZES.items()}
