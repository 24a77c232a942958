"""OrderedDataset: every example once an epoch, in one order, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.data.order import Order, key_in_graph
from tfdist_ext.data.pipelines import in_parallel, with_data_errors
from tfdist_ext.data.position import Position
from tfdist_ext.data.rows import batch_size_of, check_padded, one_at_least, padded
from tfdist_ext.data.sharded import ShardedDataset, check_reads_here, sharded_already
from tfdist_ext.data.shards import Number, ReadBy, Remainder, Shard, bounds
from tfdist_ext.data.sources import Source
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int
from tfdist_ext.user_frames import filter_traceback

__all__ = ["OrderedDataset"]


@filter_traceback
class OrderedDataset(ShardedDataset):
    """Global batches of a source in one order, and each shard's part of them.

    The order is a permutation of all examples for each epoch, computed from the seed: the same
    for every number of workers and replicas, and nothing of it is stored. It goes into `fit` as it
    is; each task then reads the examples of its own replicas only.

    Attributes:
        source: what examples are read from.
        order: which example is in which global batch.
    """

    def __init__(self, source: Source, *, global_batch_size: int, seed: int | None = None):
        """
        Args:
            source: examples by number; see `tfdist_ext.data.sources.Source`.
            global_batch_size: examples of one step, over all workers; the last one of an epoch
                may have fewer.
            seed: a whole number from 0; None keeps the order of the data in every epoch.

        Raises:
            DataError: an empty source, a batch larger than the data, an invalid seed.
        """
        self.source = source
        self.order = Order(len(source), global_batch_size, seed)

    @property
    def steps(self) -> int:
        return self.order.steps

    @property
    def steps_done(self) -> int:
        return self._done // self.global_batch_size

    @property
    def global_batch_size(self) -> int:
        """Examples of a step, over all tasks."""
        return self.order.global_batch_size

    @property
    def loses_examples(self) -> bool:
        """Whether the source may leave out what is asked for, as damaged records are left out."""
        return bool(getattr(self.source, "loses_examples", False))

    @property
    def examples(self) -> int:
        """Examples of the data set."""
        return self.order.n

    @property
    def element_spec(self) -> Any:
        return self.source.element_spec

    def dataset(
        self,
        shard: ReadBy | None = None,
        epoch: int | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
    ) -> tf.data.Dataset:
        """This shard's part of each global batch of an epoch.

        The parts of step k, in shard order, are global batch k; where a batch has fewer examples
        than there are shards, some parts have none.

        Args:
            shard: `Shard(index, count)`, or whose it is: what `Shard.of` takes. By default, all
                there is.
            epoch: whose order; by default the one of the position. The epoch of the position
                begins there, after `restore`; all others at their start.
            remainder: of a global batch that does not divide by the shards. KEEP: some parts have
                one example more. DROP: the last ones are left out, and a last batch of fewer
                examples than shards altogether. PAD: all parts of all steps have
                ceil(global_batch_size / shards) rows, and those that were added have sample weight
                0; elements are (x, y, sample_weight) then.

        Raises:
            DataError: an invalid shard or epoch, PAD for data without targets.
        """
        shard = Shard(0, 1) if shard is None else Shard.of(shard)
        steps, part = self._read(self._epoch if epoch is None else epoch, shard.count, remainder)
        parts = in_parallel(tf.data.Dataset.range(steps), lambda step: part(step, shard.index))
        return with_data_errors(sharded_already(parts.prefetch(tf.data.AUTOTUNE), shard))

    def distributed(
        self, strategy: tf.distribute.Strategy, remainder: Remainder = Remainder.KEEP
    ) -> Any:
        check_reads_here(strategy)
        steps, part = self._read(self._epoch, strategy.num_replicas_in_sync, remainder)

        def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            local = context.num_replicas_in_sync // context.num_input_pipelines
            first = context.input_pipeline_id * local
            numbers = tf.data.Dataset.range(steps * local)
            parts = in_parallel(numbers, lambda n: part(n // local, first + n % local))
            return parts.prefetch(tf.data.AUTOTUNE)

        return strategy.distribute_datasets_from_function(of_worker)

    def _read(
        self, epoch: int, count: int, remainder: Remainder
    ) -> tuple[int, Callable[[Number, Number], Any]]:
        """The rest of an epoch for `count` shards, or replicas.

        Returns:
            The steps, and what reads in a graph the part that (step, shard) have.
        """
        check_padded(remainder, self.element_spec)
        order = self.order.after(self._done) if epoch == self._epoch else self.order
        key = tf.constant(order.key(epoch))

        def part(step: Number, index: Number) -> Any:
            size = order.size(step)
            if remainder is Remainder.DROP:
                low, high = size // count * index, size // count * (index + 1)
            else:
                low, high = bounds(size, index, count)
            taken = self.source.take(order.rows(step, low, high, key=key))
            if remainder is not Remainder.PAD:
                return taken
            return padded(taken, -(-self.global_batch_size // count))

        steps = order.steps
        if steps and remainder is Remainder.DROP and order.size(steps - 1) < count:
            steps -= 1  # each shard has a part in each step
        return steps, part

    def state(self) -> dict[str, Any]:
        """The position, as JSON fields: seed, epoch, examples behind, fingerprint of the data.

        `fit` moves it on, and keeps it in its checkpoints; a loop over `batches` moves it on, too.
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
                f"the state's seed must be {self.order.seed}, as that of this order, got"
                f" {position.seed}: other examples would be done. Use the seed of the state."
            )
        self.order.after(position.examples)  # it must have as many
        self._epoch, self._done = position.epoch, position.examples

    def advance(self, steps: int) -> None:
        """Say that so many more steps are done; the end of an epoch is the start of the next.

        Raises:
            DataError: a number that is no whole one from 0.
        """
        steps = check_int(steps, "the steps gone past", error=DataError)
        left = self.order.after(self._done).steps
        if steps < left:
            self._done += steps * self.global_batch_size
            return
        epochs, rest = divmod(steps - left, self.steps)
        self._epoch += 1 + epochs
        self._done = rest * self.global_batch_size

    def parts(
        self, first: int, local: int, replicas: int, begin: int = 0, *, counted: bool = True
    ) -> tf.data.Dataset:
        """Parts of global batches, epoch after epoch without an end, for the replicas of a task.

        Each element is a tuple with a part for each local replica: (examples of the part, examples
        of the global batch, the part). A part of no examples has one that is another's, as most
        models cannot compute with none.

        Args:
            first: number of the first local replica.
            local: replicas of this task.
            replicas: of all tasks.
            begin: the global batch to begin with, counted on from epoch 0 over whole epochs.
            counted: else each part says 1, and not the examples of the global batch: the other
                parts' numbers are unknown.
        """

        def parts(number: tf.Tensor) -> Any:
            epoch, step = number // self.steps, number % self.steps
            seed = self.order.seed
            key = None if seed is None else key_in_graph(tf.constant(seed, tf.int64), epoch)
            size = self.order.size(step)

            def part(replica: int) -> Any:
                low, high = bounds(size, replica, replicas)
                asked = tf.maximum(high, low + 1)
                taken = self.source.take(self.order.rows(step, low, asked, key=key))
                # Fewer, where damaged records are left out.
                there = batch_size_of(taken)
                of = size if counted else tf.ones_like(size)
                return tf.minimum(high - low, there), of, one_at_least(taken, there)

            return tuple(part(first + i) for i in range(local))

        return in_parallel(tf.data.Dataset.counter(begin), parts)

    def in_order(self) -> OrderedDataset:
        """The same data in its own order, from its start."""
        return OrderedDataset(self.source, global_batch_size=self.global_batch_size)

    def _position(self) -> Position:
        return Position(self.order.seed, self._epoch, self._done, self.source.fingerprint())
