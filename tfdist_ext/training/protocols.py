"""Types that the rooms of a training share, and what one room uses of another above it.

The engines themselves have a common base, `programs.Engine`.
"""

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
    "BatchSource",
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


# The same of `tf.TypeSpec`s.
Specs: TypeAlias = "tf.TypeSpec | Sequence[Specs] | Mapping[str, Specs] | None"


# What `iter` makes of what `Engine.feed` gave: for each global batch, this task's parts of it.
BatchIterator: TypeAlias = tf.data.Iterator | tf.distribute.DistributedIterator


# The value of each metric by name; of an output that is no single number, an array.
Logs: TypeAlias = dict[str, float | np.ndarray]


# What Keras's fit, evaluate and predict take as callbacks.
_Callback: TypeAlias = keras.callbacks.Callback
Callbacks: TypeAlias = _Callback | keras.callbacks.CallbackList | Sequence[_Callback] | None


# A step method of a model: a batch (the part of the replica that runs) -> what Keras's has
# returned: logs of a train or test step, outputs of a predict step.
StepFunction = Callable[[Structure], Structure]


@dataclass(frozen=True)
class Execution:
    """The result of an execution of several steps.

    Attributes:
        logs: over the epoch so far, the same on every worker.
        steps: global batches that were used.
        chief_seconds: how long the execution before this one took on the chief.
        told: one of the tasks was told to end, before this execution began.
    """

    logs: Logs
    steps: int
    chief_seconds: float
    told: bool = False


class StepListener(Protocol):
    """A listener for finished steps, called between the executions of a `fit`."""

    def max_steps(self) -> int | None:
        """How many steps may be done before it is to be told; None: any number."""

    def steps_done(
        self, steps: int, logs: Logs, *, epoch_ends: bool, stopped: bool, told: bool
    ) -> None:
        """Called after that many more global batches; `logs` are over the epoch so far.

        Args:
            stopped: a callback has told the training to stop.

        Raises:
            SystemExit: `told`, a task was told to end, and this is a place to go on from.
        """


@dataclass(kw_only=True)
class BatchSource:
    """One pass after another over a sequence of global batches.

    Attributes:
        steps: global batches in a pass; None where only reading tells.
        batch_size: examples in a global batch; None where only reading tells.
        is_infinite: it starts the next pass by itself, so that no step has to ask whether
            the data has ended: under several workers each such question is a collective.
        begin: the global batch of a pass that the first pass begins with.
        needs_row_count: how many rows a global batch has is known only when those of all parts are
            counted.
        dataset: a `tf.data.Dataset` of one pass of whole global batches, where each task reads all
            of them as they are, in the order in which they come; else None.
        arrays: all of the data, where each task holds it; else None.
        changes: each pass must be fed again.
        advance: called after that many more global batches were used.
        ended: called when a pass is over.
    """

    steps: int | None = None
    batch_size: int | None = None
    is_infinite: bool = False
    begin: int = 0
    needs_row_count: bool = False
    dataset: tf.data.Dataset | None = None
    arrays: Structure = None
    changes: bool = False
    on_epoch_begin: Callable[[], None] = lambda: None
    on_epoch_end: Callable[[], None] = lambda: None
    advance: Callable[[int], None] = lambda steps: None
    ended: Callable[[], None] = lambda: None

    @property
    def element_spec(self) -> Specs:
        """The structure of one global batch of `tf.TypeSpec`s, batch dimension unknown."""
        raise NotImplementedError


class Phases(Protocol):
    """The phase that a task is in, for whoever watches that it ends."""

    def enter(self, name: str) -> None: ...

    def of_call(self) -> AbstractContextManager[None]: ...


class Termination(Protocol):
    """Whether SIGTERM has come, and whether it is only noted."""

    received: float | None
    only_noted: bool


class TaskStatus:
    """Whether other tasks are alive and in the same place; in a single task it does nothing."""

    _termination: Termination | None = None  # of a training that saves
    _phases: Phases | None = None  # for who watches that they end

    def call(self, name: str) -> AbstractContextManager[None]:
        """Scope of a public call."""
        return contextlib.nullcontext() if self._phases is None else self._phases.of_call()

    def barrier(self, detail: str = "") -> AbstractContextManager[None]:
        """Scope in which this task waits for the others."""
        return contextlib.nullcontext()

    def reached(self, place: str) -> None:
        """This task has come so far."""

    def enters(self, phase: str) -> None:
        """This task begins with "compiling", "steps", "callbacks", "checkpoint", or more of it."""
        if self._phases is not None:
            self._phases.enter(phase)

    def reads_batches(self, count: Callable[[], int]) -> None:
        """`count` tells how many batches the execution that begins has read, while it runs."""

    @property
    def told_to_end(self) -> bool:
        """Whether this task has got the signal to end, in the scope of `ends_at_a_step`."""
        termination = self._termination
        return termination is not None and termination.only_noted and bool(termination.received)

    def ends_at_a_step(self) -> AbstractContextManager[None]:
        """Scope of a training that ends at a step that all tasks agree on, when one is told to."""
        return contextlib.nullcontext()


class Reduction(Protocol):
    """Values of single replicas and tasks, made one for all.

    Attributes:
        strategy: that has the replicas.
        replicas: parts of a global batch, over all workers.
        local_replicas: those of this worker.
        first_replica: the number of its first one, in the order of all.
        workers: how many there are.
        worker: which of them this task is.
        multi_worker: whether there are several.
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
    """A public method that every worker must call: where one does not, the others say so."""

    @functools.wraps(method)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._reduction.call(method.__name__):
            return method(self, *args, **kwargs)

    return cast(_Method, called)


@dataclass(frozen=True)
class Epoch:
    """One epoch: where to read, and how many global batches.

    Attributes:
        iterator: over the parts of this task's replicas.
        steps: global batches to do; None: until the data ends.
        known_length: whether there are that many for sure.
        needs_row_count: whether the tasks have to agree in each step on what the global batch is.
        completed: global batches of the same epoch that are in the metrics already.
        advance: to be told how many batches were used, after each execution.
        batch_size: examples of a global batch, of data that is in memory; else None.
    """

    iterator: BatchIterator
    steps: int | None
    known_length: bool
    needs_row_count: bool
    completed: int
    advance: Callable[[int], None]
    batch_size: int | None = None
