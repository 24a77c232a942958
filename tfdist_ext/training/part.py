"""Which part of a global batch the running replica holds.

A replica's step computes on its part what one device would compute on the whole batch. The share
of the part, its rows over those of the global batch, says how much the result counts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies._tf_private import all_reduce
from tfdist_ext.training._tf_private import keys_of_turn
from tfdist_ext.training.step_watch import ReplicaWatch
from tfdist_ext.training.weighted_loss import WeightedLoss

__all__ = ["Part", "current_graph", "outside_of_inner_graphs", "part", "set_part"]

_here = threading.local()  # TensorFlow runs each replica in a thread of its own


class Part:
    """The rows that the running replica holds, as a part of the global batch.

    Args:
        rows: examples of this part, a scalar tensor. A part of 0 rows has read another's row, and
            counts for nothing.
        of: examples of the global batch, over all replicas of all workers.
        replicas: parts of the global batch, over all workers.
        local_replicas: parts on this worker.
        batch: what the replica's step gets, a structure of tensors.
        weighted_loss: of a step whose loss can be weighted; else None.
        turn: the number of the step in a loop in the graph; None where there is no loop.
        watch: of a step whose time is wanted.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        of: tf.Tensor,
        replicas: int,
        local_replicas: int,
        batch: Any,
        weighted_loss: WeightedLoss | None = None,
        turn: tf.Tensor | None = None,
        watch: ReplicaWatch | None = None,
    ):
        self.replicas = replicas
        self.local_replicas = local_replicas
        self._rows = rows
        leaves = tf.nest.flatten(batch)
        self._size = next(leaf.shape[0] for leaf in leaves if leaf is not None)
        self._share = tf.cast(rows, tf.float64) / tf.cast(of, tf.float64)
        self._graph = current_graph()
        self.weighted_loss = weighted_loss
        self._turn = turn
        self.watch = watch

    def share(self, dtype: Any) -> tf.Tensor:
        """Rows over the rows of the global batch."""
        return tf.cast(self._share, dtype)

    def present(self, dtype: Any) -> tf.Tensor:
        """1, or 0 where this replica has no row of its own."""
        return tf.cast(self._rows > 0, dtype)

    def has_rows(self, value: Any) -> bool:
        """Whether a floating tensor has numbers for each row of the part.

        Where the size of the part is not known (nearly always, while a graph is built), it has them
        in a dimension of unknown size; else in a first dimension as long as the part.
        """
        sizes = _sizes(value)
        if None in sizes or self._size is None:
            return None in sizes
        return sizes[:1] == [self._size]

    def may_have_rows(self, value: Any) -> bool:
        """Whether it cannot be told: all numbers of rows may be in one dimension, of known size."""
        sizes = _sizes(value)
        if self.has_rows(value) or self._size is None or not sizes:
            return False
        first = sizes[0]
        return first is not None and first > 0 and first % self._size == 0

    def weighted(self, values: Sequence[Any]) -> list[Any]:
        """Dense values or slices times the share; a part of 0 rows gives 0, never NaN."""
        if self.replicas == 1:
            return list(values)
        return [
            tf.IndexedSlices(self._times_share(value.values), value.indices, value.dense_shape)
            if isinstance(value, tf.IndexedSlices)
            else self._times_share(value)
            for value in values
        ]

    def contribution(self, value: tf.Tensor) -> tf.Tensor:
        """What this replica adds to the mean over all rows; what is no float stays as it is."""
        return self._times_share(value) if value.dtype.is_floating else value

    def mean(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """The mean over all rows of each floating value that is a mean over the part's.

        Other values (seeds, counters) are the same on every replica already.
        """
        floats = [key for key, value in values.items() if value.dtype.is_floating]
        reduced = self.sum_up(self.weighted([values[key] for key in floats]))
        return {**values, **dict(zip(floats, reduced, strict=True))}

    def sum_up(self, values: Sequence[Any]) -> list[Any]:
        """The sum of each value over all replicas. It has no gradient."""
        if not values or self.replicas == 1:
            return list(values)
        self.check_graph()
        slices = [value for value in values if isinstance(value, tf.IndexedSlices)]
        dense = [value for value in values if not isinstance(value, tf.IndexedSlices)]
        keys = contextlib.nullcontext() if self._turn is None else keys_of_turn(self._turn)
        summed = []
        for part, scope in ((slices, keys), (dense, contextlib.nullcontext())):
            with scope:
                all_of = all_reduce(tf.distribute.ReduceOp.SUM, part) if part else []
            summed.append(iter(all_of))
        return [next(summed[not isinstance(value, tf.IndexedSlices)]) for value in values]

    def meeting(self, meet: Callable[[Any], Any], values: Any) -> Any:
        """`meet(values)`, in which this replica waits for the others; noted for who asks."""
        return meet(values) if self.watch is None else self.watch.meeting(meet, values)

    def total(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum of each tensor over all replicas, to be used inside a model.

        Its gradient is that of the loss of the global batch, in which this replica's loss counts
        with its share; to be weighted by the share once more when gradients are summed, if the
        loss is not weighted already.
        """

        @tf.custom_gradient
        def summed(*parts: tf.Tensor) -> Any:
            def gradient(*upstream: tf.Tensor) -> Any:
                if self.weighted_loss is not None and self.weighted_loss.computing:
                    return self.meeting(self.sum_up, upstream)
                reduced = self.meeting(self.sum_up, self.weighted(upstream))
                shares = [self.share(value.dtype) for value in reduced]
                return [
                    tf.math.divide_no_nan(value, share)
                    for value, share in zip(reduced, shares, strict=True)
                ]

            return self.meeting(self.sum_up, [tf.identity(value) for value in parts]), gradient

        return list(summed(*values))

    def check_graph(self) -> None:
        """Raise TrainingError in a graph inside of the step's, where replicas cannot meet."""
        if current_graph() is not self._graph:
            raise TrainingError(
                "a value is summed over replicas inside a tf.function, a cond or a loop of the"
                " step's own, where TensorFlow cannot: an optimizer's apply, a masked loss or a"
                " synchronized BatchNormalization. Call it directly in the body of train_step; the"
                " step is compiled as a whole already."
            )

    def _times_share(self, value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        return tf.math.multiply_no_nan(value, self.share(value.dtype))


def _sizes(value: Any) -> list[int | None]:
    """The static shape of a floating tensor; empty for all else."""
    if not tf.is_tensor(value) or not value.dtype.is_floating or value.shape.rank is None:
        return []
    return value.shape.as_list()


def part() -> Part | None:
    """The part of the replica whose step is running, None outside of one."""
    return getattr(_here, "part", None)


@contextlib.contextmanager
def set_part(value: Part | None) -> Iterator[None]:
    """Scope of a replica's step; with None, a scope in which there is none."""
    before, _here.part = part(), value
    try:
        yield
    finally:
        _here.part = before


def current_graph() -> Any:
    """The graph that is being built, None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def outside_of_inner_graphs(graph: Any) -> Any:
    """Scope in which operations go to the given outer graph, or run at once where it is None."""
    if current_graph() is graph:
        return contextlib.nullcontext()
    return tf.init_scope() if graph is None else graph.as_default()
