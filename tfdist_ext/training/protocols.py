"""Types that the rooms of a training share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

# Tensors, in tuples, lists and dicts, as models take and return them. A tensor may be ragged or
# sparse, or a variable; None stands where one is left out.
Structure: TypeAlias = "tf.Tensor | Sequence[Structure] | Mapping[str, Structure] | None"


# The same structures of `tf.TypeSpec`s.
Specs: TypeAlias = "tf.TypeSpec | Sequence[Specs] | Mapping[str, Specs] | None"


# An iterator over the result of `Engine.feed`: for each global batch, this task's parts of it.
BatchIterator: TypeAlias = tf.data.Iterator | tf.distribute.DistributedIterator


# The value of each metric by name. An output that is not a single number is an array.
Logs: TypeAlias = dict[str, float | np.ndarray]


# What Keras's fit, evaluate and predict take as callbacks.
_Callback: TypeAlias = keras.callbacks.Callback
Callbacks: TypeAlias = _Callback | keras.callbacks.CallbackList | Sequence[_Callback] | None


# A step of a model, from a replica's part of a batch to logs, or to the outputs of a prediction.
StepFunction = Callable[[Structure], Structure]


@dataclass(frozen=True)
class Execution:
    """The result of an execution of several steps.

    Attributes:
        logs: over the epoch so far, the same on every worker.
        steps: global batches that were used.
        chief_seconds: how long the execution before this one took on the chief.
        stop_requested: a task received SIGTERM before this execution began.
    """

    logs: Logs
    steps: int
    chief_seconds: float
    stop_requested: bool = False


class TrainedModel(Protocol):
    """The methods of a `DistributedModel` that callbacks and the evaluator call."""

    @property
    def keras_model(self) -> keras.Model: ...

    def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...

    def predict(self, *args: Any, **kwargs: Any) -> Any: ...

    def load_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def restore_checkpoint(self, path: str) -> Any: ...
