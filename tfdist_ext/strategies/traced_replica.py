"""The replica that runs a step: its number, whose copies it uses, and how it meets the others.

Under `strategy.run` each replica runs the step in a thread of its own. A `TracedReplica` stands
for all replicas of this worker while their step is traced once: the replica's number is an input
of the trace, and where replicas meet the trace has marks, which `SharedStep` replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from tfdist_ext.strategies._tf_private import Value
from tfdist_ext.strategies.collective_sizes import Padding
from tfdist_ext.strategies.reductions import (
    OTHER,
    Reduced,
    all_reduce,
    reduce_parts,
    tells_what_it_reduces,
)

__all__ = [
    "Meeting",
    "NotSharedError",
    "TracedReplica",
    "copy_number",
    "is_traced_once",
    "once_for_all",
    "replica_number",
    "sum_up",
]


# Elements of a tensor that is copied sooner than it is sent by itself.
_SMALL = 4096


class NotSharedError(Exception):
    """The step cannot be traced once for all replicas; the message says why."""


class Meeting(NamedTuple):
    """A point of a traced step at which replicas meet.

    Attributes:
        values: what a replica brings, tensors of the trace in a structure.
        results: marks that stand for what it gets, in the rest of the trace.
        hold: called once with values per replica, in cross-replica context; it gives the results,
            each per replica or one for all.
    """

    values: Any
    results: list[Value]
    hold: Callable[[Any], list[Any]]


class TracedReplica(tf.distribute.ReplicaContext):
    """The context of a step that is traced once.

    Args:
        first: the number of this worker's first replica, on whose variables it is traced.
        number: of the replica that runs it, in the order of all; a tensor of the trace.

    Attributes:
        meetings: in the order of the trace.
        refused: why the step cannot be traced once; None as long as it can.
    """

    def __init__(self, strategy: tf.distribute.Strategy, first: int, number: tf.Tensor):
        super().__init__(strategy, first)
        self.first = first
        self.number = number
        self.meetings: list[Meeting] = []
        self.refused: str | None = None

    @property
    def replica_id_in_sync_group(self) -> NoReturn:
        self.refuse("it asks for the number of its replica")

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        self.refuse("it calls merge_call, or assigns to a variable as a replica")

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> NoReturn:
        self.refuse("it calls all_reduce of its replica context")

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> NoReturn:
        self.refuse("it calls all_gather of its replica context")

    def meet(
        self, values: Any, marks: list[Value], hold: Callable[[Any], list[Any]]
    ) -> list[Value]:
        """Note a meeting; the marks, which the rest of the step takes for its results."""
        self.meetings.append(Meeting(values, marks, hold))
        return marks

    def refuse(self, why: str) -> NoReturn:
        """End the trace.

        Raises:
            NotSharedError: always.
        """
        self.refused = why
        raise NotSharedError(why)


def replica_number() -> tf.Tensor:
    """The number of the running replica in the order of all."""
    context = tf.distribute.get_replica_context()
    if isinstance(context, TracedReplica):
        return context.number
    return context.replica_id_in_sync_group


def copy_number() -> int:
    """The number of the replica whose copies of variables are used. A TPU does not tell it."""
    context = tf.distribute.get_replica_context()
    if isinstance(context, TracedReplica):
        return context.first
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def is_traced_once() -> bool:
    """Whether a step is traced once for all replicas of this worker."""
    return isinstance(tf.distribute.get_replica_context(), TracedReplica)


def sum_up(
    values: Sequence[Value],
    what: Sequence[Reduced],
    padding: Padding | None = None,
) -> list[Value]:
    """The sum of each value over all replicas. It has no gradient.

    Args:
        what: what each value is, for a StrategyTemplate.
        padding: of a single vector, which may have another size in another step.
    """

    op = tf.distribute.ReduceOp.SUM
    context = tf.distribute.get_replica_context()
    if not isinstance(context, TracedReplica):
        return list(all_reduce(op, values, what, padding))
    values = [v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v) for v in values]
    # The hook of a StrategyTemplate is told what each value is.
    together = [] if tells_what_it_reduces(context.strategy) else _small_ones(values)
    alone = sorted(set(range(len(values))).difference(*together))
    flat = [tf.concat([tf.reshape(values[i], [-1]) for i in each], 0) for each in together]
    brought = [*(values[place] for place in alone), *flat]
    kinds = [*(what[place] for place in alone), *(OTHER for _ in flat)]

    def hold(of_all: Sequence[Any]) -> list[Any]:
        return reduce_parts(context.strategy, op, of_all, kinds, padding)

    if padding is None:
        marks = [_mark_of_sum(value) for value in brought]
    else:
        marks = [_mark(value, [None]) for value in brought]
    summed = context.meet(brought, marks, hold)
    found = dict(zip(alone, summed, strict=False))
    for places, total in zip(together, summed[len(alone) :], strict=True):
        shapes = [values[place].shape for place in places]
        pieces = tf.split(total, [shape.num_elements() for shape in shapes])
        for place, piece, shape in zip(places, pieces, shapes, strict=True):
            found[place] = tf.reshape(piece, shape)
    return [found[place] for place in range(len(values))]


def _small_ones(values: Sequence[Value]) -> list[list[int]]:
    """The places of small values, those of one dtype together, where they are several.

    Sending a small value takes longer than copying it several times.
    """
    small: dict[tf.DType, list[int]] = {}
    for place, value in enumerate(values):
        elements = None if isinstance(value, tf.IndexedSlices) else value.shape.num_elements()
        if elements is not None and elements <= _SMALL:
            small.setdefault(value.dtype, []).append(place)
    return [places for places in small.values() if len(places) > 1]


def once_for_all(
    function: Callable[[Any], tuple[Any, tf.Tensor]], values: Any
) -> tuple[Any, tf.Tensor]:
    """Call `function(the values of each replica)` once, in cross-replica context.

    Args:
        function: returns something, and the time at which the values of all were there.

    Returns:
        What the function does; None in the place of what it returns while a trace is made.
    """
    context = tf.distribute.get_replica_context()
    if not isinstance(context, TracedReplica):
        return context.merge_call(lambda _, each: function(each), args=(values,))
    mark = _mark(tf.constant(0.0, tf.float64))

    def time_of(of_all: Any) -> list[Any]:
        return [tf.cast(function(of_all)[1], tf.float64)]

    return None, context.meet(values, [mark], time_of)[0]


def _mark_of_sum(value: Value) -> Value:
    if not isinstance(value, tf.IndexedSlices):
        return _mark(value)
    # The slices of all replicas, one after another.
    rows = [_mark(part, [None, *part.shape[1:]]) for part in (value.values, value.indices)]
    shape = None if value.dense_shape is None else _mark(value.dense_shape)
    return tf.IndexedSlices(*rows, shape)


def _mark(value: tf.Tensor, shape: Sequence[int | None] | None = None) -> tf.Tensor:
    shape = value.shape if shape is None else tf.TensorShape(shape)
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=shape)
