"""Records when a task's steps begin, and when the task's own part of each step is ready.

In synchronous training a step takes as long on each worker as on the slowest one. The own time of a
worker is from the end of the last step to the moment from which it waits for the others. Waits in
the middle of the step are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfdist_ext.training.protocols import BatchIterator, Structure
from tfdist_ext.training.steps.rows import Gradient

__all__ = [
    "NO_ROWS",
    "Notes",
    "NullStepTimer",
    "ReplicaTimer",
    "StepTimer",
    "timestamp_after",
]


_Value = TypeVar("_Value")
_Answer = TypeVar("_Answer")


def timestamp_after(values: Structure) -> tf.Tensor:
    """The time at which all of these tensors are there, in seconds."""
    parts = tf.nest.flatten(values, expand_composites=True)
    there = [part for part in parts if part is not None]
    with tf.device("CPU:0"), tf.control_dependencies(there):
        return tf.timestamp()


NO_ROWS = -1.0  # in the place of a norm; a gradient that has diverged is NaN


class Notes(NamedTuple):
    """Times and norms of the steps since the last reading, a value for each step.

    Attributes:
        step: seconds of the whole step.
        own: seconds of this task's own part.
        norm: of this task's gradient; NO_ROWS where the task had no row in the step, or the step
            no gradient.
    """

    step: np.ndarray
    own: np.ndarray
    norm: np.ndarray


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


class StepTimer(NullStepTimer):
    """Notes of the steps of one task, in a queue until they are read."""

    records = True

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(-1, [tf.float64], [[3]])  # -1: no limit
        self._begun: tf.Tensor | None = None
        self._waited: tf.Tensor | float = 0.0

    def timed_iterator(self, iterator: BatchIterator) -> BatchIterator:
        return _Reading(iterator, self._begin)

    def synchronize(self, ask: Callable[[_Value], _Answer], value: _Value) -> _Answer:
        before = timestamp_after(value)
        answer = ask(value)
        self._waited = timestamp_after(answer) - before
        return answer

    def replica_timer(self) -> ReplicaTimer:
        return ReplicaTimer()

    def step_is_done(self, notes: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> None:
        # The task is ready when its last replica is.
        ready = tf.reduce_max(tf.stack([note[0] for note in notes]))
        norms = tf.stack([note[1] for note in notes])
        with_rows = tf.cast(tf.not_equal(norms, NO_ROWS), tf.int32)
        norm = tf.gather(norms, tf.argmax(with_rows))  # of the first that has any
        self._note(self._begun, ready - self._begun - self._waited, norm)

    def execution_is_done(self, last: tf.Tensor) -> None:
        self._note(timestamp_after(last), -1.0, 0.0)

    def read(self) -> Notes:
        """The notes of all steps since the last call."""
        begun, own, norm = self._queue.dequeue_many(self._queue.size()).numpy().T
        steps = own >= 0  # the others are ends of executions
        return Notes(np.diff(begun, append=0.0)[steps], own[steps], norm[steps])

    def _begin(self) -> tf.Tensor:
        self._begun = timestamp_after([])
        self._waited = 0.0
        return self._begun

    def _note(self, *numbers: tf.Tensor | float) -> None:
        row = [tf.cast(number, tf.float64) for number in numbers]
        with tf.device("CPU:0"):
            self._queue.enqueue(tf.stack(row))


class ReplicaTimer:
    """Notes of one replica's step: to be used while that step is traced, or runs eagerly."""

    def __init__(self) -> None:
        # When this replica began to wait for the others, and when the wait was over.
        self._waits: list[tuple[tf.Tensor, tf.Tensor]] = []
        self._squares: list[tf.Tensor] = []
        self._has_rows: tf.Tensor | bool = True

    def synchronize(self, function: Callable[[_Value], _Answer], values: _Value) -> _Answer:
        """Returns `function(values)`, which waits for all replicas."""
        ready = timestamp_after([values, self._squares])
        result = function(values)
        self._waits.append((ready, timestamp_after(result)))
        return result

    def gradients(self, weighted: Sequence[Gradient], weight: tf.Tensor) -> None:
        """Take the norm of a gradient times `weight`: share of the rows, and loss scale."""
        norm = tf.linalg.global_norm(list(weighted))
        # On the host: a GPU's operation is done for TensorFlow when the GPU has been told of it.
        with tf.device("CPU:0"):
            of_rows = tf.math.divide_no_nan(tf.cast(norm, tf.float64), weight)
            self._squares.append(of_rows**2)
            self._has_rows = weight > 0

    def notes(self, outcome: Structure) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (when it was ready, less what it had waited before; norm of its mean gradient).

        Args:
            outcome: of a step without collectives; it is ready when these tensors are there.
        """
        *before, (ready, _) = self._waits or [(timestamp_after(outcome), None)]
        ready -= sum(end - start for start, end in before)
        if not self._squares:
            return ready, tf.constant(NO_ROWS, tf.float64)
        with tf.device("CPU:0"):
            norm = tf.sqrt(tf.add_n(self._squares))
            return ready, tf.where(self._has_rows, norm, tf.constant(NO_ROWS, tf.float64))


class _Reading:
    """An iterator whose elements are asked for when the step has begun."""

    def __init__(self, iterator: BatchIterator, begin: Callable[[], tf.Tensor]):
        self._iterator = iterator
        self._begin = begin

    def __next__(self) -> Structure:
        with tf.control_dependencies([self._begin()]):
            return next(self._iterator)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        with tf.control_dependencies([self._begin()]):
            return self._iterator.get_next_as_optional()
