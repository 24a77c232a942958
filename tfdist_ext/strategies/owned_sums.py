"""Sums over workers for owners: each worker gets the sum of the elements that it owns.

With `shard_optimizer=True` each element of a variable has a worker that owns it. `OwnedSums.reduce`
is a reduce-scatter: it sends each gradient's elements to their owner and sums them there.
`OwnedSums.gather` sends the owners' new values to all workers. Both together send as many bytes as
one all-reduce.

With `gradient_dtype`, gradients travel in a type of 16 bits (`NarrowSums`). The sums are computed
in the gradients' own type, and all workers get the same sums.

TensorFlow has a reduce-scatter for NCCL only, so an all-to-all and a local sum stand in for it.
Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054 (stage 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.placement.scaling import BYTES_PER_WORKER
from tfdist_ext.strategies.reductions import (
    ALIGNED,
    Piece,
    aligned,
    cut_values,
    joined,
    joined_values,
    pieces_in,
)

_SUMS = "_tfdist_ext_sums"  # an attribute of a strategy
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
    buckets: dict[int, Bucket] = {}
    for worker, stream in enumerate(streams):
        number = filled = 0
        for value, start, stop in stream:
            while start < stop:
                end = start + length - filled
                end = stop if stop <= end else end - end % ALIGNED
                if end > start:
                    bucket = buckets.setdefault(number, [[] for _ in range(workers)])
                    bucket[worker].append(Piece(value, start, end))
                if end < stop:
                    number, filled, start = number + 1, 0, max(start, end)
                else:
                    filled, start = filled + end - start, stop
    return [*buckets.values()]


class _Collectives:
    """Collectives of all workers, each with one device. Every worker calls them in the same order.

    Args:
        group: the key of these collectives, which no other collectives of the process have.

    Attributes:
        workers: number of workers.
        worker: the number of this one.
    """

    def __init__(self, group: int, workers: int, worker: int):
        self.workers = workers
        self.worker = worker
        self._group = group
        self._keys = itertools.count(1)

    def all_to_all(self, lines: tf.Tensor) -> tf.Tensor:
        """Sends each worker its line; returns a line for each worker that has sent one."""
        moved = tf.raw_ops.CollectiveAllToAllV2(input=_movable(lines), **self._arguments())
        return tf.bitcast(moved, lines.dtype)

    def all_gather(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns the vectors of all workers, one after another."""
        moved = tf.raw_ops.CollectiveGatherV2(input=_movable(vector), **self._arguments())
        return tf.ensure_shape(tf.bitcast(moved, vector.dtype), [self.workers * vector.shape[0]])

    def _arguments(self) -> dict[str, Any]:
        key, size = next(self._keys), self.workers
        return {
            "group_key": self._group, "group_size": size, "instance_key": key, "ordering_token": []
        }  # fmt: skip


