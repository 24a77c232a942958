"""Records when a task's steps begin, and when the task's own part of each step is ready.

In synchronous training a step takes as long on each worker as on the slowest one. The own time of a
worker is the time of its step until the last wait for the others, less all waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


def timestamp_after(values: Structure) -> tf.Tensor:
    """Returns the time at which all of these tensors are computed, in seconds."""
    parts = tf.nest.flatten(values, expand_composites=True)
    tensors = [part for part in parts if part is not None]
    # On the host: TensorFlow takes an operation of a GPU as done when it is sent to the GPU.
    with tf.device("CPU:0"), tf.control_dependencies(tensors):
        return tf.timestamp()


class Waits:
    """The waits of a step for others, recorded while it is traced, or runs eagerly."""

    def __init__(self) -> None:
        self._times: list[tuple[tf.Tensor, tf.Tensor]] = []  # begin and end of each
        self._is_waiting = False

    def synchronize(self, function: Callable[[_Value], _Result], values: _Value) -> _Result:
        """Returns `function(values)`, which waits for all replicas."""
        if self._is_waiting:  # a wait inside of another one counts once
            return function(values)
        begin = timestamp_after(values)
        self._is_waiting = True
        try:
            result = function(values)
        finally:
            self._is_waiting = False
        self._times.append((begin, timestamp_after(result)))
        return result

    def seconds(self) -> tf.Tensor | float:
        """Returns how long all waits took together."""
        return sum((end - begin for begin, end in self._times), start=0.0)

    def ready(self, outcome: Structure) -> tf.Tensor:
        """Returns when the last wait is over and these tensors are computed, less all waits."""
        return timestamp_after([outcome, *(end for _, end in self._times)]) - self.seconds()


class StepTimer:
    """Times of the steps of one task, in a queue until they are read.

    Attributes:
        waits: for all workers, before the replicas' steps.
    """

    def __init__(self) -> None:
        self.waits = Waits()
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(-1, [tf.float64], [[2]])  # -1: no limit

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Scope of the first operations of a step, which read its batch."""
        self._begun = timestamp_after([])
        self.waits = Waits()
        return tf.control_dependencies([self._begun])

    def step_is_done(self, ready: Sequence[tf.Tensor]) -> None:
        """Records a step, which ends when the last replica is ready (`Waits.ready`)."""
        own = tf.reduce_max(tf.stack(ready)) - self._begun - self.waits.seconds()
        self._note(self._begun, own)

    def execution_is_done(self, last: tf.Tensor) -> None:
        """Records when the execution ended, with this tensor."""
        self._note(timestamp_after(last), -1.0)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(milliseconds of each step, those of this task's own part) since the last call."""
        begun, own = 1000 * self._queue.dequeue_many(self._queue.size()).numpy().T
        steps = own >= 0  # the others are ends of executions
        return np.diff(begun, append=0.0)[steps], own[steps]

    def _note(self, *numbers: tf.Tensor | float) -> None:
        with tf.device("CPU:0"):
            self._queue.enqueue(tf.stack([tf.cast(number, tf.float64) for number in numbers]))
