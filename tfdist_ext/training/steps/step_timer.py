"""Records when a task's steps begin, and when the task's own part of each step is ready.

In synchronous training a step takes as long on each worker as on the slowest one. The own time of a
worker is from the end of the last step to the moment from which it waits for the others. Waits in
the middle of the step are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdist_ext.data.rows import Structure

__all__ = ["ReplicaTimer", "StepTimer", "timestamp_after"]


_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


def timestamp_after(values: Structure) -> tf.Tensor:
    """Returns the time at which all of these tensors are computed, in seconds."""
    parts = tf.nest.flatten(values, expand_composites=True)
    tensors = [part for part in parts if part is not None]
    # On the host: TensorFlow takes an operation of a GPU as done when it is sent to the GPU.
    with tf.device("CPU:0"), tf.control_dependencies(tensors):
        return tf.timestamp()


class ReplicaTimer:
    """Times of one replica's step: to be used while that step is traced, or runs eagerly."""

    def __init__(self) -> None:
        self._waits: list[tuple[tf.Tensor, tf.Tensor]] = []  # begin and end of each
        self._is_waiting = False

    def synchronize(self, function: Callable[[_Value], _Result], values: _Value) -> _Result:
        """Returns `function(values)`, which waits for all replicas."""
        if self._is_waiting:  # a wait inside of another one counts once
            return function(values)
        ready = timestamp_after(values)
        self._is_waiting = True
        try:
            result = function(values)
        finally:
            self._is_waiting = False
        self._waits.append((ready, timestamp_after(result)))
        return result

    def waited(self) -> tf.Tensor | float:
        """How long all waits took together, in seconds."""
        return _seconds(self._waits)

    def ready(self, outcome: Structure) -> tf.Tensor:
        """When the last wait began, less what the waits before it took.

        Args:
            outcome: of a step without waits; it is ready when these tensors are there.
        """
        *before, (ready, _) = self._waits or [(timestamp_after(outcome), None)]
        return ready - _seconds(before)


def _seconds(waits: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor | float:
    return sum((end - begin for begin, end in waits), start=0.0)


class StepTimer:
    """Times of the steps of one task, in a queue until they are read."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(-1, [tf.float64], [[2]])  # -1: no limit

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Scope of the first operations of a step, which read its batch."""
        self._begun = timestamp_after([])
        self._before = ReplicaTimer()
        return tf.control_dependencies([self._begun])

    def synchronize(self, function: Callable[[_Value], _Result], values: _Value) -> _Result:
        """Returns `function(values)`, which waits for all workers before the replicas' steps."""
        return self._before.synchronize(function, values)

    def step_is_done(self, ready: Sequence[tf.Tensor]) -> None:
        """Take the result of `ReplicaTimer.ready` of each replica; the last one counts."""
        own = tf.reduce_max(tf.stack(ready)) - self._begun - self._before.waited()
        self._note(self._begun, own)

    def execution_is_done(self, last: tf.Tensor) -> None:
        """Take note of the end, at which this tensor is there."""
        self._note(timestamp_after(last), -1.0)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(milliseconds of each step, those of this task's own part) since the last call."""
        begun, own = 1000 * self._queue.dequeue_many(self._queue.size()).numpy().T
        steps = own >= 0  # the others are ends of executions
        return np.diff(begun, append=0.0)[steps], own[steps]

    def _note(self, *numbers: tf.Tensor | float) -> None:
        with tf.device("CPU:0"):
            self._queue.enqueue(tf.stack([tf.cast(number, tf.float64) for number in numbers]))
