"""Reductions over replicas: what is reduced, and values whose size differs from step to step.

A `StrategyTemplate` is told what it reduces (`Reduced`), for its `reduce_values` hook.

All iterations of a loop in the graph share one collective key, and a key allows only one shape. So
each size needs its own key. Keys must be few: TensorFlow never forgets a key, and asks the first
worker about each new key. Values are padded to one of `SIZES`, four between a number and its
double.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from tfdist_ext.strategies._tf_private import Value, all_reduce_in_replica

# Makes a scope in which collectives have the keys of a size, one of `SIZES`.
KeysOfSize: TypeAlias = Callable[[tf.Tensor], AbstractContextManager[None]]

_BUCKET_BYTES = "_tfdist_ext_bucket_bytes"  # an attribute of a strategy

Kind = Literal["gradient", "metric", "statistic", "assignment", "other"]


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Describes the values that `reduce_values` reduces.

    Attributes:
        kind: "gradient" is the gradient of `variable`. "metric" is the state of a Keras metric, or
            a value that a step returns for the logs. "statistic" is a moment of a synchronized
            BatchNormalization, the weight of a loss, or a moving average that a layer assigns to
            `variable`. "assignment" is a value that replicas assign to `variable`, which has an
            aggregation. "other" is a value that your own code reduces with `all_reduce`, `reduce`
            or `tfd.all_rows`.
        variable: the variable of the strategy, or None.
        path: the Keras path of the variable, or its name. "" without a variable.
    """

    kind: Kind
    variable: tf.Variable | None = None
    path: str = ""


METRIC = Reduced(kind="metric")
STATISTIC = Reduced(kind="statistic")
OTHER = Reduced(kind="other")


def all_reduce(
    op: tf.distribute.ReduceOp,
    values: Sequence[Value],
    what: Sequence[Reduced],
    keys: KeysOfSize | None = None,
    *,
    apart: bool = False,
) -> list[Value]:
    """`ReplicaContext.all_reduce` of a list, which tells a StrategyTemplate what the values are.

    It has no gradient.

    Args:
        keys: given with a single value whose size may change from step to step.
        apart: reduce each value by itself. Otherwise TensorFlow joins the values in a graph.
    """
    context = tf.distribute.get_replica_context()
    if reduce := all_reduce_in_replica(context.strategy.extended):
        with _scope_of_keys(keys, values[0]):
            options = tf.distribute.experimental.CommunicationOptions()
            if apart:
                return [reduce(op, [value], options)[0] for value in values]
            return list(reduce(op, list(values), options))

    def of_all(strategy: tf.distribute.Strategy, *parts: Any) -> Any:
        return reduce_parts(strategy, op, parts, what, keys, apart=apart)

    return list(context.merge_call(of_all, args=tuple(values)))


def reduce_parts(
    strategy: tf.distribute.Strategy,
    op: tf.distribute.ReduceOp,
    parts: Sequence[Any],
    what: Sequence[Reduced],
    keys: KeysOfSize | None = None,
    *,
    apart: bool = False,
) -> list[Any]:
    """Reduces each value to the devices it came from. Call it in cross-replica context.

    Args:
        keys: given with a single value whose size may change from step to step.
        apart: as of `all_reduce`.
    """
    # With one replica a part is a tensor, and its device is its destination.
    pairs = [(part, part.device if isinstance(part, tf.Tensor) else part) for part in parts]
    with _scope_of_keys(keys, strategy.experimental_local_results(parts[0])[0]):
        if tells_what_it_reduces(strategy):
            return list(strategy.extended.batch_reduce_described(op, pairs, what))
        if apart:
            return [strategy.extended.batch_reduce_to(op, [pair])[0] for pair in pairs]
        return list(strategy.extended.batch_reduce_to(op, pairs))


def bucket_bytes_of(strategy: tf.distribute.Strategy) -> int:
    """The size of the buckets in which a strategy reduces values; 0 without buckets."""
    return getattr(strategy, _BUCKET_BYTES, 0)


def set_bucket_bytes(strategy: tf.distribute.Strategy, size: int) -> None:
    """Set the size of the buckets in which a strategy reduces values."""
    setattr(strategy, _BUCKET_BYTES, size)


def _scope_of_keys(keys: KeysOfSize | None, value: tf.Tensor) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if keys is None else keys(tf.size(value))


def tells_what_it_reduces(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy's reduction gets a `Reduced` for each value, as of a StrategyTemplate."""
    return hasattr(strategy.extended, "batch_reduce_described")


# 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
SIZES = tuple(sorted({factor << octave for factor in range(1, 8) for octave in range(29)}))

_NUMBERS = 128  # more than there are sizes
_KEYS = 2**31 // _NUMBERS


def padded_to_size(vector: tf.Tensor) -> tf.Tensor:
    """A vector, and after it zeros, so that its length is one of `SIZES`."""
    length = tf.gather(tf.constant(SIZES, tf.int64), _number(tf.size(vector)))
    return tf.pad(vector, [[0, length - tf.size(vector, tf.int64)]])


def key_of_size(key: int | tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """The key (int32) of a collective for one of `SIZES`, computed from TensorFlow's key.

    The key is negative, unlike TensorFlow's keys. No two pairs of key and size share a key until
    TensorFlow has given 2**24 keys, which takes weeks of training.
    """
    return -1 - (key % _KEYS * _NUMBERS + tf.cast(_number(size), tf.int32))


def _number(size: tf.Tensor) -> tf.Tensor:
    sizes = tf.constant(SIZES, tf.int64)
    return tf.searchsorted(sizes, tf.reshape(tf.cast(size, tf.int64), [1]))[0]
