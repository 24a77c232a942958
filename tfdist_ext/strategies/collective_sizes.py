"""What workers sum or gather, where its size may differ from step to step: padded to a few sizes.

All turns of a loop in the graph make a collective with one key, and what goes under a key must
have one shape. So each size needs a key of its own. TensorFlow keeps what it knows of a key as
long as the process lives, and asks the first worker about each new one: keys must be few. Values
are padded to one of `SIZES`, of which there are four in an octave.

Sparse gradients (`tf.IndexedSlices`) of one dtype are put into one vector, so that one collective
gathers all of them. Padding changes no result: slices of zeros, of an index that the gradient has
already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import tensorflow as tf

__all__ = [
    "SIZES",
    "Padding",
    "from_vectors",
    "in_one_vector",
    "key_of_size",
    "padded",
    "size_at_least",
]

# 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
SIZES = tuple(sorted({factor << octave for factor in range(1, 8) for octave in range(29)}))

_NUMBERS = 128  # more than there are sizes
_KEYS = 2**31 // _NUMBERS


def size_at_least(size: tf.Tensor) -> tf.Tensor:
    """The smallest of `SIZES` that is not below `size`, an int64 scalar."""
    return tf.gather(tf.constant(SIZES, tf.int64), _number(size))


def key_of_size(key: int | tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """The key (int32) of a collective for one of `SIZES`, from that which TensorFlow gave it.

    It is negative, as TensorFlow's are not. It is another one for each key and size, until
    TensorFlow has given 2**24 keys, which are weeks of training.
    """
    return -1 - (key % _KEYS * _NUMBERS + tf.cast(_number(size), tf.int32))


def _number(size: tf.Tensor) -> tf.Tensor:
    sizes = tf.constant(SIZES, tf.int64)
    return tf.searchsorted(sizes, tf.reshape(tf.cast(size, tf.int64), [1]))[0]


class Padding(NamedTuple):
    """How to sum or gather a vector of varying length.

    Within a step it has the same length on all replicas.

    Attributes:
        keys: makes a scope in which collectives have the keys of a size.
        gathers: in that scope `tf.IndexedSlices` are not reduced: their values are put one after
            another, which needs one collective, not three.
    """

    keys: Callable[[tf.Tensor], AbstractContextManager[None]]
    gathers: bool = False


def padded(value: tf.Tensor | tf.IndexedSlices, length: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """A vector, or slices, and after them zeros, so that there are `length` (int64) of them."""
    if not isinstance(value, tf.IndexedSlices):
        return tf.pad(value, [[0, length - tf.size(value, tf.int64)]])
    more = length - tf.size(value.indices, tf.int64)
    index = tf.concat([value.indices[:1], tf.zeros([1], value.indices.dtype)], 0)[0]
    rest = tf.shape(value.values, tf.int64)[1:]
    zeros = tf.zeros(tf.concat([[more], rest], 0), value.values.dtype)
    return tf.IndexedSlices(
        tf.concat([value.values, zeros], 0),
        tf.concat([value.indices, tf.fill([more], index)], 0),
        value.dense_shape,
    )


def in_one_vector(gradients: Sequence[tf.IndexedSlices]) -> tf.Tensor:
    """The values and the indices of gradients of one dtype, in a vector of that dtype.

    An index becomes one or more elements with its 64 bits, which no one may compute with.
    """
    pieces = []
    for slices in gradients:
        words = tf.bitcast(tf.cast(slices.indices, tf.int64), slices.dtype)
        pieces += [tf.reshape(slices.values, [-1]), tf.reshape(words, [-1])]
    return tf.concat(pieces, 0)


def from_vectors(
    gathered: tf.Tensor, replicas: int, gradients: Sequence[tf.IndexedSlices]
) -> list[tf.IndexedSlices]:
    """The slices of all replicas for each gradient, those of the first replica first.

    Args:
        gathered: the vectors of all replicas, each of them padded.
        gradients: this replica's, as `in_one_vector` got them; the others have as many slices.
    """
    vectors = tf.reshape(gathered, [replicas, -1])
    words = max(1, tf.int64.size // vectors.dtype.size)  # of an index
    sizes = []
    for slices in gradients:
        sizes += [tf.size(slices.values), tf.size(slices.indices) * words]
    rest = tf.shape(vectors)[1] - tf.add_n(sizes)
    pieces = tf.split(vectors, tf.stack([*sizes, rest]), axis=1, num=len(sizes) + 1)
    found = []
    for slices, values, indices in zip(gradients, pieces[::2], pieces[1::2], strict=False):
        shape = tf.concat([[replicas * tf.size(slices.indices)], tf.shape(slices.values)[1:]], 0)
        values = tf.ensure_shape(tf.reshape(values, shape), [None, *slices.values.shape[1:]])
        indices = tf.bitcast(tf.reshape(indices, [-1, words] if words > 1 else [-1]), tf.int64)
        indices = tf.cast(indices, slices.indices.dtype)
        found.append(tf.IndexedSlices(values, indices, slices.dense_shape))
    return found
