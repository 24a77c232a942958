"""Large sums of a step in buckets: large gradients are cut, small ones are packed.

TensorFlow sums all dense values of a call as one tensor. Several buckets travel beside each other,
and a bucket is summed while the gradients of earlier layers are still computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist_ext.strategies._tf_private import Value

__all__ = ["Piece", "buckets_of", "dense_bytes", "joined", "reduced_in_buckets", "split"]

_ALIGNED = 16  # elements: TensorFlow cuts there without a copy


class Piece(NamedTuple):
    """The elements of a value from `start` up to `stop`."""

    value: int
    start: int
    stop: int


def buckets_of(sizes: Sequence[int], largest: int) -> list[list[Piece]]:
    """Cuts and packs values into buckets.

    The last values come first: the backward pass begins at a model's last layers.

    Args:
        sizes: elements of each value.
        largest: elements of a bucket.
    """
    found: list[list[Piece]] = []
    packed: list[Piece] = []
    for value in reversed(range(len(sizes))):
        size = sizes[value]
        if size > largest:
            count = -(-size // largest)
            even = -(-size // count)
            step = min(even + -even % _ALIGNED, largest)
            starts = range(0, size, step)
            found += [[Piece(value, start, min(start + step, size))] for start in starts]
            continue
        if packed and size + sum(piece.stop for piece in packed) > largest:
            found.append(packed)
            packed = []
        packed.append(Piece(value, 0, size))
    return [*found, packed] if packed else found


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
    is_dense = list(map(_is_dense, values))
    groups: dict[tf.DType, list[int]] = {}
    for number, value in enumerate(values):
        if is_dense[number]:
            groups.setdefault(value.dtype, []).append(number)
    buckets: list[list[Piece]] = []
    for dtype, numbers in groups.items():
        sizes = [values[number].shape.num_elements() for number in numbers]
        buckets += [
            [piece._replace(value=numbers[piece.value]) for piece in bucket]
            for bucket in buckets_of(sizes, max(1, bucket_bytes // dtype.size))
        ]
    lengths: dict[int, list[int]] = {}
    for piece in itertools.chain(*buckets):
        lengths.setdefault(piece.value, []).append(piece.stop - piece.start)
    cut = {number: iter(split(_flat(values[number]), each)) for number, each in lengths.items()}
    vectors = [joined([next(cut[piece.value]) for piece in bucket]) for bucket in buckets]
    others = [value for value, dense in zip(values, is_dense, strict=True) if not dense]
    reduced = reduce([*vectors, *others])
    pieces: dict[int, list[tf.Tensor]] = {number: [] for number in lengths}
    for bucket, vector in zip(buckets, reduced, strict=False):
        parts = split(vector, [piece.stop - piece.start for piece in bucket])
        for piece, part in zip(bucket, parts, strict=True):
            pieces[piece.value].append(part)
    rest = iter(reduced[len(vectors) :])
    return [
        tf.reshape(joined(pieces[number]), value.shape) if dense else next(rest)
        for number, (value, dense) in enumerate(zip(values, is_dense, strict=True))
    ]


def dense_bytes(values: Sequence[Value]) -> int:
    """The bytes of the dense tensors of known shapes."""
    dense = filter(_is_dense, values)
    return sum(value.shape.num_elements() * value.dtype.size for value in dense)


def _is_dense(value: Value) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.is_fully_defined()


def _flat(value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(value, [-1])


def split(vector: tf.Tensor, lengths: Sequence[int]) -> list[tf.Tensor]:
    """The parts of a vector of these lengths."""
    return [vector] if len(lengths) == 1 else tf.split(vector, lengths)


def joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Vectors, one after another."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)
