"""What workers have done with data that they read for themselves, so that a loss costs nothing.

A worker that dies takes along its place in the data, and the coordinator cannot tell whether a call
whose answer it never saw was done. So each call ends by writing one row, on a parameter server, in
one operation: how many batches of the worker's data have been used, and the metrics of them. Either
both count or none. Who goes on with that data, the worker started again or another one, goes on
behind what the row counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["SpareRecords", "WorkerRecords"]


class WorkerRecords:
    """A row for each worker's data: its position, then the metrics' states in one vector.

    Args:
        numbers: in the metrics' states.
    """

    def __init__(self, workers: int, numbers: int):
        self._workers = workers
        # All float64: it holds every count below 2**53, and one row is written at once.
        with tf.device("/job:ps/task:0/device:CPU:0"):
            self._rows = tf.Variable(tf.zeros([workers, 1 + numbers], tf.float64), trainable=False)

    def begin_pass(self) -> None:
        """Each worker is at the beginning of its data."""
        self._rows.assign(tf.zeros_like(self._rows))

    def begin_execution(self, start: Sequence[np.ndarray]) -> np.ndarray:
        """Set the metrics' states, for every worker; returns the positions, which stay."""
        positions = self._rows.numpy()[:, 0]
        states = np.tile(_in_one([tf.constant(value) for value in start]), (self._workers, 1))
        self._rows.assign(np.column_stack([positions, states]))
        return positions

    def read(self, like: Sequence[np.ndarray]) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """(position of each worker, the metrics' states of each worker)."""
        rows = self._rows.numpy()
        ends = np.cumsum([value.size for value in like])[:-1]
        states = [
            [part.reshape(value.shape) for part, value in zip(parts, like, strict=True)]
            for parts in (np.split(row[1:], ends) for row in rows)
        ]
        return rows[:, 0], states

    def position(self, worker: tf.Tensor) -> tf.Tensor:
        """In a graph: batches of a worker's data that are used."""
        return tf.cast(tf.gather(self._rows, worker)[0], tf.int64)

    def write(
        self,
        worker: tf.Tensor,
        steps: tf.Tensor,
        states: Sequence[tf.Tensor],
        start: Sequence[np.ndarray],
        adds: Sequence[bool],
    ) -> None:
        """In a graph: count the steps of a call.

        Args:
            states: of the metrics after the call, which began with `start`.
            adds: for each one, whether what was added to it is added; else it is replaced.
        """
        before = tf.gather(self._rows, worker)
        first = _in_one([tf.constant(value) for value in start])
        adding = np.repeat(np.array(adds, bool), [value.size for value in start])
        after = _in_one(states)
        after = tf.where(adding, before[1:] + (after - first), after)
        row = tf.concat([before[:1] + tf.cast([steps], tf.float64), after], axis=0)
        self._rows.scatter_update(tf.IndexedSlices(row[tf.newaxis], worker[tf.newaxis]))


def _in_one(states: Sequence[Any]) -> tf.Tensor:
    flat = [tf.reshape(tf.cast(state, tf.float64), [-1]) for state in states]
    return tf.concat(flat, axis=0) if flat else tf.zeros([0], tf.float64)


class SpareRecords:
    """Records that no data uses any more: functions that were traced with them are used again."""

    def __init__(self) -> None:
        self._spare: dict[int, list[WorkerRecords]] = {}

    def lend(self, user: Any, workers: int, numbers: int) -> WorkerRecords:
        """Records for as long as the user is alive."""
        spare = self._spare.setdefault(numbers, [])
        records = spare.pop() if spare else WorkerRecords(workers, numbers)
        weakref.finalize(user, spare.append, records)
        return records
