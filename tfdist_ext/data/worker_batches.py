"""Data that workers of parameter servers read themselves. Metrics count each batch once.

A call takes steps on the shard that its worker reads. The batches of a shard have numbers, and an
answer says which of them the call has used. The coordinator counts an answer only if it begins
after the batches that are counted. A restarted worker reads its shard from the beginning, without
steps up to the position that comes with each call. The weights may see the batches after that
position twice. If a worker does not return, the rest of its shard is left out of the epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist_ext.data.batches import Batches, Feed, Inspect, Iterators, Readers
from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.pipelines import (
    PY_FUNCTIONS,
    operations_in,
    takes_elements,
    without_autotune,
)
from tfdist_ext.data.shards import Shard
from tfdist_ext.user_frames import warn

# Seconds without progress after which the shard of a worker that does not answer is left out. A new
# process needs less to start.
PATIENCE = 60.0


class Answer(NamedTuple):
    """The result of a call: tensors in its graph, then NumPy values."""

    shard: Any
    end: Any  # the number of the shard's next batch
    steps: Any
    is_done: Any  # whether the shard has no further batch
    values: Any  # what the last step returned


class WorkerBatches(Batches):
    """The datasets that a function makes, one for each worker. A batch is the batch of a step."""

    has_order = False

    def __init__(self, data: FunctionDataset, readers: Readers):
        self.workers = readers.workers
        self._coordinator = readers.coordinator
        self._data = data
        with tf.device("CPU:0"):
            shards = self.shards()
        endless = all(bool(shard.cardinality() == tf.data.INFINITE_CARDINALITY) for shard in shards)
        self.batch_spec = shards[0].element_spec
        super().__init__(self.batch_spec, is_infinite=endless)

    def iterators(self, feed: Feed, *, in_pieces: bool, inspect: Inspect) -> Iterators:
        return Iterators(lambda start: WorkerIterators(self), continues=self.is_infinite)

    @functools.cached_property
    def on_workers(self) -> Iterable[Any]:
        """The data on each worker. TensorFlow makes new iterators when a worker is restarted."""
        return self._coordinator.create_per_worker_dataset(self._shard_of_worker)

    @property
    def iterator_spec(self) -> tf.data.IteratorSpec:
        """Elements are (shard, number of the batch, optional batch)."""
        number = tf.TensorSpec([], tf.int64)
        return tf.data.IteratorSpec((number, number, tf.OptionalSpec(self.batch_spec)))

    def _shard_of_worker(self) -> tf.data.Dataset:
        """On a worker: its batches, then empty optionals, so that an answer can tell the end.

        The user's function takes a number, not a tensor, so the datasets of all shards are made
        and one of them is read. A `tf.switch_case` would not make them all, but cannot use lookup
        tables ("You must feed a value for placeholder tensor").
        """
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        shard = tf.identity(worker)
        shards = self.shards()
        if len(shards) == 1:  # TensorFlow cannot stack one variant
            batches = shards[0]
        else:
            variants = tf.stack([tf.data.experimental.to_variant(dataset) for dataset in shards])
            batches = tf.data.experimental.from_variant(variants[shard], self.batch_spec)
        present = batches.map(takes_elements(batches, tf.experimental.Optional.from_value))
        end = tf.data.Dataset.from_tensors(tf.experimental.Optional.empty(self.batch_spec)).repeat()
        elements = present.concatenate(end).enumerate()
        elements = elements.map(lambda number, batch: (shard, number, batch))
        # Autotuning delays shutdown.
        return without_autotune(elements.prefetch(tf.data.AUTOTUNE))

    def shards(self) -> list[tf.data.Dataset]:
        """The dataset of each shard."""
        shards = [Shard(number, self.workers) for number in range(self.workers)]
        return [self._data.create_dataset(shard, whole_batches=True) for shard in shards]


class WorkerIterators:
    """One pass over all shards.

    Attributes:
        of_workers: an iterator on each worker.
        positions: the number of the next batch of each shard.
        unfinished: the shards whose workers have further batches.
    """

    def __init__(self, batches: WorkerBatches):
        self.batches = batches
        self.of_workers: Iterator[Any] = iter(batches.on_workers)
        self.positions = np.zeros(batches.workers, np.int64)
        self.unfinished = set(range(batches.workers))

    def count(self, answers: Iterable[Answer]) -> list[Answer]:
        """The answers that count, of those that have used batches."""
        counted = []
        for answer in sorted(answers, key=lambda answer: (answer.end - answer.steps, answer.end)):
            shard = int(answer.shard)
            follows = answer.end - answer.steps == self.positions[shard]
            if not follows or shard not in self.unfinished:
                continue
            self.positions[shard] = answer.end
            self.unfinished -= {shard} if answer.is_done else set()
            counted += [answer] if answer.steps else []
        return counted

    def leave_out(self) -> None:
        """Ends the pass without the rest of the unfinished shards, with a warning."""
        absent = ", ".join(map(str, sorted(self.unfinished)))
        warn(
            f"no answer from worker {absent} for {PATIENCE:.0f} s, and the other workers have read"
            " their data: the remaining data of its shard is not used in this epoch."
        )
        self.unfinished.clear()


def why_not_remote(data: FunctionDataset, workers: int) -> str:
    """Why the workers cannot read the data, in words; "" if they can.

    A worker receives graphs and tensors. It cannot receive a dataset or a Python function.
    """
    create = functools.partial(data.create_dataset, Shard(0, workers), whole_batches=True)
    function = tf.function(lambda: tf.data.experimental.to_variant(create()), autograph=False)
    try:
        traced = function.get_concrete_function()
    except (TypeError, ValueError) as error:  # what runs only in eager mode, such as adapt()
        return f"its function cannot be traced ({type(error).__name__}), as with adapt()"
    if any(tensor.dtype == tf.variant for tensor in traced.captured_inputs):
        return "its dataset is created outside the function; create it inside"
    if operations_in(traced.graph.as_graph_def()) & PY_FUNCTIONS:
        return "its dataset calls Python (from_generator, py_function, numpy_function)"
    return ""
