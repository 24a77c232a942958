"""Reductions over replicas: what is reduced, values of varying sizes, and buckets.

A `StrategyTemplate` is told what it reduces (`Reduced`), for its `reduce_values` hook.

TensorFlow sums all dense values of a call as one tensor. Buckets cut large gradients and pack small
ones. Several buckets travel beside each other, and a bucket is summed while the gradients of
earlier layers are still computed.

All iterations of a loop in the graph share one collective key, and a key allows only one shape. So
each size needs its own key. Keys must be few: TensorFlow never forgets a key, and asks the first
worker about each new key. Values are padded to one of `SIZES`, four between a number and its
double.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import tensorflow as tf

from tfdist_ext.strategies._tf_private import Value, all_reduce_in_replica

# Makes a scope in which collectives have the keys of a size, one of `SIZES`.
KeysOfSize: TypeAlias = Callable[[tf.Tensor], AbstractContextManager[None]]

ALIGNED = 16  # elements: TensorFlow cuts there without a copy

_SUM = tf.distribute.ReduceOp.SUM
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
    values: Sequence[Value],
    what: Sequence[Reduced],
    keys: KeysOfSize | None = None,
    *,
    apart: bool = False,
) -> list[Value]:
    """The sums of a list over all replicas; tells a StrategyTemplate what the values are.

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
                return [reduce(_SUM, [value], options)[0] for value in values]
            return list(reduce(_SUM, list(values), options))

    def of_all(strategy: tf.distribute.Strategy, *parts: Any) -> Any:
        return reduce_parts(strategy, parts, what, keys, apart=apart)

    return list(context.merge_call(of_all, args=tuple(values)))


def reduce_parts(
    strategy: tf.distribute.Strategy,
    parts: Sequence[Any],
    what: Sequence[Reduced],
    keys: KeysOfSize | None = None,
    *,
    apart: bool = False,
) -> list[Any]:
    """Sums each value on the devices it came from. Call it in cross-replica context.

    Args:
        keys: given with a single value whose size may change from step to step.
        apart: as of `all_reduce`.
    """
    # With one replica a part is a tensor, and its device is its destination.
    pairs = [(part, part.device if isinstance(part, tf.Tensor) else part) for part in parts]
    with _scope_of_keys(keys, strategy.experimental_local_results(parts[0])[0]):
        if tells_what_it_reduces(strategy):
            return list(strategy.extended.batch_reduce_described(_SUM, pairs, what))
        if apart:
            return [strategy.extended.batch_reduce_to(_SUM, [pair])[0] for pair in pairs]
        return list(strategy.extended.batch_reduce_to(_SUM, pairs))


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
