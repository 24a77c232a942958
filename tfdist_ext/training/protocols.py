"""The interfaces of a training: what each engine implements; and their null objects.

`DistributedModel` and its loop know these protocols alone. Synchronous strategies implement them
in `synchronous/`, parameter servers in `parameter_server/`; neither knows the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

__all__ = [
    "BatchIterator",
    "BatchSource",
    "Callbacks",
    "Engine",
    "Epoch",
    "Execution",
    "Logs",
    "NullStepTimer",
    "PredictProgram",
    "Reduction",
    "Specs",
    "StepFunction",
    "StepListener",
    "StepProgram",
    "Structure",
    "TaskStatus",
    "on_every_worker",
]


if TYPE_CHECKING:
    from tfdist_ext.training.agreement.stalls import Phases
    from tfdist_ext.training.agreement.termination import Termination
    from tfdist_ext.training.loop import StepsPerExecutionTuner
    from tfdist_ext.training.steps.step_timer import ReplicaTimer, StepTimer


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


class StepProgram(Protocol):
    """The compiled steps of one model and one kind, "train" or "test".

    Attributes:
        traces: how the step is traced, in words.
        paces: by the size of a global batch, how many steps fit in an execution: what earlier
            fits have found.
    """

    paces: dict[int, StepsPerExecutionTuner]

    @property
    def traces(self) -> str: ...

    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""

    def run(self, data: Epoch, n: int, seconds: float, *, told: bool = False) -> Execution:
        """Run `n` steps of an epoch, or fewer where its data may end and does.

        Args:
            n: global batches to use.
            seconds: how long this task's last execution took; the chief's figure comes back on
                every task, so that all choose the same next `n`.
            told: this task was told to end; every task learns of it.
        """


class PredictProgram(Protocol):
    """The compiled predict step of one model.

    Attributes:
        traces: how the step is traced, in words.
    """

    @property
    def traces(self) -> str: ...

    def outputs(self, data: Epoch) -> Iterator[Structure]:
        """The outputs for each global batch, in order; None for one without a row that is whole."""


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


class BatchSource(Protocol):
    """One pass after another over a sequence of global batches.

    Attributes:
        steps: global batches in a pass; None where only reading tells.
        batch_size: examples in a global batch; None where only reading tells.
        is_infinite: it starts the next pass by itself, so that no step has to ask whether
            the data has ended: under several workers each such question is a collective.
        begin: the global batch of a pass that the first pass begins with.
        needs_row_count: how many rows a global batch has is known only when those of all parts are
            counted.
        element_spec: the structure of one global batch of `tf.TypeSpec`s.
        dataset: a `tf.data.Dataset` of one pass of whole global batches, where each task reads all
            of them as they are, in the order in which they come; else None.
        arrays: all of the data, where each task holds it; else None.
    """

    steps: int | None
    batch_size: int | None
    is_infinite: bool
    begin: int
    needs_row_count: bool
    dataset: tf.data.Dataset | None
    arrays: Structure

    @property
    def element_spec(self) -> Specs: ...

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...

    def advance(self, steps: int) -> None:
        """Called after that many more global batches were used; data with a position moves it."""

    def ended(self) -> None:
        """A pass is over."""


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
        replicas: parts of a global batch, over all workers.
        local_replicas: those of this worker.
        first_replica: the number of its first one, in the order of all.
        workers: how many there are.
        worker: which of them this task is.
        multi_worker: whether there are several.
        is_chief: whether this task writes files and prints.
        peers: the other tasks.
    """

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


class Engine(Protocol):
    """The engine that runs a model's steps: on replicas of this process, or on workers elsewhere.

    Attributes:
        reduction: who agrees with whom.
        state_is_here: whether each task has all variables in its own memory.
        seconds_per_execution: how long an execution should take, where nothing else decides.
    """

    state_is_here: bool
    seconds_per_execution: float

    @property
    def reduction(self) -> Reduction:
        """The reduction over the workers that have to agree."""

    def read(self, *data: Any, **options: Any) -> BatchSource:
        """Read the data of `fit`, `evaluate` or `predict` as global batches."""

    def feed(self, batches: Any) -> Any:
        """The input that programs iterate over, made from the result of `read`."""

    def keeps_position(self, data: Any) -> bool:
        """Whether `fit` knows at each step where it is in this data."""

    def state_is_restored(self) -> None:
        """The model, and the generator of random numbers, have the state of a checkpoint."""

    def saves_to(self, folder: str) -> None:
        """Where the checkpoints of a `fit` are, or "": for a message when a task is frozen."""

    def prepare(self, model: keras.Model) -> None:
        """Turn off compile options that the strategy does not support."""

    def step_timer(self) -> StepTimer:
        """The timer of this task's training steps, which is told when they begin and end.

        Raises:
            TrainingError: the steps of this strategy cannot be timed.
        """

    def program(self, model: keras.Model, kind: str, timer: NullStepTimer) -> StepProgram:
        """The compiled "train" or "test" steps, made anew when the model was compiled since."""

    def predictor(self, model: keras.Model) -> PredictProgram:
        """The compiled predict step."""

    def traces(self) -> list[str]:
        """How each kind of step that has run is traced, a line each."""

    def finalize(self, model: keras.Model) -> None:
        """End a training: averaged weights replace the last ones."""


_Value = TypeVar("_Value")
_Answer = TypeVar("_Answer")


class NullStepTimer:
    """The null object of `StepTimer`, where times are not asked for: adds nothing to the graph."""

    records = False

    def timed_iterator(self, iterator: BatchIterator) -> BatchIterator:
        """The iterator; to take from it is the beginning of a step."""
        return iterator

    def synchronize(self, ask: Callable[[_Value], _Answer], value: _Value) -> _Answer:
        """`ask(value)`, which waits for all workers, before the step of a batch that is there."""
        return ask(value)

    def replica_timer(self) -> ReplicaTimer | None:
        """The timer of one replica's step."""
        return None

    def step_is_done(self, notes: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> None:
        """Take the notes of this task's replicas."""

    def execution_is_done(self, last: tf.Tensor) -> None:
        """Take note of the end, at which this tensor is there."""


class _HasReduction(Protocol):
    _reduction: Reduction


_Caller = TypeVar("_Caller", bound=_HasReduction)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def on_every_worker(
    method: Callable[Concatenate[_Caller, _Given], _Result],
) -> Callable[Concatenate[_Caller, _Given], _Result]:
    """A public method that every worker must call: where one does not, the others say so."""

    @functools.wraps(method)
    def called(self: _Caller, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self._reduction.call(method.__name__):
            return method(self, *args, **kwargs)

    return called


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
        element_spec: gives the structure of a global batch.
        batch_size: examples of a global batch, of data that is in memory; else None.
    """

    iterator: BatchIterator
    steps: int | None
    known_length: bool
    needs_row_count: bool
    completed: int
    advance: Callable[[int], None]
    element_spec: Callable[[], Specs]
    batch_size: int | None = None
