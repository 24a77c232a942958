"""The loss of Keras's own step, weighted with a replica's share, so that no gradient has to be.

A step of the user's may do something with its gradients before the optimizer gets them. There they
are weighted and summed when a tape gives them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras

__all__ = ["WeightedLoss", "hands_gradients_on"]


def hands_gradients_on(step: Any, model: keras.Model) -> bool:
    """Whether a step gives its gradients, as they are, to an optimizer that gets them summed."""
    if getattr(inspect.unwrap(step), "__func__", None) is not keras.Model.train_step:
        return False
    return not {"apply", "apply_gradients"} & vars(model.optimizer).keys()  # of the object alone


class WeightedLoss:
    """The loss of one replica's step, and the gradients of it, which are weighted already.

    Args:
        optimizer: the model's. What it makes of the loss, `scale_loss`, is what Keras's step takes
            the gradients of.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._loss: Any = None
        self._gradients: list[Any] = []
        self.computing = False  # gradients of it, now

    def scaled(self, optimizer: Any, loss: Any) -> None:
        """An optimizer's `scale_loss` returned `loss`."""
        if optimizer is self._optimizer:
            self._loss = loss

    def is_target(self, target: Any) -> bool:
        """Whether a tape is asked for the gradients of this loss."""
        return self._loss is not None and target is self._loss

    @contextlib.contextmanager
    def gradients_of(self) -> Iterator[list[Any]]:
        """Scope of computing gradients of it; they are to be added to the list."""
        self.computing = True
        try:
            yield self._gradients
        finally:
            self.computing = False

    def gave(self, gradient: Any) -> bool:
        """Whether a gradient is one of this loss."""
        return any(gradient is known for known in self._gradients)
