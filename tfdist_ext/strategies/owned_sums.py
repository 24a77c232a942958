"""Sums over workers for owners: each worker gets the sum of the elements that it owns.

With `shard_optimizer=True` each element of a variable has a worker that owns it. `OwnedSums.reduce`
is a reduce-scatter: it sends each gradient's elements to their owner and sums them there.
`OwnedSums.gather` sends the owners' new values to all workers. Both together send as many bytes as
one all-reduce.

TensorFlow has a reduce-scatter for NCCL only, so an all-to-all and a local sum stand in for it.
Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054 (stage 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfdist_ext.strategies.buckets import Piece, joined, split
from tfdist_ext.strategies.reductions import bucket_bytes_of

__all__ = ["OwnedBuckets", "OwnedSums", "Owners", "owned_buckets", "owned_sums_of"]

_OWNED_SUMS = "_tfdist_ext_owned_sums"  # an attribute of a strategy
_ALIGNED = 16  # elements: TensorFlow cuts there without a copy
_GROUP_KEY, _FIRST_KEY = 770_001, 1  # of collectives; TensorFlow counts its group keys from 1
_USUAL_BYTES = 4 << 20

# Of one value: (owner, first element, element after the last), which cover the value in order.
Owners: TypeAlias = Sequence[tuple[int, int, int]]


class OwnedBuckets(NamedTuple):
    """Buckets of values, each with a part of one length for each owner.

    Attributes:
        pieces: for each bucket and each worker the pieces that the worker owns.
        length: elements of a part; a part that has fewer is padded.
    """

    pieces: list[list[list[Piece]]]
    length: int


def owned_buckets(owners: Sequence[Owners], workers: int, largest: int) -> OwnedBuckets:
    """Cuts and packs values into buckets, the last values first.

    Args:
        owners: of each value.
        workers: number of workers.
        largest: elements of a bucket.
    """
    streams: list[list[Piece]] = [[] for _ in range(workers)]
    for value in reversed(range(len(owners))):
        for worker, start, stop in owners[value]:
            if stop > start:
                streams[worker].append(Piece(value, start, stop))
    longest = max(sum(piece.stop - piece.start for piece in stream) for stream in streams)
    count = max(1, -(-longest * workers // largest))
    even = -(-longest // count)
    length = max(even + -even % _ALIGNED, 1)
    count = max(1, -(-longest // length))
    cut = [_cut(stream, length, count) for stream in streams]
    return OwnedBuckets([[of_worker[n] for of_worker in cut] for n in range(count)], length)


def _cut(stream: Sequence[Piece], length: int, count: int) -> list[list[Piece]]:
    """Cuts a stream of pieces into `count` parts of `length` elements; the last have fewer."""
    parts: list[list[Piece]] = [[] for _ in range(count)]
    position = 0
    for piece in stream:
        start = piece.start
        while start < piece.stop:
            part, filled = divmod(position, length)
            stop = min(piece.stop, start + length - filled)
            parts[part].append(Piece(piece.value, start, stop))
            position += stop - start
            start = stop
    return parts


class OwnedSums:
    """The collectives of owners. Every worker calls them in the same order.

    Attributes:
        workers: number of workers.
        worker: the number of this one.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int, worker: int):
        self.workers = workers
        self.worker = worker
        self._strategy = strategy
        self._keys = itertools.count(_FIRST_KEY)
        setattr(strategy, _OWNED_SUMS, self)

    def reduce(self, values: Sequence[tf.Tensor], owners: Sequence[Owners]) -> list[tf.Tensor]:
        """Returns of each value the sum over workers of the elements that this worker owns.

        Args:
            values: dense tensors of known shapes.
            owners: of each value.

        Returns:
            Vectors. Sums of 16-bit values are computed in float32.
        """

        def sum_of(value: tf.Tensor) -> tf.Tensor:
            parts = self._all_to_all(tf.reshape(value, [self.workers, -1]))
            if value.dtype.size < 4:
                return tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), 0), value.dtype)
            return tf.reduce_sum(parts, 0)

        def reduce(flat: list[tf.Tensor], of_each: list[Owners]) -> list[tf.Tensor]:
            buckets, length = self._buckets(of_each, flat[0].dtype)
            cut = _cut_values(flat, [p for bucket in buckets for part in bucket for p in part])
            found: dict[Piece, tf.Tensor] = {}
            for bucket in buckets:
                parts = [_part([cut[piece] for piece in each], length, flat) for each in bucket]
                found.update(_pieces_of(sum_of(tf.concat(parts, 0)), bucket[self.worker]))
            return _values_of(found, flat)

        return _by_dtype(values, owners, reduce)

    def gather(self, parts: Sequence[tf.Tensor], owners: Sequence[Owners]) -> list[tf.Tensor]:
        """Returns whole values, as vectors, of which each worker has the elements it owns.

        Args:
            parts: of each value the elements that this worker owns, as a vector.
            owners: of each value.
        """

        def gather(mine: list[tf.Tensor], of_each: list[Owners]) -> list[tf.Tensor]:
            buckets, length = self._buckets(of_each, mine[0].dtype)
            cut = _cut_values(mine, [piece for bucket in buckets for piece in bucket[self.worker]])
            found: dict[Piece, tf.Tensor] = {}
            for bucket in buckets:
                own = [cut[piece] for piece in bucket[self.worker]]
                vectors = tf.split(self._all_gather(_part(own, length, mine)), self.workers)
                for vector, pieces in zip(vectors, bucket, strict=True):
                    found.update(_pieces_of(vector, pieces))
            return _values_of(found, mine)

        return _by_dtype(parts, owners, gather)

    def total(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over workers of a small vector. A tf.cond may contain it."""
        return tf.reduce_sum(tf.reshape(self._all_gather(values), [self.workers, -1]), 0)

    def _buckets(self, owners: Sequence[Owners], dtype: tf.DType) -> OwnedBuckets:
        size = bucket_bytes_of(self._strategy) or _USUAL_BYTES
        return owned_buckets(owners, self.workers, max(1, size // dtype.size))

    def _all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveAllToAllV2(input=value, **self._group())

    def _all_gather(self, value: tf.Tensor) -> tf.Tensor:
        found = tf.raw_ops.CollectiveGatherV2(input=value, **self._group())
        return tf.ensure_shape(found, [self.workers * value.shape[0]])

    def _group(self) -> dict[str, Any]:
        return {
            "group_size": self.workers,
            "group_key": _GROUP_KEY,
            "instance_key": next(self._keys),
            "ordering_token": [],
        }


def owned_sums_of(strategy: tf.distribute.Strategy) -> OwnedSums | None:
    """The sums for owners of a strategy with `shard_optimizer=True`; else None."""
    return getattr(strategy, _OWNED_SUMS, None)


def _by_dtype(
    values: Sequence[tf.Tensor],
    owners: Sequence[Owners],
    function: Callable[[list[tf.Tensor], list[Owners]], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """`function(vectors, owners)` for the values of each dtype."""
    groups: dict[tf.DType, list[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault(value.dtype, []).append(number)
    found: dict[int, tf.Tensor] = {}
    for numbers in groups.values():
        flat = [tf.reshape(values[number], [-1]) for number in numbers]
        results = function(flat, [owners[number] for number in numbers])
        found.update(zip(numbers, results, strict=True))
    return [found[number] for number in range(len(values))]


def _cut_values(vectors: Sequence[tf.Tensor], pieces: Sequence[Piece]) -> dict[Piece, tf.Tensor]:
    """The pieces of vectors that consist of these pieces, in their order."""
    found: dict[Piece, tf.Tensor] = {}
    for value, mine in itertools.groupby(sorted(pieces), key=lambda piece: piece.value):
        found.update(_pieces_of(vectors[value], list(mine)))
    return found


def _pieces_of(vector: tf.Tensor, pieces: Sequence[Piece]) -> dict[Piece, tf.Tensor]:
    """The pieces at the beginning of a vector, which may be padded."""
    lengths = [piece.stop - piece.start for piece in pieces]
    rest = vector.shape[0] - sum(lengths)
    parts = split(vector, [*lengths, rest] if rest else lengths) if lengths else []
    return dict(zip(pieces, parts, strict=False))


def _values_of(pieces: dict[Piece, tf.Tensor], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The vectors that consist of pieces, with the dtype of `like`."""
    found: list[list[tf.Tensor]] = [[] for _ in like]
    for piece in sorted(pieces):
        found[piece.value].append(pieces[piece])
    return [joined(parts) if parts else tf.zeros([0], like[0].dtype) for parts in found]


def _part(pieces: list[tf.Tensor], length: int, like: Sequence[tf.Tensor]) -> tf.Tensor:
    """Pieces as one vector of this length, with zeros after them."""
    missing = length - sum(piece.shape[0] for piece in pieces)
    padding = [tf.zeros([missing], like[0].dtype)] if missing else []
    return joined([*pieces, *padding])
