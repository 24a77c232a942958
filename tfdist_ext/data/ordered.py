"""OrderedDataset: every example once an epoch, in one order for any number of workers.

The order of an epoch is a pseudorandom permutation by a block cipher with cycle walking,
TensorFlow's `RandomIndexShuffle`. Each position is computed by itself, so memory does not grow with
the number of examples.

`tf.random.experimental.index_shuffle` is the same operation with 4 rounds, which mixes too little
(docs/tensorflow_facts.md). Here the cipher has 16 rounds, and every bit of the key depends on the
whole seed and the epoch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_ext.data.batches import Position, PositionedBatches
from tfdist_ext.data.pipelines import (
    Part,
    batch_size_of,
    check_padded,
    in_own_memory,
    in_parallel,
    one_at_least,
    padded,
)
from tfdist_ext.data.sharded import (
    ShardedDataset,
    check_reads_here,
    check_state,
    sharded_already,
)
from tfdist_ext.data.shards import Number, ReadBy, Remainder, Shard, bounds, check_field
from tfdist_ext.data.sources import Arrays, Fingerprint, Source
from tfdist_ext.errors import DataError, TrainingError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback

_ROUNDS = 16
_MOST_EXAMPLES = 2**62  # positions are int64
_MOST_IN_BATCH = 2**40  # `bounds` multiplies it by the number of shards
# The cipher has blocks of at least 16 bits, so cycle walking is slow for few examples: of 50, each
# takes a millisecond. Sorting all of them takes some microseconds.
_FEW_EXAMPLES = 1024


@dataclass(frozen=True)
class Order:
    """The sequence of global batches: which example is at which position.

    Attributes:
        n: examples of the dataset.
        global_batch_size: examples of a step, over all workers; the last step may have fewer.
        seed: an integer from 0; None keeps the order of the data in every epoch.
        examples_seen: examples of the epoch that are done; step 0 begins after them.

    Raises:
        DataError: a field is not an integer in its range, or there is no whole global batch.
    """

    n: int
    global_batch_size: int
    seed: int | None = None
    examples_seen: int = 0

    def __post_init__(self) -> None:
        check_field(self, "n", "the number of examples", 1, _MOST_EXAMPLES)
        check_field(self, "global_batch_size", low=1, high=_MOST_IN_BATCH)
        if self.global_batch_size > self.n:
            raise DataError(
                f"global_batch_size={self.global_batch_size} is more than the {self.n} examples of"
                " the data."
            )
        if self.seed is not None:
            check_field(self, "seed", high=2**63 - 1)
        check_field(self, "examples_seen", high=self.n)

    def after(self, examples: int) -> Order:
        """The rest of the epoch after its first `examples` examples."""
        return replace(self, examples_seen=examples)

    @property
    def steps(self) -> int:
        """Global batches to the end of the epoch, a last smaller one included."""
        return -(-(self.n - self.examples_seen) // self.global_batch_size)

    def size(self, step: Number) -> Number:
        """Examples of a step's global batch, over all workers; 0 after the last step."""
        start, stop = self._span(step)
        return stop - start

    def rows(self, step: Number, low: Number, high: Number, seed: tf.Tensor) -> tf.Tensor:
        """The examples at the places from low to before high of a step's global batch.

        Args:
            step: an integer tensor or a number; after the last step there are no examples.
            low: the first place.
            high: the place after the last one.
            seed: of the epoch's permutation, int64 [2]; without `self.seed` it has no effect.

        Returns:
            int64 of shape [high - low], each in [0, n).
        """
        start, _ = self._span(step)
        positions = tf.range(start + low, start + high, dtype=tf.int64)
        if self.seed is None:
            return positions
        if self.n <= _FEW_EXAMPLES:
            return tf.gather(sorted_at_random(self.n, seed), positions)
        # The operation takes no empty vector: for a part without examples, it gets position 0.
        asked = tf.cond(tf.size(positions) > 0, lambda: positions, lambda: tf.zeros([1], tf.int64))
        key = tf.random.stateless_uniform([3], seed, None, None, tf.uint32, alg="philox")
        return self._permuted(asked, key)[: high - low]

    def _permuted(self, positions: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        # If the largest position is a power of 2 (65,536 and others), TensorFlow's block is too
        # small by one: one example never comes, and another one comes twice. So the range gets one
        # more position, and the example that takes this position's place is drawn instead.
        last = self.n - 1
        one_more = last & (last - 1) == 0
        largest = tf.constant(self.n if one_more else last, tf.int64)

        def shuffle(index: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.RandomIndexShuffle(
                index=index, seed=key, max_index=largest, rounds=_ROUNDS
            )

        numbers = shuffle(positions)
        return tf.where(numbers == largest, shuffle(largest), numbers) if one_more else numbers

    def _span(self, step: Number) -> tuple[tf.Tensor, tf.Tensor]:
        """The positions [start, stop) of a step's global batch."""
        start = self.examples_seen + tf.cast(step, tf.int64) * self.global_batch_size
        return tf.minimum(start, self.n), tf.minimum(start + self.global_batch_size, self.n)


def sorted_at_random(n: Number, seed: tf.Tensor) -> tf.Tensor:
    """A permutation of n (int64), all of it, from a seed of two integers (int64)."""
    numbers = tf.random.stateless_uniform([n], seed, None, None, tf.int64, alg="philox")
    return tf.cast(tf.argsort(numbers, stable=True), tf.int64)


@filter_traceback
def from_source(
    source: Source, *, global_batch_size: int, seed: int | None = None
) -> OrderedDataset:
    """Creates a dataset from a custom source with random access to examples.

    Args:
        source: an object with the members of `tfdist_ext.data.sources.Source`.
        global_batch_size: the number of examples of one step, over all workers.
        seed: the seed of the order, an integer of at least 0. None keeps the order of the source.

    Raises:
        DataError: a member is missing, the source has fewer examples than a batch, or the seed is
            invalid.
    """
    members = ("__len__", "element_spec", "take", "fingerprint")
    missing = [member for member in members if not hasattr(source, member)]
    if missing:
        raise DataError(
            f"{shown(source)} is not a source of examples: it has no {', '.join(missing)}. See"
            ' "Custom sources" in docs/data.md.'
        )
    return OrderedDataset(source, global_batch_size=global_batch_size, seed=seed)


@filter_traceback
def from_arrays(arrays: Any, *, global_batch_size: int, seed: int | None = None) -> OrderedDataset:
    """Creates a dataset from an array, or from a tuple or dict of arrays such as (x, y).

    Memory-mapped arrays stay on disk.

    Args:
        arrays: arrays with the same number of rows.
        global_batch_size: the number of examples of one step, over all workers.
        seed: the seed of the order. None keeps the order of the rows.

    Raises:
        DataError: the arrays have different lengths or no rows, or the batch is larger than the
            data.
    """
    return OrderedDataset(Arrays(arrays), global_batch_size=global_batch_size, seed=seed)


@filter_traceback
class OrderedDataset(ShardedDataset):
    """Global batches of a source, in the same order for any number of shards.

    The order is a permutation of all examples for each epoch, computed from the seed. It is the
    same for any number of workers and replicas. In `fit` each task reads the examples of its own
    replicas only.

    Attributes:
        source: the source of the examples.
        order: which example is in which global batch.
    """

    def __init__(self, source: Source, *, global_batch_size: int, seed: int | None = None):
        """Arguments and errors are those of `from_source`."""
        self.source = source
        self.order = Order(len(source), global_batch_size, seed)

    @property
    def steps(self) -> int:
        return self.order.steps

    @property
    def steps_done(self) -> int:
        if self._done % self.global_batch_size:
            raise TrainingError(
                f"The position of the data is after {self._done} examples of an epoch, inside a"
                f" global batch of {self.global_batch_size}. Resume with the global batch size of"
                " the earlier training."
            )
        return self._done // self.global_batch_size

    @property
    def global_batch_size(self) -> int:
        return self.order.global_batch_size

    @property
    def examples(self) -> int:
        """Examples of the dataset."""
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
        shard = Shard(0, 1) if shard is None else Shard.of(shard)
        steps, part = self._read(self._epoch if epoch is None else epoch, shard.count, remainder)
        parts = in_parallel(tf.data.Dataset.range(steps), lambda step: part(step, shard.index))
        return sharded_already(parts.prefetch(tf.data.AUTOTUNE), shard)

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

    def state(self) -> dict[str, Any]:
        return {
            "seed": self.order.seed,
            "epoch": self._epoch,
            "examples": self._done,
            "fingerprint": self._fingerprint,
        }

    @functools.cached_property  # it may read all of the data
    def _fingerprint(self) -> Fingerprint:
        return dict(json.loads(json.dumps(self.source.fingerprint())))

    def restore(self, state: dict[str, Any]) -> None:
        current = self.state()
        check_state(state, current)
        if state["seed"] != self.order.seed:
            raise DataError(
                f"the seed is {self.order.seed}, but the saved position has the seed"
                f" {state['seed']!r}. Use the same seed."
            )
        epoch = check_int(state["epoch"], "the position's epoch", error=DataError)
        done = check_int(
            state["examples"], "the position's examples", 0, self.examples, error=DataError
        )
        self._epoch, self._done = epoch, done

    def advance(self, steps: int) -> None:
        steps = check_int(steps, "the number of steps done", error=DataError)
        left = self.order.after(self._done).steps
        if steps < left:
            self._done += steps * self.global_batch_size
            return
        epochs, rest = divmod(steps - left, self.steps)
        self.move_to(self._epoch + 1 + epochs, rest)

    def move_to(self, epoch: int, steps: int) -> None:
        self._epoch, self._done = epoch, steps * self.global_batch_size

    def _take(self, rows: tf.Tensor) -> Any:
        """Returns the examples with these numbers; all sources but arrays may call Python."""
        taken = self.source.take(rows)
        return taken if isinstance(self.source, Arrays) else in_own_memory(taken)

    def _read(
        self, epoch: int, count: int, remainder: Remainder
    ) -> tuple[int, Callable[[Number, Number], Any]]:
        """The rest of an epoch for `count` shards or replicas.

        Returns:
            The number of steps, and a function for graphs from (step, shard) to a part.
        """
        check_padded(remainder, self.element_spec)
        order = self.order.after(self._done) if epoch == self._epoch else self.order
        epoch = check_int(epoch, "epoch", 0, 2**63 - 1, error=DataError)
        seed = tf.constant([order.seed or 0, epoch], tf.int64)

        def part(step: Number, index: Number) -> Any:
            size = order.size(step)
            if remainder is Remainder.DROP:
                low, high = size // count * index, size // count * (index + 1)
            else:
                low, high = bounds(size, index, count)
            taken = self._take(order.rows(step, low, high, seed))
            if remainder is not Remainder.PAD:
                return taken
            return padded(taken, -(-self.global_batch_size // count))

        steps = order.steps
        if steps and remainder is Remainder.DROP and order.size(steps - 1) < count:
            steps -= 1  # each shard has a part in each step
        return steps, part


class OrderedBatches(PositionedBatches):
    """Global batches of examples in one order, epoch after epoch.

    Args:
        data: the dataset.
        moves: the data is trained on, from its position. Otherwise its examples are read in order.
    """

    def __init__(self, data: OrderedDataset, *, moves: bool):
        size = data.global_batch_size
        super().__init__(data.element_spec, steps=data.steps, batch_size=size, is_infinite=moves)
        self.needs_row_count = bool(getattr(data.source, "loses_examples", False))
        self.data = data if moves else None
        self.sharded = self._dataset = data
        self._order = data.order if moves else Order(data.examples, size)

    def parts(self, first: int, local: int, replicas: int, start: Position) -> tf.data.Dataset:
        order, steps, take = self._order, self._order.steps, self._dataset._take

        def parts(number: tf.Tensor) -> tuple[Part, ...]:
            seed = tf.stack([tf.constant(order.seed or 0, tf.int64), number // steps])
            step = number % steps
            size = order.size(step)

            def part(replica: int) -> Part:
                low, high = bounds(size, replica, replicas)
                taken = take(order.rows(step, low, tf.maximum(high, low + 1), seed))
                there = batch_size_of(taken)  # fewer if damaged records are skipped
                rows_of_all = tf.ones_like(size) if self.needs_row_count else size
                return tf.minimum(high - low, there), rows_of_all, one_at_least(taken, there)

            return tuple(part(first + i) for i in range(local))

        return in_parallel(tf.data.Dataset.range(*self.span(start)), parts)
