"""Large sums of a step in buckets: large gradients are cut, small ones are packed.

TensorFlow sums all dense values of a call as one tensor. Several buckets travel beside each other,
and a bucket is summed while the gradients of earlier layers are still computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist_ext.strategies._tf_private import Value

ALIGNED = 16  # elements: TensorFlow cuts there without a copy


class Piece(NamedTuple):
    """The elements of a value from `start` up to `stop`."""

    value: int
    start: int
    stop: int


def aligned(length: int) -> int:
    """Rounds a number of elements up to a multiple of `ALIGNED`."""
    return length + -length % ALIGNED


def buckets_of(sizes: Sequence[int], largest: int) -> list[list[Piece]]:
    """Cuts and packs values into buckets.

    The last values come first: the backward pass begins at a model's last layers.

    Args:
        sizes: elements of each value.
        largest: elements of a bucket.
    """
    buckets: list[list[Piece]] = []
    packed: list[Piece] = []
    for value in reversed(range(len(sizes))):
        size = sizes[value]
        if size > largest:
            count = -(-size // largest)
            step = min(aligned(-(-size // count)), largest)
            starts = range(0, size, step)
            buckets += [[Piece(value, start, min(start + step, size))] for start in starts]
            continue
        if packed and size + sum(piece.stop for piece in packed) > largest:
            buckets.append(packed)
            packed = []
        packed.append(Piece(value, 0, size))
    return [*buckets, packed] if packed else buckets


def reduced_in_buckets(
    values: Sequence[Value],
    bucket_bytes: int,
    reduce: Callable[[list[Value]], list[Value]],
) -> list[Value]:
    """Reduces values: dense tensors of known shapes in buckets, and the others as they are.

    Args:
        reduce: reduces each of a list of values separately. It is called once, with the vectors
            of all buckets and the other values.
    """
    dense = [number for number, value in enumerate(values) if is_dense(value)]
    buckets: list[list[Piece]] = []
    for dtype in dict.fromkeys(values[number].dtype for number in dense):
        numbers = [number for number in dense if values[number].dtype == dtype]
        sizes = [values[number].shape.num_elements() for number in numbers]
        buckets += [
            [piece._replace(value=numbers[piece.value]) for piece in bucket]
            for bucket in buckets_of(sizes, max(1, bucket_bytes // dtype.size))
        ]
    cut = cut_values(values, itertools.chain(*buckets))
    vectors = [joined([cut[piece] for piece in bucket]) for bucket in buckets]
    reduced = reduce([*vectors, *(value for value in values if not is_dense(value))])
    pieces: dict[Piece, tf.Tensor] = {}
    for bucket, vector in zip(buckets, reduced, strict=False):
        pieces.update(pieces_in(vector, bucket))
    whole, rest = joined_values(pieces), iter(reduced[len(vectors) :])
    return [
        tf.reshape(whole[number], value.shape) if number in whole else next(rest)
        for number, value in enumerate(values)
    ]


def cut_values(values: Sequence[tf.Tensor], pieces: Iterable[Piece]) -> dict[Piece, tf.Tensor]:
    """The pieces of values, as vectors. The pieces of a value cover it."""
    vectors: dict[Piece, tf.Tensor] = {}
    for number, group in itertools.groupby(sorted(pieces), key=lambda piece: piece.value):
        vectors.update(pieces_in(tf.reshape(values[number], [-1]), list(group)))
    return vectors


def pieces_in(vector: tf.Tensor, pieces: Sequence[Piece]) -> dict[Piece, tf.Tensor]:
    """The pieces of a vector, in this order. The vector may be padded at its end."""
    lengths = [piece.stop - piece.start for piece in pieces]
    rest = vector.shape[0] - sum(lengths)
    parts = [vector] if lengths == [vector.shape[0]] else tf.split(vector, [*lengths, rest])
    return dict(zip(pieces, parts, strict=False))


def joined_values(pieces: Mapping[Piece, tf.Tensor]) -> dict[int, tf.Tensor]:
    """The vector of each value that has pieces."""
    vectors: dict[int, list[tf.Tensor]] = {}
    for piece in sorted(pieces):
        vectors.setdefault(piece.value, []).append(pieces[piece])
    return {number: joined(parts) for number, parts in vectors.items()}


def dense_bytes(values: Sequence[Value]) -> int:
    """The bytes of the dense tensors of known shapes."""
    dense = filter(is_dense, values)
    return sum(value.shape.num_elements() * value.dtype.size for value in dense)


def is_dense(value: Value) -> bool:
    """Whether a value is a tensor of known shape."""
    return isinstance(value, tf.Tensor) and value.shape.is_fully_defined()


def joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Vectors, one after another."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)
