"""Sums over replicas of gradients, with the slices that one device would have.

Optimizers with second moments square the slices of a sparse gradient (`tf.IndexedSlices`) one by
one, so it matters how many there are for a row of a table. Slices of the batch's rows stay apart,
as on one device. What each replica looks up by the same constant indices, as positions, is one
lookup on one device: its slices are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist_ext.training.batch_dependence import BATCH, CONSTANT, BatchDependence

__all__ = ["ToReduce", "finished", "to_reduce"]

_INDICES = 1 << 32  # more than a table has rows


class ToReduce(NamedTuple):
    """What of one gradient is to be summed over replicas, and what makes the gradient of it."""

    values: list[Any]
    finish: Callable[[list[Any]], Any]


def to_reduce(gradient: Any, dependence: BatchDependence) -> ToReduce:
    """Of a replica's dense or sparse gradient, which counts with its share already."""
    if not isinstance(gradient, tf.IndexedSlices):
        return ToReduce([gradient], lambda reduced: reduced[0])
    parts = dependence.parts_of(gradient.indices)
    if len(parts) == 1:
        return _of_one_lookup(gradient, parts[0][1])
    # The lookups of one table, concatenated by TensorFlow.
    sizes = tf.stack([tf.size(indices) for indices, _ in parts])
    values = tf.split(gradient.values, sizes, num=len(parts))
    indices = tf.split(gradient.indices, sizes, num=len(parts))
    lookups = [
        _of_one_lookup(tf.IndexedSlices(v, i, gradient.dense_shape), kind)
        for v, i, (_, kind) in zip(values, indices, parts, strict=True)
    ]
    return ToReduce(
        [value for lookup in lookups for value in lookup.values],
        lambda reduced: _together(finished(lookups, reduced)),
    )


def finished(gradients: Sequence[ToReduce], reduced: Iterable[Any]) -> list[Any]:
    """The gradients, of all their `values` in order, each reduced."""
    rest = iter(reduced)
    return [each.finish([next(rest) for _ in each.values]) for each in gradients]


def _of_one_lookup(slices: tf.IndexedSlices, kind: str) -> ToReduce:
    if kind == BATCH:
        return ToReduce([slices], lambda reduced: reduced[0])
    if kind == CONSTANT:
        # An index may be there several times, and a sequence be longer on another worker.
        places = tf.range(tf.size(slices.indices, tf.int64))
        places = tf.IndexedSlices(places, slices.indices, slices.dense_shape[:1])
        return ToReduce([slices, places], lambda reduced: _summed(*reduced))
    return ToReduce([slices], lambda reduced: _summed(reduced[0]))


def _summed(slices: Any, places: Any = None) -> Any:
    """One slice for each index, or for each pair of index and place."""
    if not isinstance(slices, tf.IndexedSlices):
        return slices  # a strategy of the user's has made it dense
    keys = tf.cast(slices.indices, tf.int64)
    if places is not None:
        keys += places.values * _INDICES
    keys, number = tf.unique(keys, tf.int64)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(slices.values, number, tf.size(keys)),
        tf.cast(keys % _INDICES, slices.indices.dtype),
        slices.dense_shape,
    )


def _together(lookups: list[Any]) -> Any:
    if not all(isinstance(slices, tf.IndexedSlices) for slices in lookups):
        return tf.add_n([tf.convert_to_tensor(slices) for slices in lookups])
    return tf.IndexedSlices(
        tf.concat([slices.values for slices in lookups], 0),
        tf.concat([slices.indices for slices in lookups], 0),
        lookups[0].dense_shape,
    )
