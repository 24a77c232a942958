"""Data that each worker reads for itself, with records that survive the loss of a worker.

When a worker dies, its iterator is lost, and the coordinator does not know whether an unanswered
call was done. So each call ends by writing one row on a parameter server, in one operation: how
many batches of the worker's data have been used, and the metrics of these batches. Either both
count or neither. The restarted worker continues after the batches that the row counts.

A call uses the data of the worker that takes the call. If a worker stays away, another worker makes
its data again and continues after the row. Data that cannot be made in another process is read by
the coordinator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.pipelines import PY_FUNCTIONS, operations_in, without_autotune
from tfdist_ext.data.shards import Shard
from tfdist_ext.training.inputs import GlobalBatches
from tfdist_ext.training.parameter_server.calls import (
    BATCHES_IN_A_CALL,
    Calls,
    ConcreteFunction,
    on_worker,
)
from tfdist_ext.training.protocols import Specs
from tfdist_ext.user_frames import warn

__all__ = [
    "PATIENCE",
    "StepValues",
    "WorkerBatches",
    "WorkerIterators",
    "WorkerLoop",
    "packed",
    "unpacked",
    "why_not_remote",
]


class WorkerBatches(GlobalBatches):
    """The data sets that a function makes, one for each worker. A batch is the batch of a step."""

    def __init__(self, calls: Calls, data: FunctionDataset):
        self.workers = calls.workers
        self._calls = calls
        self._data = data
        with tf.device("CPU:0"):
            here = [self._of_worker(worker) for worker in range(self.workers)]
        self._spec = here[0].element_spec
        endless = [bool(each.cardinality() == tf.data.INFINITE_CARDINALITY) for each in here]
        super().__init__(parts_of=_read_by_workers, is_infinite=all(endless))
        self._datasets: Iterable[Any] | None = None  # an iterator of each worker

    @property
    def element_spec(self) -> Specs:
        return self._spec

    def _of_worker(self, worker: int) -> tf.data.Dataset:
        return self._data.made(Shard(worker, self.workers), alone=True)

    def rest_of(self, worker: tf.Tensor, records: WorkerRecords) -> tf.data.Dataset:
        """In a graph: the batches of a worker's data that are not used yet, each with its number.

        The user's function takes a number, not a tensor, so the data sets of all workers are made
        and one of them is read. A `tf.switch_case` would not make them all, but cannot use lookup
        tables ("You must feed a value for placeholder tensor").
        """
        datasets = map(self._of_worker, range(self.workers))
        variants = tf.stack([tf.data.experimental.to_variant(each) for each in datasets])
        dataset = tf.data.experimental.from_variant(variants[worker], self.element_spec)
        position = records.position(worker)
        # Untuned: the coordinator's last word to a worker waits behind the end of its iterator.
        return without_autotune(
            dataset.skip(position).enumerate(position).prefetch(tf.data.AUTOTUNE)
        )

    def iterators(self, records: WorkerRecords) -> tf.distribute.coordinator.PerWorkerValue:
        """An iterator on each worker. TensorFlow makes a new one when a worker is restarted."""
        if self._datasets is None:
            index = tf.distribute.coordinator.experimental_get_current_worker_index
            self._datasets = self._calls.coordinator.create_per_worker_dataset(
                lambda: self.rest_of(tf.identity(index()), records)
            )
        return iter(self._datasets)

    def __iter__(self) -> WorkerIterators:
        return WorkerIterators(self)


def _read_by_workers(*replicas: int) -> NoReturn:
    raise NotImplementedError


class WorkerIterators:
    """One pass: an iterator on each worker, and the workers whose data has not ended.

    Elements are (number of the batch in the worker's data, batch).
    """

    def __init__(self, batches: WorkerBatches):
        self.batches = batches
        self.unfinished = set(range(batches.workers))
        self.of_workers: tf.distribute.coordinator.PerWorkerValue | None = None

    def __next__(self) -> NoReturn:
        raise NotImplementedError  # the workers read


def why_not_remote(data: FunctionDataset, workers: int) -> str:
    """Why only this process can read the data, in words; "" if every process can.

    A worker receives graphs and tensors. It cannot receive a data set or a Python function.
    """
    if data.takes_epoch:
        return "its function has an argument epoch, so it is called for each epoch"
    traced = tf.function(
        lambda: tf.data.experimental.to_variant(data.made(Shard(0, workers), alone=True)),
        autograph=False,
    ).get_concrete_function()
    if any(tensor.dtype == tf.variant for tensor in traced.captured_inputs):
        return "its data set is made outside of the function; make it inside"
    if operations_in(traced.graph.as_graph_def()) & PY_FUNCTIONS:
        return "it calls Python (from_generator, py_function, numpy_function)"
    return ""


class WorkerRecords:
    """A row for each worker's data: its position, then the metrics' states in one vector.

    Args:
        numbers: in the metrics' states.
    """

    def __init__(self, workers: int, numbers: int):
        self._workers = workers
        with tf.device("/job:ps/task:0/device:CPU:0"):
            self._rows = tf.Variable(tf.zeros([workers, 1 + numbers], tf.float64), trainable=False)

    def begin_pass(self) -> None:
        """Set the position of every worker to the beginning of its data."""
        self._rows.assign(tf.zeros_like(self._rows))

    def begin_execution(self, start: Sequence[np.ndarray]) -> np.ndarray:
        """Reset the metrics' states of every worker; returns the positions, which stay."""
        positions = self._rows.numpy()[:, 0]
        states = np.tile(packed([tf.constant(value) for value in start]), (self._workers, 1))
        self._rows.assign(np.column_stack([positions, states]))
        return positions

    def read(self, like: Sequence[np.ndarray]) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """(position of each worker, the metrics' states of each worker)."""
        rows = self._rows.numpy()
        return rows[:, 0], [unpacked(row[1:], like) for row in rows]

    def position(self, worker: tf.Tensor) -> tf.Tensor:
        """In a graph: the number of used batches of a worker's data."""
        return tf.cast(tf.gather(self._rows, worker)[0], tf.int64)

    def write(
        self,
        worker: tf.Tensor,
        position: tf.Tensor,
        steps: tf.Tensor,
        states: Sequence[tf.Tensor],
        start: Sequence[np.ndarray],
        adds: Sequence[bool],
    ) -> None:
        """In a graph: count the steps of a call.

        They do not count if another call has used the same batches since this call began.

        Args:
            position: the number of used batches when the call began.
            states: of the metrics after the call, which began with `start`.
            adds: for each state, whether to add the difference to `start`, or to replace it.
        """
        before = tf.gather(self._rows, worker)
        first = packed([tf.constant(value) for value in start])
        adding = np.repeat(np.array(adds, bool), [value.size for value in start])
        after = packed(states)
        after = tf.where(adding, before[1:] + (after - first), after)
        row = tf.concat([before[:1] + tf.cast([steps], tf.float64), after], axis=0)
        row = tf.where(before[0] == tf.cast(position, tf.float64), row, before)
        self._rows.scatter_update(tf.IndexedSlices(row[tf.newaxis], worker[tf.newaxis]))


def packed(states: Sequence[tf.Tensor]) -> tf.Tensor:
    """The metrics' states in one float64 vector, because each sent tensor is a call of its own.

    float64 holds every count below 2**53.
    """
    flat = [tf.reshape(tf.cast(state, tf.float64), [-1]) for state in states]
    return tf.concat(flat, axis=0) if flat else tf.zeros([0], tf.float64)


def unpacked(vector: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The states in a vector of `packed`, in the shapes of `like`."""
    ends = np.cumsum([value.size for value in like])[:-1]
    parts = np.split(vector, ends) if like else []
    return [part.reshape(value.shape) for part, value in zip(parts, like, strict=True)]


# Seconds without an answer from a worker, while all others are done with their data, after which
# another worker takes over. A process needs as long to restart.
PATIENCE = 10.0

# The metrics' states after a step, and what the step returned.
StepValues: TypeAlias = tuple[list[tf.Tensor], dict[str, tf.Tensor]]

# A call's worker, steps done, whether the data has ended, whether the iterator is not where the
# records say, and what the last step returned.
Answer: TypeAlias = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]


@dataclass
class WorkerLoop:
    """The remote calls of steps on the data of each worker.

    Attributes:
        one: tf.function (batch, number of the step, learning rate, metrics' states) ->
            `StepValues`.
        start: the metrics' states before the first step.
        adds: for each of these states, whether steps add to it.
        number_and_rate: specs of a step's number and of the learning rate.
        counted: returns how often a step counts itself, which is known when `one` is traced.
    """

    calls: Calls
    one: tf.types.experimental.GenericFunction
    start: Sequence[np.ndarray]
    adds: Sequence[bool]
    number_and_rate: Sequence[tf.TensorSpec]
    counted: Callable[[], int]
    _own: dict[str, ConcreteFunction] = field(default_factory=dict, init=False)

    def run(
        self, data: WorkerIterators, n: int, first: int, rate: np.floating
    ) -> tuple[int, list[list[np.ndarray]], dict[str, np.ndarray]]:
        """(steps done, the metrics' states of each worker's data, what the last step returned).

        Args:
            n: steps to do; fewer are done where all workers' data ends.
            first: number of the first step.
        """
        if data.of_workers is None:
            self._records.begin_pass()
            data.of_workers = data.batches.iterators(self._records)
        begun = self._records.begin_execution(self.start)
        own = self._calls_on_own(data.batches)
        outputs: dict[str, np.ndarray] = {}
        done = 0
        heard = dict.fromkeys(data.unfinished, time.monotonic())
        while done < n and data.unfinished:
            most = max(1, min(BATCHES_IN_A_CALL, (n - done) // (4 * self.calls.workers)))
            with self.calls.joined() as call:
                for start in range(done, n, most):
                    step = np.int64(first + start * self.counted())
                    call(own, data.of_workers, np.int64(min(most, n - start)), step, rate)
            left_behind = False
            for worker, steps, ended, elsewhere, of_call in call.results():
                outputs = of_call if steps else outputs
                heard[int(worker)] = time.monotonic()
                data.unfinished -= {int(worker)} if ended else set()
                left_behind = left_behind or bool(elsewhere)
            if left_behind:
                data.of_workers = data.batches.iterators(self._records)
            before, done = done, self._done(begun)
            if done == before and data.unfinished:  # only workers that are done have answered
                limit = time.monotonic() - PATIENCE
                for worker in sorted(data.unfinished):
                    if heard[worker] < limit:
                        span = np.int64(n - done), np.int64(first + done), rate
                        outputs = self._take_over(data, worker, *span)
                        done = self._done(begun)
                time.sleep(0.1)
        _, states = self._records.read(self.start)
        return done, states, outputs

    def _take_over(
        self, data: WorkerIterators, worker: int, *span: np.number
    ) -> dict[str, np.ndarray]:
        """Use the rest of a worker's data on whichever worker takes the call."""
        warn(
            f"worker {worker} has not answered for {PATIENCE:.0f} s, and the other workers"
            " are done with their data: one of them goes on with the rest of its data."
        )

        def rest(worker: tf.Tensor, *span: tf.Tensor) -> Answer:
            iterator = iter(data.batches.rest_of(worker, self._records))
            return self._loop(data.batches, iterator, worker, *span)

        index = tf.TensorSpec([], tf.int64)
        with self.calls.joined() as call:
            call(on_worker(rest, index, index, *self.number_and_rate), np.int64(worker), *span)
        ((_, _, ended, _, outputs),) = call.results()
        data.unfinished -= {worker} if ended else set()
        return dict(outputs)

    @functools.cached_property
    def _records(self) -> WorkerRecords:
        return WorkerRecords(self.calls.workers, sum(value.size for value in self.start))

    def _done(self, begun: np.ndarray) -> int:
        positions, _ = self._records.read(self.start)
        return int((positions - begun).sum())

    def _calls_on_own(self, batches: WorkerBatches) -> ConcreteFunction:
        """Calls on the worker's own iterator, for all data of one kind."""
        key = str(batches.element_spec)
        if key not in self._own:
            index = tf.TensorSpec([], tf.int64)
            iterator_spec = tf.data.IteratorSpec((index, batches.element_spec))

            def own(iterator: tf.data.Iterator, *span: tf.Tensor) -> Answer:
                worker = tf.distribute.coordinator.experimental_get_current_worker_index()
                return self._loop(batches, iterator, tf.identity(worker), *span)

            self._own[key] = on_worker(own, iterator_spec, index, *self.number_and_rate)
        return self._own[key]

    def _loop(
        self, data: WorkerBatches, iterator: tf.data.Iterator, worker: tf.Tensor, *span: tf.Tensor
    ) -> Answer:
        """In a graph: steps, or fewer where the data ends or the iterator is elsewhere.

        Args:
            span: how many steps, the number of the first one, the learning rate.
        """
        count, first, rate = span
        start: list[tf.Tensor] = [tf.constant(value) for value in self.start]
        # Traced beforehand: a loop must know what comes out of it, and how steps count.
        spec = self.one.get_concrete_function(data.element_spec, first, rate, start)
        empty = {
            name: tf.zeros([n or 0 for n in output.shape], output.dtype)
            for name, output in spec.structured_outputs[1].items()
        }
        counted = self.counted()
        position = self._records.position(worker)

        def body(
            i: tf.Tensor, _: tf.Tensor, __: tf.Tensor, last: StepValues
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, StepValues]:
            element = iterator.get_next_as_optional()
            more = element.has_value()
            expected = tf.cond(
                more,
                lambda: tf.equal(element.get_value()[0], position + i),
                lambda: tf.constant(True),
            )
            go_on = tf.logical_and(more, expected)
            last = tf.cond(
                go_on,
                lambda: self.one(element.get_value()[1], first + i * counted, rate, last[0]),
                lambda: last,
            )
            return i + tf.cast(go_on, tf.int64), more, expected, last

        done, more, expected, (states, outputs) = tf.while_loop(
            lambda i, more, expected, _: (i < count) & more & expected,
            body,
            (tf.constant(0, tf.int64), tf.constant(True), tf.constant(True), (start, empty)),
        )
        with tf.control_dependencies([done]):  # all that the steps have written is written
            self._records.write(worker, position, done, states, self.start, self.adds)
        return worker, done, tf.logical_not(more), tf.logical_not(expected), outputs
