"""One order of n examples for each (seed, epoch): computed, not stored, the same for every task.

The order is a pseudorandom permutation by a block cipher (Simon) with cycle walking, TensorFlow's
`RandomIndexShuffle`. Each position is computed by itself, so the memory needed is that of the
positions asked for, for any n. Of a thousand examples or fewer the whole permutation is made.

`tf.random.experimental.index_shuffle` is the same operation with 4 rounds of the cipher, and it
uses the low 8 to 32 bits of each word of the seed. That is too little: of a million examples,
neighbors in the order are near each other in the data (correlation 0.4), the orders of two epochs
are almost one (0.95), and up to 65,536 examples the seeds 7 and 263 give the same order. So
this asks for 16 rounds, where nothing of the kind is measurable (`tests/data/test_order.py`), and
for a key in which every bit depends on the whole seed and the epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfdist_ext.data.shards import Number, Shard, bounds, check_field
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Order", "key_in_graph", "sorted_at_random"]

_ROUNDS = 16
_MOST_EXAMPLES = 2**62  # positions are int64
_MOST_IN_BATCH = 2**40  # bounds multiply it by the number of shards before they divide
_ALL = Shard(0, 1)
# The cipher has blocks of 16 bits at least, and of few examples nearly all walks go on and on:
# a millisecond for each of 50. Sorting so many takes some microseconds.
_FEW_EXAMPLES = 1024


@filter_traceback
@dataclass(frozen=True)
class Order:
    """The sequence of global batches: which example is where, whoever reads it.

    Attributes:
        n: examples of the data set.
        global_batch_size: examples of a step, over all workers; the last one may have fewer.
        seed: a whole number from 0; None keeps the order of the data in every epoch.
        examples_seen: examples of the epoch that are done; step 0 begins after them.

    Raises:
        DataError: no examples, a global batch of 0 or larger than the data, a seed that is no
            whole number from 0 below 2**63, more examples behind than there are.
    """

    n: int
    global_batch_size: int
    seed: int | None = None
    examples_seen: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.n, int | np.integer) and self.n == 0:
            raise DataError("the data must have at least 1 example, got 0; check what it reads.")
        check_field(self, "n", "the number of examples", 1, _MOST_EXAMPLES)
        check_field(self, "global_batch_size", low=1, high=_MOST_IN_BATCH)
        if self.global_batch_size > self.n:
            raise DataError(
                f"global_batch_size must be at most {self.n}, the examples of the data, got"
                f" {self.global_batch_size}."
            )
        if self.seed is not None:
            check_field(self, "seed", high=2**63 - 1)
        check_field(self, "examples_seen", high=self.n)

    def after(self, examples: int) -> Order:
        """The rest of the epoch when `examples` of it, from its start, are behind.

        Raises:
            DataError: that is more than there are.
        """
        return replace(self, examples_seen=examples)

    @property
    def steps(self) -> int:
        """Global batches to the end of the epoch, a last smaller one included."""
        return -(-(self.n - self.examples_seen) // self.global_batch_size)

    def size(self, step: Number) -> Number:
        """Examples of a step's global batch, over all workers; 0 after the last step."""
        start, stop = self._span(step)
        return stop - start

    def key(self, epoch: int) -> np.ndarray:
        """The key of an epoch's permutation: three words (uint32), for `indices(key=...)`.

        Raises:
            DataError: the epoch is no whole number from 0 below 2**63.
        """
        epoch = check_int(epoch, "epoch", 0, 2**63 - 1, error=DataError)
        return _key(self.seed, epoch)

    def indices(
        self,
        step: Number,
        shard: Shard = _ALL,
        epoch: int = 0,
        *,
        key: np.ndarray | tf.Tensor | None = None,
    ) -> tf.Tensor:
        """The examples of a shard's part of a step's global batch, in their order.

        The parts of all shards of a step, one after the other, are its global batch.

        Args:
            step: a number from 0 below `steps`, or an integer tensor, inside of tf.data too; a
                tensor that is beyond the last step gives no examples.
            shard: whose part of the batch.
            epoch: of the permutation.
            key: `key(epoch)`, given as a tensor where a graph is to serve several epochs.

        Returns:
            int64 of shape [examples of the part], each in [0, n).

        Raises:
            DataError: a step that the epoch does not have, or an invalid shard.
        """
        if not isinstance(shard, Shard):
            raise DataError(f"shard must be a Shard(index, count), got {shown(shard)}.")
        low, high = bounds(self.size(step), shard.index, shard.count)
        return self.rows(step, low, high, epoch, key=key)

    def rows(
        self,
        step: Number,
        low: Number,
        high: Number,
        epoch: int = 0,
        *,
        key: np.ndarray | tf.Tensor | None = None,
    ) -> tf.Tensor:
        """The examples at the places low to high (not included) of a step's global batch.

        Arguments and errors are those of `indices`.
        """
        start, _ = self._span(step)
        positions = tf.range(start + low, start + high, dtype=tf.int64)
        if self.seed is None:
            return positions
        key = tf.convert_to_tensor(self.key(epoch) if key is None else key, tf.uint32)
        if self.n <= _FEW_EXAMPLES:
            words = tf.cast(key, tf.int64)
            seed = tf.stack([words[0] + words[1] * 2**32, words[2]])
            return tf.gather(sorted_at_random(self.n, seed), positions)
        # The operation takes no empty vector: of a part without examples, it gets position 0.
        asked = tf.cond(tf.size(positions) > 0, lambda: positions, lambda: tf.zeros([1], tf.int64))
        return self._permuted(asked, key)[: high - low]

    def _permuted(self, positions: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        # Where the largest of them is a power of 2 (65,536 and others), TensorFlow's block is too
        # small by that one: it never comes, and another comes twice. So there is one more, and
        # where it comes, that which comes in its place takes its turn.
        last = self.n - 1
        one_more = last & (last - 1) == 0
        largest = tf.constant(self.n if one_more else last, tf.int64)

        def shuffle(index: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.RandomIndexShuffle(
                index=index, seed=key, max_index=largest, rounds=_ROUNDS
            )

        found = shuffle(positions)
        return tf.where(found == largest, shuffle(largest), found) if one_more else found

    def _span(self, step: Number) -> tuple[Number, Number]:
        """The positions [start, stop) of a step's global batch."""
        if not tf.is_tensor(step):
            # As in a graph: the batches of another step would be wrong, and silently.
            step = check_int(step, "step", 0, self.steps - 1, error=DataError)
            start = self.examples_seen + step * self.global_batch_size
            return start, min(start + self.global_batch_size, self.n)
        start = tf.minimum(
            self.examples_seen + tf.cast(step, tf.int64) * self.global_batch_size, self.n
        )
        return start, tf.minimum(start + self.global_batch_size, self.n)


def key_in_graph(seed: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
    """`Order(seed=seed).key(epoch)` of tensors, inside of tf.data on this machine."""
    key = tf.numpy_function(_key, [seed, epoch], tf.uint32, stateful=False)
    return tf.ensure_shape(key, [3])


def _key(seed: int | None, epoch: int) -> np.ndarray:
    text = f"tfdist_ext order, seed {seed}, epoch {epoch}"
    words = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=12).digest(), "<u4")
    return words.astype(np.uint32)


def sorted_at_random(n: Number, seed: tf.Tensor) -> tf.Tensor:
    """A permutation of n (int64), all of it, from a seed of two whole numbers (int64)."""
    numbers = tf.random.stateless_uniform([n], seed, minval=None, maxval=None, dtype=tf.int64)
    return tf.cast(tf.argsort(numbers, stable=True), tf.int64)
