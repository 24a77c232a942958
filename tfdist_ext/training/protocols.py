"""Types that the rooms of a training share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

__all__ = [
    "BatchIterator",
    "Callbacks",
    "Epoch",
    "Execution",
    "Logs",
    "Reduction",
    "Specs",
    "StepFunction",
    "StepListener",
    "Structure",
    "TaskStatus",
    "TrainedModel",
    "on_every_worker",
]


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
        told: a task got the signal to end before this execution began.
    """

    logs: Logs
    steps: int
    chief_seconds: float
    told: bool = False


class StepListener(Protocol):
    """A listener for finished steps, called between the executions of a `fit`."""

    def max_steps(self) -> int | None:
        """The maximum of steps before the next call of `steps_done`; None: any number."""

    def steps_done(
        self, steps: int, logs: Logs, *, epoch_ends: bool, stopped: bool, told: bool
    ) -> None:
        """Called after that many more global batches; `logs` are over the epoch so far.

        Args:
            stopped: a callback stopped the training.
            told: a task got the signal to end.

        Raises:
            SystemExit: at such a signal, if the training can resume from here.
        """


class Phases(Protocol):
    """The phases of a task; a watchdog limits their time."""

    def enter(self, name: str) -> None: ...

    def of_call(self) -> AbstractContextManager[None]: ...


class Termination(Protocol):
    """Whether SIGTERM came, and whether the training ends at its next step."""

    received: float | None
    only_noted: bool


class TaskStatus:
    """Whether other tasks are alive and at the same barrier; in a single task it does nothing."""

    _termination: Termination | None = None  # of a training that saves
    _phases: Phases | None = None  # of a task that a watchdog watches

    def call(self, name: str) -> AbstractContextManager[None]:
        """Scope of a public call."""
        return contextlib.nullcontext() if self._phases is None else self._phases.of_call()

    def barrier(self, detail: str = "") -> AbstractContextManager[None]:
        """Scope in which this task waits for the others."""
        return contextlib.nullcontext()

    def reached(self, place: str) -> None:
        """Note how far this task is, as "step 120"."""

    def enters(self, phase: str) -> None:
        """This task begins a phase: "compiling", "steps", "callbacks" or "checkpoint"."""
        if self._phases is not None:
            self._phases.enter(phase)

    def reads_batches(self, count: Callable[[], int]) -> None:
        """`count` returns how many batches the running execution has read."""

    @property
    def told_to_end(self) -> bool:
        """Whether this task got the signal to end, in the scope of `ends_at_a_step`."""
        termination = self._termination
        return termination is not None and termination.only_noted and bool(termination.received)

    def ends_at_a_step(self) -> AbstractContextManager[None]:
        """Scope of a training in which a signal only asks for the end, at a step of all tasks."""
        return contextlib.nullcontext()


class Reduction(Protocol):
    """Values of single replicas and tasks, reduced to one value for all.

    Attributes:
        strategy: has the replicas.
        replicas: number of parts of a global batch, over all workers.
        local_replicas: number of replicas of this worker.
        first_replica: the index of this worker's first replica, over all workers.
        workers: number of workers.
        worker: the index of this worker.
        multi_worker: whether there are several workers.
        is_chief: whether this task writes files and prints.
        peers: the other tasks.
    """

    strategy: tf.distribute.Strategy
    replicas: int
    local_replicas: int
    first_replica: int
    workers: int
    worker: int
    multi_worker: bool
    is_chief: bool

    @property
    def peers(self) -> TaskStatus: ...

    def call(self, name: str) -> AbstractContextManager[None]:
        """Scope of a public call; all workers wait until each has made it."""

    def task_names(self) -> list[str]:
        """The tasks that compute, in the order of their replicas, as "worker 1"."""

    def sum_over_workers(self, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """The sum over workers of each worker's number or array; every worker must call."""

    def from_chief(self, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """The chief's number or array, on every worker; every worker must call."""

    def any_worker(self, flag: bool) -> bool:
        """Whether the flag is set on any worker; every worker must call."""


class TrainedModel(Protocol):
    """The methods of a `DistributedModel` that callbacks call."""

    @property
    def keras_model(self) -> keras.Model: ...

    def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...

    def predict(self, *args: Any, **kwargs: Any) -> Any: ...

    def load_weights(self, *args: Any, **kwargs: Any) -> None: ...


_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_every_worker(method: _Method) -> _Method:
    """Decorator of a public method that every worker must call; a missing call is an error."""

    @functools.wraps(method)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._reduction.call(method.__name__):
            return method(self, *args, **kwargs)

    return cast(_Method, called)


@dataclass(frozen=True)
class Epoch:
    """One epoch: its iterator and its number of global batches.

    Attributes:
        iterator: over the parts of this task's replicas.
        steps: global batches of the epoch; None: until the data ends.
        known_length: whether the data is known to have these steps.
        needs_row_count: whether the tasks have to agree in each step on what the global batch is.
        completed: global batches of the same epoch that are in the metrics already.
        advance: called with the number of batches that an execution used.
        batch_size: examples of a global batch, of data that is in memory; else None.
    """

    iterator: BatchIterator
    steps: int | None
    known_length: bool
    needs_row_count: bool
    completed: int
    advance: Callable[[int], None]
    batch_size: int | None = None
