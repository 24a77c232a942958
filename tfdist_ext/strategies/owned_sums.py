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
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.strategies.buckets import (
    ALIGNED,
    Piece,
    aligned,
    cut_values,
    joined,
    joined_values,
    pieces_in,
)
from tfdist_ext.strategies.reductions import BYTES_PER_WORKER, bucket_bytes_of

_OWNED_SUMS = "_tfdist_ext_owned_sums"  # an attribute of a strategy
_GROUP_KEY = 770_001  # of collectives; TensorFlow counts its own from 1

# Of one value: (owner, first element, element after the last), which cover the value in order.
Owners: TypeAlias = Sequence[tuple[int, int, int]]
# For each worker the pieces of values that it owns.
Bucket: TypeAlias = list[list[Piece]]


def owned_buckets(owners: Sequence[Owners], workers: int, largest: int) -> list[Bucket]:
    """Cuts and packs values into buckets with about as many elements of each owner.

    The last values come first, as in `buckets_of`. Values are cut where TensorFlow makes no copy.

    Args:
        owners: of each value.
        workers: number of workers.
        largest: elements of a bucket, up to the next place where a value can be cut.
    """
    streams: Bucket = [[] for _ in range(workers)]
    for value in reversed(range(len(owners))):
        for worker, start, stop in owners[value]:
            streams[worker].append(Piece(value, start, stop))
    longest = max(sum(piece.stop - piece.start for piece in stream) for stream in streams)
    count = max(1, -(-longest * workers // largest))
    length = aligned(-(-longest // count) + ALIGNED)  # each cut leaves fewer than ALIGNED free
    found: dict[int, Bucket] = {}
    for worker, stream in enumerate(streams):
        number = filled = 0
        for value, start, stop in stream:
            while start < stop:
                end = start + length - filled
                end = stop if stop <= end else end - end % ALIGNED
                if end > start:
                    bucket = found.setdefault(number, [[] for _ in range(workers)])
                    bucket[worker].append(Piece(value, start, end))
                if end < stop:
                    number, filled, start = number + 1, 0, max(start, end)
                else:
                    filled, start = filled + end - start, stop
    return [*found.values()]


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
        self._keys = itertools.count(1)
        setattr(strategy, _OWNED_SUMS, self)

    def reduce(self, values: Sequence[tf.Tensor], owners: Sequence[Owners]) -> list[tf.Tensor]:
        """Returns of each value the sum over workers of the elements that this worker owns.

        Args:
            values: dense tensors of known shapes.
            owners: of each value.

        Returns:
            Vectors. Sums of 16-bit values are computed in float32.
        """
        buckets = self._buckets(values, owners)
        cut = cut_values(values, [piece for each in buckets for of in each for piece in of])
        found: dict[Piece, tf.Tensor] = {}
        for bucket in buckets:
            parts = self._all_to_all([[cut[piece] for piece in pieces] for pieces in bucket])
            dtype = parts.dtype if parts.dtype.size > 2 else tf.float32
            # For so few lines add_n is faster than reduce_sum.
            total = tf.cast(tf.add_n(tf.unstack(tf.cast(parts, dtype))), parts.dtype)
            found.update(pieces_in(total, bucket[self.worker]))
        whole = joined_values(found)
        return [whole.get(n, tf.zeros([0], value.dtype)) for n, value in enumerate(values)]

    def gather(self, parts: Sequence[tf.Tensor], owners: Sequence[Owners]) -> list[tf.Tensor]:
        """Returns whole values, as vectors. Each worker gives the elements that it owns.

        Args:
            parts: of each value the elements that this worker owns.
            owners: of each value.
        """
        buckets = self._buckets(parts, owners)
        cut = cut_values(parts, [piece for each in buckets for piece in each[self.worker]])
        found: dict[Piece, tf.Tensor] = {}
        for bucket in buckets:
            length = aligned(_length(bucket))
            dtype = parts[next(piece.value for pieces in bucket for piece in pieces)].dtype
            mine = _padded([cut[piece] for piece in bucket[self.worker]], length, dtype)
            vectors = tf.split(self._all_gather(mine), [length] * self.workers)
            for vector, pieces in zip(vectors, bucket, strict=True):
                found.update(pieces_in(vector, pieces))
        whole = joined_values(found)
        return [whole.get(n, tf.zeros([0], part.dtype)) for n, part in enumerate(parts)]

    def total(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over workers of a small vector. A tf.cond may contain it."""
        return tf.reduce_sum(tf.reshape(self._all_gather(values), [self.workers, -1]), 0)

    def _buckets(self, values: Sequence[tf.Tensor], owners: Sequence[Owners]) -> list[Bucket]:
        """The buckets of the values of each dtype."""
        size = bucket_bytes_of(self._strategy) or BYTES_PER_WORKER * self.workers
        found: list[Bucket] = []
        for dtype in dict.fromkeys(value.dtype for value in values):
            mine = [
                each if value.dtype == dtype else ()
                for value, each in zip(values, owners, strict=True)
            ]
            found += owned_buckets(mine, self.workers, max(1, size // dtype.size))
        return found

    def _all_to_all(self, parts: list[list[tf.Tensor]]) -> tf.Tensor:
        """Sends each worker its part; returns a line for each worker that has sent one."""
        dtype = next(piece.dtype for pieces in parts for piece in pieces)
        length = max(sum(piece.shape[0] for piece in pieces) for pieces in parts)
        lines = tf.stack([_padded(pieces, length, dtype) for pieces in parts])
        return tf.raw_ops.CollectiveAllToAllV2(input=lines, **self._group())

    def _all_gather(self, value: tf.Tensor) -> tf.Tensor:
        found = tf.raw_ops.CollectiveGatherV2(input=value, **self._group())
        return tf.ensure_shape(found, [self.workers * value.shape[0]])

    def _group(self) -> dict[str, Any]:
        key, size = next(self._keys), self.workers
        return {
            "group_key": _GROUP_KEY, "group_size": size, "instance_key": key, "ordering_token": []
        }  # fmt: skip


def owned_sums_of(strategy: tf.distribute.Strategy) -> OwnedSums | None:
    """The sums for owners of a strategy with `shard_optimizer=True`; else None."""
    return getattr(strategy, _OWNED_SUMS, None)


def _length(bucket: Bucket) -> int:
    return max(sum(piece.stop - piece.start for piece in pieces) for pieces in bucket)


def _padded(pieces: list[tf.Tensor], length: int, dtype: tf.DType) -> tf.Tensor:
    """Pieces as one vector of this length, with zeros after them."""
    missing = length - sum(piece.shape[0] for piece in pieces)
    return joined([*pieces, tf.zeros([missing], dtype)] if missing else pieces)
