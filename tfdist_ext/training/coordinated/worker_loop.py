"""Steps over data that the workers of a parameter server cluster read for themselves.

A call goes on with the data of whichever worker takes it. The data of a worker that stays away is
taken over: another one makes it again, from where the records say that it was left.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist_ext.training.coordinated.calls import Calls, on_worker
from tfdist_ext.training.coordinated.inputs import WorkerIterators

__all__ = ["PATIENCE", "Steps", "WorkerLoop"]

# Seconds without an answer from a worker, while all others are done with their data, after which
# they take over the rest of its data. A process takes as long to start again.
PATIENCE = 10.0


class Steps(NamedTuple):
    """What a step is, to the loop.

    Args:
        one: tf.function of (batch, number of the step, learning rate, metrics' states), which
            gives (states, outputs).
        start: the metrics' states at first.
        adds: for each of them, whether steps add to it.
        rate: dtype of the learning rate.
        counted: how often a step counts itself; known when `one` has been traced.
    """

    one: Any
    start: Sequence[np.ndarray]
    adds: Sequence[bool]
    rate: Any
    counted: Callable[[], int]


class WorkerLoop:
    """The remote calls of steps on the data of each worker, `batches_in_a_call` at most."""

    def __init__(self, calls: Calls, steps: Steps, batches_in_a_call: int):
        self._calls = calls
        self._steps = steps
        self._most = batches_in_a_call
        self._functions: dict[tuple[str, int], tuple[Any, Any]] = {}

    def run(
        self, data: WorkerIterators, n: int, first: int, rate: Any
    ) -> tuple[int, list[list[np.ndarray]], dict[str, Any]]:
        """(steps done, the metrics' states of each worker's data, what the last step returned).

        Args:
            n: steps to do; fewer are done where all workers' data ends.
            first: number of the first step.
        """
        begun = data.begin(self._steps.start)
        own, rest = self._functions_for(data)
        outputs: dict[str, Any] = {}
        done = 0
        heard = dict.fromkeys(data.unfinished, time.monotonic())
        while done < n and data.unfinished:
            most = max(1, min(self._most, (n - done) // (4 * self._calls.workers)))
            with self._calls.all_done() as call:
                for start in range(done, n, most):
                    step = np.int64(first + start * self._steps.counted())
                    call(own, [data.of_workers, np.int64(min(most, n - start)), step, rate])
            left_behind = False
            for worker, steps, ended, elsewhere, of_call in call.results():
                outputs = of_call if steps else outputs
                heard[int(worker)] = time.monotonic()
                data.unfinished -= {int(worker)} if ended else set()
                left_behind = left_behind or bool(elsewhere)
            if left_behind:
                data.restart()
            before, done = done, self._done(data, begun)
            if done == before and data.unfinished:  # only workers that are done have answered
                silent = [
                    worker
                    for worker in sorted(data.unfinished)
                    if time.monotonic() - heard[worker] > PATIENCE
                ]
                for worker in silent:
                    outputs = self._take_over(data, rest, worker, n - done, first + done, rate)
                    done = self._done(data, begun)
                time.sleep(0.1)
        _, states = data.records.read(self._steps.start)
        return done, states, outputs

    def _take_over(
        self, data: WorkerIterators, rest: Any, worker: int, n: int, first: int, rate: Any
    ) -> dict[str, Any]:
        warnings.warn(
            f"worker {worker} has not answered for {PATIENCE:.0f} s, and the other workers"
            " are done with their data: one of them goes on with the rest of its data.",
            stacklevel=2,
        )
        with self._calls.all_done() as call:
            call(rest, [np.int64(worker), np.int64(n), np.int64(first), rate])
        ((_, _, ended, _, outputs),) = call.results()
        data.unfinished -= {worker} if ended else set()
        return dict(outputs)

    def _done(self, data: WorkerIterators, begun: np.ndarray) -> int:
        positions, _ = data.records.read(self._steps.start)
        return int((positions - begun).sum())

    def _functions_for(self, data: WorkerIterators) -> tuple[Any, Any]:
        """(calls on the worker's own iterator, calls on the rest of another one's data)."""
        key = (str(data.element_spec), id(data.records))
        if key not in self._functions:
            number = tf.TensorSpec([], tf.int64)
            rate = tf.TensorSpec([], self._steps.rate)
            index = tf.TensorSpec([], tf.int64)
            element = (index, data.element_spec)

            def own(iterator: Any, count: Any, first: Any, rate: Any) -> Any:
                worker = tf.distribute.coordinator.experimental_get_current_worker_index()
                return self._loop(data, iterator, tf.identity(worker), count, first, rate)

            def rest(worker: Any, count: Any, first: Any, rate: Any) -> Any:
                iterator = data.of_worker(worker)
                return self._loop(data, iterator, worker, count, first, rate)

            self._functions[key] = (
                on_worker(own, tf.data.IteratorSpec(element), number, number, rate),
                on_worker(rest, index, number, number, rate),
            )
        return self._functions[key]

    def _loop(
        self, data: WorkerIterators, iterator: Any, worker: Any, count: Any, first: Any, rate: Any
    ) -> tuple[Any, ...]:
        """In a graph: `count` steps, or fewer where the data ends or the iterator is elsewhere.

        Returns (worker, steps done, whether the data has ended, whether the iterator is not where
        the records say, what the last step returned).
        """
        start: list[Any] = [tf.constant(value) for value in self._steps.start]
        # Traced beforehand: a loop must know what comes out of it, and how steps count.
        spec = self._steps.one.get_concrete_function(data.element_spec, first, rate, start)
        empty = {
            name: tf.zeros([n or 0 for n in output.shape], output.dtype)
            for name, output in spec.structured_outputs[1].items()
        }
        counted = self._steps.counted()
        position = data.records.position(worker)

        def body(i: Any, _: Any, __: Any, states: Any, outputs: Any) -> Any:
            element = iterator.get_next_as_optional()
            more = element.has_value()
            expected = tf.cond(
                more,
                lambda: tf.equal(element.get_value()[0], position + i),
                lambda: tf.constant(True),
            )
            go_on = tf.logical_and(more, expected)
            states, outputs = tf.cond(
                go_on,
                lambda: self._steps.one(element.get_value()[1], first + i * counted, rate, states),
                lambda: (states, outputs),
            )
            return i + tf.cast(go_on, tf.int64), more, expected, states, outputs

        done, more, expected, states, outputs = tf.while_loop(
            lambda i, more, expected, *_: (i < count) & more & expected,
            body,
            (tf.constant(0, tf.int64), tf.constant(True), tf.constant(True), start, empty),
        )
        with tf.control_dependencies([done]):  # all that the steps have written is written
            data.records.write(worker, done, states, self._steps.start, self._steps.adds)
        return worker, done, tf.logical_not(more), tf.logical_not(expected), outputs
