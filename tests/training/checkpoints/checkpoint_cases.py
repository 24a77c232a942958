"""Models and trainings that several tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from training_cases import X, Y, compiled, mirrored, stack

import tfdist_ext as tfd
from tfdist_ext.training.state import state_of, whole_value

FIT = {"batch_size": 16, "verbose": 0}


def dense(*units: int, optimizer: Any = "sgd") -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        made = optimizer() if callable(optimizer) else optimizer
        return compiled(stack(*map(keras.layers.Dense, units)), made)

    return build


def adam() -> keras.Model:
    model = stack(keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(1))
    return compiled(model, keras.optimizers.Adam(0.05), metrics=["mae"])


def train(folder: Any, *callbacks: Any, epochs: int = 4, **options: Any) -> tfd.DistributedModel:
    """A training of `adam` on two replicas; the same numbers each time."""
    keras.utils.set_random_seed(7)
    model = tfd.distribute(adam, mirrored(2))
    options = {"epochs": epochs, "checkpoint_dir": folder, **FIT, **options}
    model.fit(X, Y, callbacks=[*callbacks], **options)
    return model


class FailsIn(keras.callbacks.Callback):
    """Ends the job in the middle of the training, as an error of the user's code does."""

    def __init__(self, epoch: int, error: type[BaseException] = RuntimeError):
        super().__init__()
        self.epoch, self.error = epoch, error

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise self.error("in a callback")


def everything(model: tfd.DistributedModel) -> dict[str, np.ndarray]:
    """Name -> value of all that a checkpoint holds."""
    return {name: whole_value(variable) for name, variable in state_of(model.keras_model).items()}


def assert_same_state(one: Any, other: Any, tolerance: float = 0.0) -> None:
    one, other = everything(one), everything(other)
    assert list(one) == list(other)
    for name, value in one.items():
        np.testing.assert_allclose(
            value.astype(float), other[name].astype(float), rtol=0, atol=tolerance, err_msg=name
        )
