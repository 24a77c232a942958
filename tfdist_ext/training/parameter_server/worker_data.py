"""Data that each worker reads for itself. Each batch counts once, also after a worker was lost.

A call takes steps on the shard that its worker reads. The batches of a shard have numbers, and an
answer says which of them the call has used. The coordinator counts an answer only if it begins
after the batches that are counted. Otherwise an answer was lost with its worker, or batches were
used again: then all workers make their iterators again, after the counted batches.

Each call also writes its position to a parameter server, where a restarted worker continues. If a
worker stays away, a worker that is done with its own shard takes over the shard.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.pipelines import (
    PY_FUNCTIONS,
    operations_in,
    takes_elements,
    without_autotune,
)
from tfdist_ext.data.shards import Shard
from tfdist_ext.training.inputs import GlobalBatches, parts_of_dataset
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
    "Answer",
    "StepValues",
    "WorkerBatches",
    "WorkerIterators",
    "WorkerLoop",
    "why_not_remote",
]

# Seconds without progress after which another worker takes over the shard of one that does not
# answer. A process needs as long to restart.
PATIENCE = 10.0

# The metrics' states after a step, in one vector, and what the step returned.
StepValues: TypeAlias = tuple[tf.Tensor, dict[str, tf.Tensor]]


class Answer(NamedTuple):
    """The result of a call: tensors in its graph, then NumPy values."""

    shard: Any
    end: Any  # the number of the shard's next batch
    steps: Any
    is_done: Any  # whether the shard has no further batch
    values: Any  # the `StepValues` of the last step


class WorkerBatches(GlobalBatches):
    """The data sets that a function makes, one for each worker. A batch is the batch of a step."""

    def __init__(self, calls: Calls, data: FunctionDataset):
        self.workers = calls.workers
        self._coordinator = calls.coordinator
        self._data = data
        self._on_workers: Iterable[Any] | None = None
        with tf.device("CPU:0"):
            here = self._datasets()
        endless = [bool(each.cardinality() == tf.data.INFINITE_CARDINALITY) for each in here]
        self.batch_spec = here[0].element_spec
        super().__init__(parts_of=parts_of_dataset(here[0]), is_infinite=all(endless))

    def __iter__(self) -> WorkerIterators:
        return WorkerIterators(self)

    def iterators(self, table: tf.Variable) -> tf.distribute.coordinator.PerWorkerValue:
        """An iterator on each worker. TensorFlow makes a new one when a worker is restarted.

        Elements are (shard, number of the batch, optional batch). After the last batch of the shard
        the optionals are empty: so an answer can tell where the shard ends.

        Args:
            table: the shard of each worker, and the position in each shard.
        """
        if self._on_workers is None:
            self._on_workers = self._coordinator.create_per_worker_dataset(
                lambda: self._rest(table)
            )
        return iter(self._on_workers)

    def _rest(self, table: tf.Variable) -> tf.data.Dataset:
        """On a worker: the batches of its shard from the position on.

        The user's function takes a number, not a tensor, so the data sets of all shards are made
        and one of them is read. A `tf.switch_case` would not make them all, but cannot use lookup
        tables ("You must feed a value for placeholder tensor").
        """
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        shard = table[0, tf.identity(worker)]
        position = table[1, shard]
        variants = tf.stack([tf.data.experimental.to_variant(each) for each in self._datasets()])
        batches = tf.data.experimental.from_variant(variants[shard], self.batch_spec).skip(position)
        found = batches.map(takes_elements(batches, tf.experimental.Optional.from_value))
        end = tf.data.Dataset.from_tensors(tf.experimental.Optional.empty(self.batch_spec)).repeat()
        rest = found.concatenate(end).enumerate(position)
        rest = rest.map(lambda number, batch: (shard, number, batch)).prefetch(tf.data.AUTOTUNE)
        # Untuned: the coordinator's last word to a worker waits behind the end of its iterator.
        return without_autotune(rest)

    def _datasets(self) -> list[tf.data.Dataset]:
        shards = [Shard(worker, self.workers) for worker in range(self.workers)]
        return [self._data.made(shard, alone=True) for shard in shards]


class WorkerIterators:
    """One pass over all shards.

    Attributes:
        of_workers: an iterator on each worker; None if new iterators are needed.
        unfinished: the shards that have further batches.
    """

    def __init__(self, batches: WorkerBatches):
        self.batches = batches
        self.of_workers: tf.distribute.coordinator.PerWorkerValue | None = None
        self.unfinished = set(range(batches.workers))
        self._shards = np.arange(batches.workers)  # of each worker
        self._positions = np.zeros(batches.workers, np.int64)  # in each shard

    def __next__(self) -> NoReturn:
        raise NotImplementedError  # the workers read

    def begin(self, table: tf.Variable) -> None:
        """Make the iterators, each after the batches that are counted."""
        table.assign([self._shards, self._positions])
        self.of_workers = self.batches.iterators(table)

    def count(self, answers: Iterable[Answer]) -> list[Answer]:
        """The answers that count, of those that have used batches."""
        found = []
        for answer in sorted(answers, key=lambda answer: answer.end - answer.steps):
            shard = int(answer.shard)
            if shard not in self.unfinished:
                continue
            if answer.end - answer.steps != self._positions[shard]:
                self.of_workers = None
                continue
            self._positions[shard] = answer.end
            self.unfinished -= {shard} if answer.is_done else set()
            found += [answer] if answer.steps else []
        return found

    def hand_over(self, answers: Iterable[Answer], seconds: float) -> None:
        """Exchange the shard of a worker that is absent and the shard of one that is done."""
        done = {int(answer.shard) for answer in answers} - self.unfinished
        if done:
            exchanged = [min(self.unfinished), min(done)]
            absent, other = (int(np.flatnonzero(self._shards == shard)[0]) for shard in exchanged)
            self._shards[[other, absent]] = exchanged
            self.of_workers = None
            warn(
                f"worker {absent} has not answered for {seconds:.0f} s, and the other workers are"
                f" done with their data: worker {other} goes on with the rest of its data."
            )


def why_not_remote(data: FunctionDataset, workers: int) -> str:
    """Why the workers cannot read the data, in words; "" if they can.

    A worker receives graphs and tensors. It cannot receive a data set or a Python function.
    """
    traced = tf.function(
        lambda: tf.data.experimental.to_variant(data.made(Shard(0, workers), alone=True)),
        autograph=False,
    ).get_concrete_function()
    if any(tensor.dtype == tf.variant for tensor in traced.captured_inputs):
        return "its data set is made outside of the function; make it inside"
    if operations_in(traced.graph.as_graph_def()) & PY_FUNCTIONS:
        return "it calls Python (from_generator, py_function, numpy_function)"
    return ""


@dataclass
class WorkerLoop:
    """The remote calls of steps on the shards of the workers.

    Attributes:
        one: tf.function (batch, number of the step, learning rate, metrics' states) ->
            `StepValues`.
        start: the metrics' states before the first step of a call.
        number_and_rate: specs of a step's number and of the learning rate.
        counted: returns how often a step counts itself, which is known when `one` is traced.
    """

    calls: Calls
    one: tf.types.experimental.GenericFunction
    start: np.ndarray
    number_and_rate: Sequence[tf.TensorSpec]
    counted: Callable[[], int]
    _traced: dict[str, ConcreteFunction] = field(default_factory=dict, init=False)

    def run(self, data: WorkerIterators, n: int, first: int, rate: np.floating) -> list[Answer]:
        """Take `n` steps, or fewer if all shards end; returns the answers that count.

        Args:
            first: the number of the first step.
        """
        found: list[Answer] = []
        done, progress, patience = 0, time.monotonic(), PATIENCE
        while done < n and data.unfinished:
            if data.of_workers is None:
                self.calls.peers.enters("compiling")
                data.begin(self._table)
                self.calls.peers.enters("steps")
            answers = self.calls.results(self._calls(data, n - done, first, rate))
            found += (counted := data.count(answers))
            steps = sum(int(answer.steps) for answer in counted)
            done, first = done + steps, first + steps * self.counted()
            if steps:
                progress = time.monotonic()
            elif time.monotonic() - progress < patience:
                time.sleep(0.1)  # the workers that have answered are done with their shards
            else:
                data.hand_over(answers, patience)
                patience *= 2  # the other worker reads the shard up to its position first
        return found

    @functools.cached_property
    def _table(self) -> tf.Variable:
        with tf.device("/job:ps/task:0/device:CPU:0"):
            return tf.Variable(tf.zeros([2, self.calls.workers], tf.int64), trainable=False)

    def _calls(
        self, data: WorkerIterators, n: int, first: int, rate: np.floating
    ) -> Iterator[tuple[ConcreteFunction, Sequence[Any]]]:
        """Calls of `n` steps, each on the shard of the worker that takes the call."""
        spec = data.batches.batch_spec
        key = str(spec)
        if key not in self._traced:
            number = tf.TensorSpec([], tf.int64)
            iterator = tf.data.IteratorSpec((number, number, tf.OptionalSpec(spec)))
            steps = functools.partial(self._steps, data.batches.element_spec)
            self._traced[key] = on_worker(steps, iterator, number, *self.number_and_rate)
        most = max(1, min(BATCHES_IN_A_CALL, n // (4 * self.calls.workers)))
        for done in range(0, n, most):
            span = np.int64(min(most, n - done)), np.int64(first + done * self.counted())
            yield self._traced[key], (data.of_workers, *span, rate)

    def _steps(
        self,
        spec: Specs,
        iterator: tf.data.Iterator,
        n: tf.Tensor,
        first: tf.Tensor,
        rate: tf.Tensor,
    ) -> Answer:
        """In a graph: `n` steps, or fewer if the shard ends."""
        start = tf.constant(self.start)
        # Traced beforehand: a loop must know what comes out of it, and how steps count.
        outputs = self.one.get_concrete_function(spec, first, rate, start).structured_outputs[1]
        nothing = {
            name: tf.zeros([size or 0 for size in output.shape], output.dtype)
            for name, output in outputs.items()
        }
        counted = self.counted()

        def step(answer: Answer) -> tuple[Answer]:
            shard, number, batch = iterator.get_next()
            more = batch.has_value()
            step, states = first + answer.steps * counted, answer.values[0]
            values = tf.cond(
                more,
                lambda: self.one(batch.get_value(), step, rate, states),
                lambda: answer.values,
            )
            used = tf.cast(more, tf.int64)
            return (Answer(shard, number + used, answer.steps + used, ~more, values),)

        zero = tf.constant(0, tf.int64)
        (answer,) = tf.while_loop(
            lambda answer: (answer.steps < n) & ~answer.is_done,
            step,
            (Answer(zero, zero, zero, tf.constant(False), (start, nothing)),),
        )
        with tf.control_dependencies([answer.steps]):  # all that the steps have written is written
            self._table.scatter_nd_update([[1, answer.shard]], [answer.end])
        return answer
