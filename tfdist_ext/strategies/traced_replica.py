"""The replica that runs a step: its number, its copies of variables, and its sums over replicas.

Under `strategy.run` each replica runs the step in its own thread. A `TracedReplica` stands for all
replicas of this worker while their step is traced once. The replica's number is an input of the
trace. In place of a sum over replicas the trace has placeholders, which `SharedStep` replaces.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from tfdist_ext.strategies._tf_private import Value
from tfdist_ext.strategies.owned_sums import NarrowSums, sums_of
from tfdist_ext.strategies.reductions import (
    OTHER,
    KeysOfSize,
    Reduced,
    all_reduce,
    dense_bytes,
    is_dense,
    reduce_parts,
    reduced_in_buckets,
    tells_what_it_reduces,
)

# Elements of a tensor that is faster to copy than to send by itself.
_SMALL = 4096


class NotSharedError(Exception):
    """The step cannot be traced once for all replicas; the message says why."""


class SyncPoint(NamedTuple):
    """A point of a traced step at which replicas wait for each other.

    Attributes:
        values: what a replica brings, tensors of the trace in a structure.
        results: placeholders for what the replica gets, in the rest of the trace.
        reduce: called once with values per replica, in cross-replica context. It returns the
            results, each per replica or one for all.
    """

    values: Any
    results: list[Value]
    reduce: Callable[[Any], list[Any]]


class TracedReplica(tf.distribute.ReplicaContext):
    """The context of a step that is traced once.

    Args:
        first: the index of this worker's first replica. The step is traced on its variables.
        number: the index of the replica that runs, over all workers; a tensor of the trace.

    Attributes:
        sync_points: in the order of the trace.
        refused: why the step cannot be traced once; None as long as it can.
    """

    def __init__(self, strategy: tf.distribute.Strategy, first: int, number: tf.Tensor):
        super().__init__(strategy, first)
        self.first = first
        self.number = number
        self.sync_points: list[SyncPoint] = []
        self.refused: str | None = None

    @property
    def replica_id_in_sync_group(self) -> NoReturn:
        self.refuse("the step uses the ID of its replica")

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        self.refuse("the step calls merge_call, or assigns to a variable in replica context")

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> NoReturn:
        self.refuse("the step calls all_reduce of its replica context")

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> NoReturn:
        self.refuse("the step calls all_gather of its replica context")

    def refuse(self, why: str) -> NoReturn:
        """End the trace with a NotSharedError."""
        self.refused = why
        raise NotSharedError(why)


def replica_number() -> tf.Tensor:
    """The index of the running replica over all workers."""
    context = tf.distribute.get_replica_context()
    if isinstance(context, TracedReplica):
        return context.number
    return context.replica_id_in_sync_group


def replica_id() -> int:
    """Returns the index of the variable copies that the replica uses. Not available on a TPU."""
    context = tf.distribute.get_replica_context()
    if isinstance(context, TracedReplica):
        return context.first
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def sum_up(
    values: Sequence[Value], what: Sequence[Reduced], keys: KeysOfSize | None = None
) -> list[Value]:
    """The sum of each value over all replicas. It has no gradient.

    Args:
        what: what each value is, for a StrategyTemplate.
        keys: given with a single value whose size may change from step to step.
    """
    strategy = tf.distribute.get_strategy()
    sums = sums_of(strategy)
    size, narrow = sums.bucket_bytes, sums.narrow
    if narrow is not None and keys is None and all(reduced.kind == "gradient" for reduced in what):
        return reduced_in_buckets(
            values, size or sys.maxsize, functools.partial(_sum_narrow, narrow)
        )
    if tf.executing_eagerly() or not size or dense_bytes(values) <= size:
        return _sum_up(values, what, keys, apart=False)
    return reduced_in_buckets(
        values, size, lambda some: _sum_up(some, [OTHER] * len(some), keys, apart=True)
    )


def _sum_narrow(narrow: NarrowSums, values: Sequence[Value]) -> list[Value]:
    """The sums of gradients; only vectors of known lengths travel in another type."""
    return [
        narrow.total(value)
        if is_dense(value) and narrow.travels_as(value.dtype) != value.dtype
        else _sum_up([value], [OTHER], None, apart=False)[0]
        for value in values
    ]


def _sum_up(
    values: Sequence[Value], what: Sequence[Reduced], keys: KeysOfSize | None, *, apart: bool
) -> list[Value]:
    context = tf.distribute.get_replica_context()
    if not isinstance(context, TracedReplica):
        return all_reduce(values, what, keys, apart=apart)
    values = [v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v) for v in values]
    # The hook of a StrategyTemplate gets a description of each value.
    one_by_one = apart or tells_what_it_reduces(context.strategy)
    small = [] if one_by_one else _small_values(values)
    alone = [i for i in range(len(values)) if i not in small]
    to_sum, kinds = [values[i] for i in alone], [what[i] for i in alone]
    if small:
        to_sum.append(tf.concat([tf.reshape(values[i], [-1]) for i in small], 0))
        kinds.append(OTHER)

    def reduce(of_all: Sequence[Any]) -> list[Any]:
        return reduce_parts(context.strategy, of_all, kinds, keys, apart=apart)

    summed = [_sum_placeholder(value) for value in to_sum]
    context.sync_points.append(SyncPoint(to_sum, summed, reduce))
    sums = dict(zip(alone, summed, strict=False))
    if small:
        sizes = [values[i].shape.num_elements() for i in small]
        for i, piece in zip(small, tf.split(summed[-1], sizes), strict=True):
            sums[i] = tf.reshape(piece, values[i].shape)
    return [sums[i] for i in range(len(values))]


def _small_values(values: Sequence[Value]) -> list[int]:
    """The indices of small values of one dtype, if there are several."""
    small = [
        i
        for i, value in enumerate(values)
        if is_dense(value) and value.shape.num_elements() <= _SMALL
    ]
    small = [i for i in small if values[i].dtype == values[small[0]].dtype]
    return small if len(small) > 1 else []


def computed_once(function: Callable[[Any], tf.Tensor], values: Any) -> tf.Tensor:
    """Call `function(the values of each replica)` once, in cross-replica context.

    Args:
        function: returns the time at which the values of all replicas are computed.
    """
    context = tf.distribute.get_replica_context()
    if not isinstance(context, TracedReplica):
        return context.merge_call(lambda _, per_replica: function(per_replica), args=(values,))
    time = _placeholder(tf.constant(0.0, tf.float64), [])
    context.sync_points.append(SyncPoint(values, [time], lambda of_all: [function(of_all)]))
    return time


def _sum_placeholder(value: Value) -> Value:
    if not isinstance(value, tf.IndexedSlices):
        return _placeholder(value, value.shape)
    # The slices of all replicas, one after another.
    rows = [_placeholder(part, [None, *part.shape[1:]]) for part in (value.values, value.indices)]
    shape = value.dense_shape
    return tf.IndexedSlices(*rows, None if shape is None else _placeholder(shape, shape.shape))


def _placeholder(value: tf.Tensor, shape: Sequence[int | None] | tf.TensorShape) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=tf.TensorShape(shape))
