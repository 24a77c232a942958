"""Rows of a batch, a structure of any kinds of tensors; None where a part of it is left out.

For steps that want static shapes (XLA, TPUs), rows of sample weight 0 fill up the parts that are
short. Weight 0 keeps losses and metrics exact where they are sums of weighted rows over the sum of
the weights, as Keras's are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.data.shards import Remainder, check_remainder
from tfdist_ext.errors import DataError

__all__ = ["batch_size_of", "check_padded", "one_at_least", "padded", "rows_between"]


def batch_size_of(batch: Any) -> tf.Tensor:
    """How many rows there are (int64)."""
    part = next(part for part in tf.nest.flatten(batch) if part is not None)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    return tf.shape(part, out_type=tf.int64)[0]


def rows_between(batch: Any, low: Any, high: Any) -> Any:
    """The rows from low to high, which is not included (int64)."""

    def cut(part: Any) -> Any:
        if not isinstance(part, tf.SparseTensor):
            return None if part is None else part[low:high]
        rest = part.dense_shape[1:]
        start = tf.concat([[low], tf.zeros_like(rest)], axis=0)
        return tf.sparse.slice(part, start, tf.concat([[high - low], rest], axis=0))

    return tf.nest.map_structure(cut, batch)


def check_padded(remainder: Remainder, spec: Any) -> None:
    """
    Raises:
        DataError: no Remainder, or PAD where there is no place for sample weights.
    """
    check_remainder(remainder)
    if remainder is Remainder.PAD and not (isinstance(spec, tuple) and len(spec) in (2, 3)):
        raise DataError(
            "examples must be (x, y) or (x, y, sample_weight) for Remainder.PAD, which marks rows"
            f" by sample weights, got {spec}."
        )


def padded(part: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    """(x, y, sample_weight) of exactly `width` rows, from (x, y) or (x, y, sample_weight).

    The rows that are added are the last real one again, as steps can compute with that; of a part
    without any they are zeros.
    """
    there = tf.shape(tf.nest.flatten(part)[0])[0]
    numbers = tf.minimum(tf.range(width), tf.maximum(there - 1, 0))

    def filled(rows: tf.Tensor) -> tf.Tensor:
        found = tf.gather(tf.concat([rows, _one_of_zeros(rows)], axis=0), numbers)
        return tf.ensure_shape(found, [width, *rows.shape[1:]])

    real = tf.range(width) < there
    x, y, *weights = tf.nest.map_structure(filled, part)
    if not weights:
        return x, y, tf.cast(real, tf.float32)

    def marked(weight: tf.Tensor) -> tf.Tensor:
        weight = tf.cast(weight, tf.float32) if weight.dtype == tf.bool else weight
        shape = [width] + [1] * (weight.shape.rank - 1)
        return weight * tf.reshape(tf.cast(real, weight.dtype), shape)

    return x, y, tf.nest.map_structure(marked, weights[0])


def one_at_least(part: Any, rows: tf.Tensor) -> Any:
    """The part, or one row of zeros where it has none: of what was asked for, all was damaged."""
    return tf.cond(rows > 0, lambda: part, lambda: tf.nest.map_structure(_one_of_zeros, part))


def _one_of_zeros(rows: tf.Tensor) -> tf.Tensor:
    return tf.zeros([1, *tf.unstack(tf.shape(rows)[1:])], rows.dtype)