class NarrowSums(_Collectives):
    """Sums over workers of gradients, which travel in another type than their own.

    Attributes:
        dtype: of the elements between workers, bfloat16 or float16.
    """

    def __init__(self, group: int, workers: int, worker: int, dtype: str):
        super().__init__(group, workers, worker)
        self.dtype = tf.as_dtype(dtype)

    def travels_as(self, dtype: tf.DType) -> tf.DType:
        """Returns the type in which gradients of this type travel: never one of the same size."""
        return self.dtype if dtype.is_floating and dtype.size > self.dtype.size else dtype

    def total(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a vector of known length, in the vector's type.

        Each worker sums a part, and rounds the sum to `dtype`. Each of two workers sends its whole
        vector instead, which has as many bytes.
        """
        length, narrow = vector.shape[0], tf.cast(vector, self.dtype)
        if self.workers == 2:
            lines = tf.reshape(self.all_gather(narrow), [self.workers, length])
            return _sum_of_lines(lines, vector.dtype)
        line = aligned(-(-length // self.workers))
        padded = tf.pad(narrow, [[0, line * self.workers - length]])
        parts = self.all_to_all(tf.reshape(padded, [self.workers, line]))
        sums = self.all_gather(tf.cast(_sum_of_lines(parts, vector.dtype), self.dtype))
        return tf.cast(sums[:length], vector.dtype)


class OwnedSums(_Collectives):
    """The sums of owners.

    Args:
        bucket_bytes: the size of the buckets; 0: 4 MiB times the number of workers.
        narrow: the type of gradients between workers; None: their own.
    """

    def __init__(
        self, group: int, workers: int, worker: int, bucket_bytes: int, narrow: NarrowSums | None
    ):
        super().__init__(group, workers, worker)
        self._bucket_bytes = bucket_bytes or BYTES_PER_WORKER * workers
        self._narrow = narrow

    def reduce(self, values: Sequence[tf.Tensor], owners: Sequence[Owners]) -> list[tf.Tensor]:
        """Returns of each value the sum over workers of the elements that this worker owns.

        Args:
            values: dense tensors of known shapes.
            owners: of each value.

        Returns:
            Vectors.
        """
        buckets = self._buckets(values, owners)
        cut = cut_values(values, [p for _, bucket in buckets for pieces in bucket for p in pieces])
        sums: dict[Piece, tf.Tensor] = {}
        for dtype, bucket in buckets:
            # A line for each worker, which holds the worker's pieces.
            lines = tf.stack(
                [_padded([cut[p] for p in pieces], _length(bucket), dtype) for pieces in bucket]
            )
            travels_as = dtype if self._narrow is None else self._narrow.travels_as(dtype)
            parts = self.all_to_all(tf.cast(lines, travels_as))
            sums.update(pieces_in(_sum_of_lines(parts, dtype), bucket[self.worker]))
        whole = joined_values(sums)
        return [whole.get(n, tf.zeros([0], value.dtype)) for n, value in enumerate(values)]

    def gather(self, parts: Sequence[tf.Tensor], owners: Sequence[Owners]) -> list[tf.Tensor]:
        """Returns whole values, as vectors. Each worker gives the elements that it owns.

        Args:
            parts: of each value the elements that this worker owns.
            owners: of each value.
        """
        buckets = self._buckets(parts, owners)
        cut = cut_values(parts, [piece for _, bucket in buckets for piece in bucket[self.worker]])
        gathered: dict[Piece, tf.Tensor] = {}
        for dtype, bucket in buckets:
            length = aligned(_length(bucket))
            own_vector = _padded([cut[piece] for piece in bucket[self.worker]], length, dtype)
            vectors = tf.split(self.all_gather(own_vector), [length] * self.workers)
            for vector, pieces in zip(vectors, bucket, strict=True):
                gathered.update(pieces_in(vector, pieces))
        whole = joined_values(gathered)
        return [whole.get(n, tf.zeros([0], part.dtype)) for n, part in enumerate(parts)]

    def total(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over workers of a small vector. A tf.cond may contain it."""
        return tf.reduce_sum(tf.reshape(self.all_gather(values), [self.workers, -1]), 0)

    def _buckets(
        self, values: Sequence[tf.Tensor], owners: Sequence[Owners]
    ) -> list[tuple[tf.DType, Bucket]]:
        """The buckets of the values of each dtype."""
        buckets: list[tuple[tf.DType, Bucket]] = []
        for dtype in dict.fromkeys(value.dtype for value in values):
            owners_of_dtype = [
                value_owners if value.dtype == dtype else ()
                for value, value_owners in zip(values, owners, strict=True)
            ]
            largest = max(1, self._bucket_bytes // dtype.size)
            cut = owned_buckets(owners_of_dtype, self.workers, largest)
            buckets += [(dtype, bucket) for bucket in cut]
        return buckets


@dataclass(frozen=True, kw_only=True)
class Sums:
    """How a strategy sums gradients over workers.

    Attributes:
        bucket_bytes: the size of the buckets; 0 without buckets.
        owned: the sums for owners, with `shard_optimizer=True`.
        narrow: the sums in another type, with `gradient_dtype`.
    """

    bucket_bytes: int = 0
    owned: OwnedSums | None = None
    narrow: NarrowSums | None = None


def sums_of(strategy: tf.distribute.Strategy) -> Sums:
    """Returns how a strategy sums gradients."""
    return getattr(strategy, _SUMS, Sums())


def set_sums(strategy: tf.distribute.Strategy, sums: Sums) -> None:
    """Sets how a strategy sums gradients."""
    setattr(strategy, _SUMS, sums)


def _movable(value: tf.Tensor) -> tf.Tensor:
    """The bits of a tensor, in a type that TensorFlow's collectives move."""
    return tf.bitcast(value, tf.float16) if value.dtype == tf.bfloat16 else value


def _sum_of_lines(lines: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The sum of the lines of a matrix in a type, computed in at least float32."""
    wide = dtype if dtype.size > 2 else tf.float32
    # For so few lines add_n is faster than reduce_sum.
    return tf.cast(tf.add_n(tf.unstack(tf.cast(lines, wide))), dtype)


def _length(bucket: Bucket) -> int:
    return max(sum(piece.stop - piece.start for piece in pieces) for pieces in bucket)


def _padded(pieces: list[tf.Tensor], length: int, dtype: tf.DType) -> tf.Tensor:
    """Pieces as one vector of this length, with zeros after them."""
    missing = length - sum(piece.shape[0] for piece in pieces)
    return joined([*pieces, tf.zeros([missing], dtype)] if missing else pieces)
