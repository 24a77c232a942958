"""Sums over all replicas, inside the step of one replica.

Slices of sparse gradients (`tf.IndexedSlices`) may be summed; see `rows.with_slots`. Between
workers, a value whose size may differ from step to step is padded; see `strategies/reductions.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies.reductions import (
    OTHER,
    STATISTIC,
    Kind,
    Reduced,
    from_vectors,
    in_one_vector,
    key_of_size,
    padded,
    padded_to_size,
)
from tfdist_ext.strategies.traced_replica import replica_number, sum_up
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import gathered_values
from tfdist_ext.training.steps.replaced import not_called, substitutes
from tfdist_ext.training.steps.rows import EqualTensors, Gradient, merged, with_slots
from tfdist_ext.training.steps.step_timer import ReplicaTimer

__all__ = ["ReplicaSums", "current_graph", "outside_of_inner_graphs", "reduced_for"]


_Values = TypeVar("_Values")
_Result = TypeVar("_Result")


@dataclass(eq=False)
class ReplicaSums:
    """Sums of the running replica's values over all replicas.

    Args:
        replicas: number of replicas on all workers.
        graph: the graph of the step; None in eager code.
        equal: learns that a sum is equal on all replicas.
        between_workers: TensorFlow's collectives sum over workers.
        called: keys of the replaced functions that were called.
        timer: learns when the replica waits for the others.
    """

    replicas: int
    graph: tf.Graph | None
    equal: EqualTensors
    between_workers: bool
    called: set[str]
    timer: ReplicaTimer | None

    def check_graph(self) -> None:
        """Raise TrainingError in a graph inside the step's graph, where replicas cannot wait."""
        if current_graph() is not self.graph:
            raise TrainingError(
                "a sum over replicas must be directly in the body of train_step or call, got one"
                " inside a tf.function, a cond or a loop of the step's own: an optimizer's apply, a"
                " masked loss, a synchronized BatchNormalization or tfd.all_rows. The step is"
                " compiled as a whole already."
            )

    def synchronize(self, function: Callable[[_Values], _Result], values: _Values) -> _Result:
        """Returns `function(values)`, in which this replica waits for the others."""
        if self.timer is None:
            return function(values)
        return self.timer.synchronize(function, values)

    def all_reduce(
        self, values: Sequence[Gradient], what: Sequence[Reduced] | None = None
    ) -> list[Gradient]:
        """Returns the sum of each value over all replicas. It has no gradient.

        Args:
            what: what each value is, for a StrategyTemplate. The default is statistics.
        """
        if not values or self.replicas == 1:
            return list(values)
        self.check_graph()
        what = [STATISTIC] * len(values) if what is None else what
        for value, each in zip(values, what, strict=True):
            _set_shape(value, each)
        parts, numbers = with_slots(values, self.equal)
        what = [*what, *[OTHER] * len(numbers)]
        summed = merged(self.synchronize(lambda mine: self._sums(mine, what), parts), numbers)
        self.equal.add(summed)
        return summed

    def of_replicas(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the numbers (int64, a vector) of each replica, one row per replica."""
        mine = tf.one_hot(replica_number(), self.replicas, dtype=tf.int64)[:, tf.newaxis] * numbers
        return self.all_reduce([mine], [OTHER])[0]

    def _sums(self, values: Sequence[Gradient], what: Sequence[Reduced]) -> list[Gradient]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, value in enumerate(values):
            groups.setdefault(self._group(value), []).append(number)
        summed: list[Gradient] = [None] * len(values)
        for (sum_of, *_), numbers in groups.items():
            totals = sum_of([values[i] for i in numbers], [what[i] for i in numbers])
            for number, total in zip(numbers, totals, strict=True):
                summed[number] = total
        return summed

    def _group(self, value: Gradient) -> tuple[Any, ...]:
        """Returns the function that sums a value, and what is alike in its arguments."""
        is_sparse = isinstance(value, tf.IndexedSlices)
        has_known_shape = is_sparse or value.shape.is_fully_defined()
        if self.between_workers and self.graph is not None:
            if is_sparse:
                return self._sum_of_slices, value.dtype.name
            if not has_known_shape:
                return self._sum_of_elements, value.dtype.name
        return sum_up, is_sparse, has_known_shape

    def _sum_of_elements(
        self, values: Sequence[tf.Tensor], what: Sequence[Reduced]
    ) -> list[tf.Tensor]:
        """Sums dense tensors of one dtype; each has one shape on all workers."""
        sizes = [tf.size(value) for value in values]
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
        (total,) = sum_up([padded_to_size(flat)], what[:1], self.keys_of_size)
        pieces = tf.split(total[: tf.size(flat)], tf.stack(sizes), num=len(values))
        return [
            tf.ensure_shape(tf.reshape(piece, tf.shape(value)), value.shape)
            for piece, value in zip(pieces, values, strict=True)
        ]

    def _sum_of_slices(
        self, values: Sequence[tf.IndexedSlices], what: Sequence[Reduced]
    ) -> list[tf.IndexedSlices]:
        """Gathers the slices of all replicas, for all tables of one dtype in one collective."""
        counts = tf.stack([tf.size(value.indices, tf.int64) for value in values])
        most = tf.unstack(tf.reduce_max(self.of_replicas(counts), axis=0), len(values))
        alike = [padded(slices, number) for slices, number in zip(values, most, strict=True)]
        # `keys_of_size` makes a gathering of the reduction of slices.
        vector = tf.IndexedSlices(padded_to_size(in_one_vector(alike)), tf.zeros([1], tf.int64))
        (gathered,) = sum_up([vector], what[:1], self.keys_of_size)
        return from_vectors(gathered.values, self.replicas, alike)

    @contextlib.contextmanager
    def keys_of_size(self, size: tf.Tensor) -> Iterator[None]:
        """Scope in which collectives have the keys of a size, and slices are gathered."""

        def key(original: Callable[..., int], launcher: object) -> tf.Tensor:
            return key_of_size(original(launcher), size)

        with substitutes({"collective_key": key, "reduce_slices": gathered_values}, self.called):
            yield
        if "collective_key" not in self.called:
            raise not_called("collective_key")


def _set_shape(value: Gradient, what: Reduced) -> None:
    """Set the shape of a dense gradient, which TensorFlow loses where rows are summed.

    Tensors of known shapes are summed together, in one collective.
    """
    if what.kind != "gradient" or what.variable is None or isinstance(value, tf.IndexedSlices):
        return
    if value.shape.is_compatible_with(what.variable.shape):
        value.set_shape(what.variable.shape)


def reduced_for(kind: Kind, variable: keras.Variable | tf.Variable) -> Reduced:
    """Returns what a value of this kind for a variable is."""
    path = getattr(variable, "path", "")
    raw = kp.raw_value(variable) if isinstance(variable, keras.Variable) else variable
    return Reduced(kind=kind, variable=raw, path=path or raw.name.removesuffix(":0"))


def current_graph() -> tf.Graph | None:
    """Returns the graph that is being built, None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def outside_of_inner_graphs(graph: tf.Graph | None) -> contextlib.AbstractContextManager[Any]:
    """Scope in which operations go to the given outer graph, or run at once where it is None."""
    if current_graph() is graph:
        return contextlib.nullcontext()
    return tf.init_scope() if graph is None else graph.as_default()
