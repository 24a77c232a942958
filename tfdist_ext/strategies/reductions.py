"""The description of a reduction, for the `reduce_values` hook of a StrategyTemplate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from tfdist_ext.strategies import _tf_private
from tfdist_ext.strategies.collective_sizes import Padding, padded, size_at_least

__all__ = [
    "METRIC",
    "OTHER",
    "STATISTIC",
    "Reduced",
    "all_reduce",
    "batch_reduce_to",
    "reduce_parts",
    "tells_what_it_reduces",
]

Kind = Literal["gradient", "metric", "statistic", "assignment", "other"]


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The values that `reduce_values` reduces.

    Attributes:
        kind: "gradient": of `variable`, on the way to an optimizer;
            "metric": the state of a Keras metric, or a value that a step returned for the logs;
            "statistic": moments of a synchronized BatchNormalization, weights of a loss, a moving
            average that a layer wrote (then `variable` is what it wrote to);
            "assignment": a value that replicas assign to `variable`, to be aggregated;
            "other": what your own code reduces (`all_reduce`, `reduce`, `tfd.all_rows`).
        variable: the strategy's variable, as `update_variable` gets it; or None.
        path: Keras's path of the variable, or its name; "" without a variable.
    """

    kind: Kind
    variable: tf.Variable | None = None
    path: str = ""


METRIC = Reduced(kind="metric")
STATISTIC = Reduced(kind="statistic")
OTHER = Reduced(kind="other")


def all_reduce(
    op: tf.distribute.ReduceOp,
    values: Sequence[_tf_private.Value],
    what: Sequence[Reduced],
    padding: Padding | None = None,
) -> Sequence[_tf_private.Value]:
    """`ReplicaContext.all_reduce` of a list, which tells a StrategyTemplate what the values are.

    It has no gradient.

    Args:
        padding: of a single vector.
    """
    context = tf.distribute.get_replica_context()
    if reduce := _tf_private.all_reduce_in_replica(context.strategy.extended):
        options = tf.distribute.experimental.CommunicationOptions()
        if padding is None:
            return list(reduce(op, list(values), options))
        size = size_at_least(tf.size(values[0], tf.int64))
        with padding.keys(size):
            return [_vector(reduce(op, [_sent(values[0], size, padding)], options)[0])]

    def of_all(strategy: tf.distribute.Strategy, *parts: Any) -> Any:
        return reduce_parts(strategy, op, parts, what, padding)

    return list(context.merge_call(of_all, args=tuple(values)))


def reduce_parts(
    strategy: tf.distribute.Strategy,
    op: tf.distribute.ReduceOp,
    parts: Sequence[Any],
    what: Sequence[Reduced],
    padding: Padding | None = None,
) -> list[Any]:
    """Values per replica, each reduced to where it came from; in cross-replica context.

    Args:
        padding: of a single vector.
    """
    if padding is None:
        return batch_reduce_to(strategy, op, _to_their_places(parts), what)
    vectors = strategy.experimental_local_results(parts[0])
    size = size_at_least(tf.size(vectors[0], tf.int64))
    sent = _on_each(lambda vector: _sent(vector, size, padding), vectors)
    with padding.keys(size):
        (reduced,) = batch_reduce_to(strategy, op, _to_their_places([sent]), what)
    return [_on_each(_vector, strategy.experimental_local_results(reduced))]


def _sent(vector: tf.Tensor, size: tf.Tensor, padding: Padding) -> _tf_private.Value:
    """The padded vector; where it is to be gathered, as the values of a `tf.IndexedSlices`."""
    vector = padded(vector, size)
    return tf.IndexedSlices(vector, tf.zeros([1], tf.int64)) if padding.gathers else vector


def _vector(reduced: _tf_private.Value) -> tf.Tensor:
    return reduced.values if isinstance(reduced, tf.IndexedSlices) else reduced


def _on_each(function: Callable[[Any], tf.Tensor], values: Sequence[Any]) -> Any:
    """Values of this worker's replicas, each made where its own is."""
    made = []
    for value in values:
        with tf.device(_vector(value).device):
            made.append(function(value))
    return made[0] if len(made) == 1 else _tf_private.per_replica(made)


def _to_their_places(parts: Sequence[Any]) -> list[tuple[Any, Any]]:
    # With one replica a part is a tensor, and its destination is told by its device.
    return [(part, part.device if isinstance(part, tf.Tensor) else part) for part in parts]


def tells_what_it_reduces(strategy: tf.distribute.Strategy) -> bool:
    """Whether it is a StrategyTemplate: its hook is told what each value is."""
    return hasattr(strategy.extended, "batch_reduce_described")


def batch_reduce_to(
    strategy: tf.distribute.Strategy,
    op: tf.distribute.ReduceOp,
    pairs: Sequence[tuple[Any, Any]],
    what: Sequence[Reduced],
) -> list[Any]:
    """`extended.batch_reduce_to`, which tells a StrategyTemplate what the values are."""
    if tells_what_it_reduces(strategy):
        return list(strategy.extended.batch_reduce_described(op, pairs, what))
    return list(strategy.extended.batch_reduce_to(op, pairs))
