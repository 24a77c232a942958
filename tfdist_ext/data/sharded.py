"""ShardedDataset: every example of a data set once an epoch, in one order, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.cluster.wording import shown
from tfdist_ext.data.order import Order
from tfdist_ext.data.position import Position
from tfdist_ext.data.shards import Shard, bounds
from tfdist_ext.data.sources import Arrays, RecordFiles, Source
from tfdist_ext.data.whole_numbers import whole
from tfdist_ext.errors import DataError

__all__ = ["ShardedDataset", "from_arrays", "from_source", "from_tfrecords"]


class ShardedDataset:
    """Global batches of a source in one order, and each shard's part of them.

    The order is a permutation of all examples for each epoch, computed from the seed: the same
    for every number of workers and replicas, and nothing of it is stored. It goes into `fit` as it
    is; each task then reads the examples of its own replicas only.

    Attributes:
        source: what examples are read from.
        order: which example is in which global batch.
    """

    def __init__(self, source: Source, *, global_batch: int, seed: int | None = None):
        """
        Args:
            source: examples by number; see `tfdist_ext.data.sources.Source`.
            global_batch: examples of one step, over all workers; the last one of an epoch may have
                fewer.
            seed: a whole number from 0; None keeps the order of the data in every epoch.

        Raises:
            DataError: an empty source, a batch larger than the data, a seed that is none.
        """
        self.source = source
        self.order = Order(len(source), global_batch, seed)
        self._epoch = 0
        self._examples = 0

    @property
    def steps(self) -> int:
        """Global batches of an epoch, a last smaller one included."""
        return self.order.steps

    @property
    def global_batch(self) -> int:
        """Examples of a step, over all workers."""
        return self.order.global_batch

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, batch dimension None."""
        return self.source.element_spec

    def __len__(self) -> int:
        """Examples of the data set."""
        return self.order.n

    def dataset(self, shard: Shard | None = None, epoch: int | None = None) -> tf.data.Dataset:
        """This shard's part of each global batch of an epoch.

        The parts of step k, in shard order, are global batch k; where a batch has fewer examples
        than there are shards, some parts have none.

        Args:
            shard: one of the readers of the data; by default all of it.
            epoch: whose order; by default the one of the position. The epoch of the position
                begins there, after `restore`; all others at their start.

        Raises:
            DataError: a shard or an epoch that is none.
        """
        shard = Shard(0, 1) if shard is None else shard
        if not isinstance(shard, Shard):
            raise DataError(f"dataset wants a Shard(index, count). Received: {shown(shard)}.")
        epoch = self._epoch if epoch is None else epoch
        order = self.order.after(self._examples) if epoch == self._epoch else self.order
        key = tf.constant(order.key(epoch))

        def part(step: tf.Tensor) -> Any:
            return self.source.take(order.indices(step, shard, key=key))

        steps = tf.data.Dataset.range(order.steps)
        parts = steps.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return parts.prefetch(tf.data.AUTOTUNE)

    def state(self) -> dict[str, Any]:
        """Where training is in the data, as JSON fields: seed, epoch, examples, fingerprint.

        `fit` moves it on, and keeps it in its checkpoints; a loop of one's own calls `advance`.
        """
        return self._position().to_state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, with any number of workers.

        Raises:
            DataError: no state, one of another seed, or of data that has changed since: the
                difference is named.
        """
        position = Position.from_state(state)
        position.check_data(self.source.fingerprint())
        if position.seed != self.order.seed:
            raise DataError(
                f"the state is of an order with seed {position.seed}, and this one has seed"
                f" {self.order.seed}: other examples would be behind. Use the seed of the state."
            )
        self.order.after(position.examples)  # it must have as many
        self._epoch, self._examples = position.epoch, position.examples

    def advance(self, steps: int) -> None:
        """Say that so many more steps are done; the end of an epoch is the start of the next.

        Raises:
            DataError: a number that is no whole one from 0.
        """
        steps = whole(steps, "the steps gone past")
        left = self.order.after(self._examples).steps
        if steps < left:
            self._examples += steps * self.global_batch
            return
        epochs, rest = divmod(steps - left, self.steps)
        self._epoch += 1 + epochs
        self._examples = rest * self.global_batch

    @property
    def place(self) -> tuple[int, int]:
        """The epoch, and the examples of it that are behind."""
        return self._epoch, self._examples

    @property
    def step(self) -> int:
        """The next global batch, counted from the start of epoch 0 over whole epochs."""
        return self._epoch * self.steps + self._examples // self.global_batch

    def parts(self, first: int, local: int, replicas: int, begin: int = 0) -> tf.data.Dataset:
        """Parts of global batches, epoch after epoch without an end, for the replicas of a task.

        Each element is a tuple with a part for each local replica: (examples of the part, examples
        of the global batch, the part). A part of no examples has one that is another's, as most
        models cannot compute with none.

        Args:
            first: number of the first local replica.
            local: replicas of this task.
            replicas: of all tasks.
            begin: the global batch to begin with, counted on from epoch 0 over whole epochs.
        """

        def parts(number: tf.Tensor) -> Any:
            epoch, step = number // self.steps, number % self.steps
            key = self.order.key_in_graph(epoch)
            size = self.order.size(step)

            def part(replica: int) -> Any:
                low, high = bounds(size, replica, replicas)
                asked = tf.maximum(high, low + 1)
                taken = self.source.take(self.order.rows(step, low, asked, key=key))
                # Fewer, where damaged records are left out.
                there = tf.shape(tf.nest.flatten(taken)[0], out_type=tf.int64)[0]
                return tf.minimum(high - low, there), size, taken

            return tuple(part(first + i) for i in range(local))

        return tf.data.Dataset.counter(begin).map(
            parts, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )

    def _position(self) -> Position:
        return Position(self.order.seed, self._epoch, self._examples, self.source.fingerprint())


def from_source(source: Source, *, global_batch: int, seed: int | None = None) -> ShardedDataset:
    """Examples of whatever has a length and gives them by number (`data.sources.Source`)."""
    return ShardedDataset(source, global_batch=global_batch, seed=seed)


def from_arrays(arrays: Any, *, global_batch: int, seed: int | None = None) -> ShardedDataset:
    """Rows of arrays: one, or a tuple or dict of them, as (x, y) or (x, y, sample_weight).

    Memory-mapped arrays stay on disk.

    Args:
        arrays: the same number of rows each.
        global_batch: examples of one step, over all workers.
        seed: of the order; None keeps that of the rows.

    Raises:
        DataError: arrays of different lengths, no rows, a batch larger than the data.
    """
    return ShardedDataset(Arrays(arrays), global_batch=global_batch, seed=seed)


def from_tfrecords(
    files: str | Sequence[str],
    parse: Callable[[tf.Tensor], Any],
    *,
    global_batch: int,
    seed: int | None = None,
    on_error: str = "raise",
    batched: bool = False,
) -> ShardedDataset:
    """Records of TFRecord files, each read by its place in the file.

    An index of the places is built once, in one pass over the records' length fields, and kept
    beside the data.

    Args:
        files: patterns or paths, one or several; sorted, so that all tasks number alike.
        parse: (record, a scalar string tensor) -> the example, a structure of tensors; traced.
        global_batch: examples of one step, over all workers.
        seed: of the order; None keeps that of the files.
        on_error: "skip" goes on without damaged records, which are counted and named in warnings.
        batched: `parse` takes many records at a time, a string tensor of shape [n], and returns
            tensors of shape [n, ...], as `tf.io.parse_example` does: about twice as fast where
            records are small. n is any number, those of a part of a batch.

    Raises:
        DataError: no such files, a damaged one (file, record and byte are named), a batch larger
            than the data.
    """
    patterns = [files] if isinstance(files, str) else list(files)
    found = sorted({path for pattern in patterns for path in tf.io.gfile.glob(pattern)})
    if missing := [pattern for pattern in patterns if not tf.io.gfile.glob(pattern)]:
        raise DataError(f"no file matches {', '.join(map(repr, missing))}.")
    source = RecordFiles(found, parse, on_error=on_error, batched=batched)
    return ShardedDataset(source, global_batch=global_batch, seed=seed)
