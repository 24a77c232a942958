"""One order of n examples for each seed and epoch, computed and the same on each task.

The order is a pseudorandom permutation by a block cipher with cycle walking, TensorFlow's
`RandomIndexShuffle`. Each position is computed by itself, so memory does not grow with n.

`tf.random.experimental.index_shuffle` is the same operation with 4 rounds, which mixes too little
(docs/tensorflow_facts.md). Here the cipher has 16 rounds, and every bit of the key depends on the
whole seed and the epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfdist_ext.data.shards import Number, check_field
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int

__all__ = ["Order", "key_in_graph", "sorted_at_random"]

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
                f"global_batch_size must be at most {self.n}, the examples of the data, got"
                f" {self.global_batch_size}."
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

    def key(self, epoch: int) -> np.ndarray:
        """The key of an epoch's permutation: three words (uint32)."""
        return _key(self.seed, check_int(epoch, "epoch", 0, 2**63 - 1, error=DataError))

    def rows(
        self, step: Number, low: Number, high: Number, key: np.ndarray | tf.Tensor | None
    ) -> tf.Tensor:
        """The examples at the places from low to before high of a step's global batch.

        Args:
            step: an integer tensor or a number; after the last step there are no examples.
            low: the first place.
            high: the place after the last one.
            key: `key(epoch)`; without a seed it has no effect.

        Returns:
            int64 of shape [high - low], each in [0, n).
        """
        start, _ = self._span(step)
        positions = tf.range(start + low, start + high, dtype=tf.int64)
        if self.seed is None:
            return positions
        key = tf.convert_to_tensor(key, tf.uint32)
        if self.n <= _FEW_EXAMPLES:
            words = tf.cast(key, tf.int64)
            seed = tf.stack([words[0] + words[1] * 2**32, words[2]])
            return tf.gather(sorted_at_random(self.n, seed), positions)
        # The operation takes no empty vector: for a part without examples, it gets position 0.
        asked = tf.cond(tf.size(positions) > 0, lambda: positions, lambda: tf.zeros([1], tf.int64))
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

        found = shuffle(positions)
        return tf.where(found == largest, shuffle(largest), found) if one_more else found

    def _span(self, step: Number) -> tuple[tf.Tensor, tf.Tensor]:
        """The positions [start, stop) of a step's global batch."""
        start = self.examples_seen + tf.cast(step, tf.int64) * self.global_batch_size
        return tf.minimum(start, self.n), tf.minimum(start + self.global_batch_size, self.n)


def key_in_graph(seed: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
    """`Order(seed=seed).key(epoch)` of tensors, in a tf.data pipeline of this process."""
    key = tf.numpy_function(_key, [seed, epoch], tf.uint32, stateful=False)
    return tf.ensure_shape(key, [3])


def sorted_at_random(n: Number, seed: tf.Tensor) -> tf.Tensor:
    """A permutation of n (int64), all of it, from a seed of two integers (int64)."""
    numbers = tf.random.stateless_uniform([n], seed, minval=None, maxval=None, dtype=tf.int64)
    return tf.cast(tf.argsort(numbers, stable=True), tf.int64)


def _key(seed: int | None, epoch: int) -> np.ndarray:
    text = f"tfdist_ext order, seed {seed}, epoch {epoch}"
    words = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=12).digest(), "<u4")
    return words.astype(np.uint32)
