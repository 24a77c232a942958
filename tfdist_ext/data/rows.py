"""Rows of a batch, whatever kind of tensor it is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["rows_between", "rows_in"]


def rows_in(part: Any) -> tf.Tensor:
    """How many there are (int64)."""
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    return tf.shape(part, out_type=tf.int64)[0]


def rows_between(part: Any, low: Any, high: Any) -> Any:
    """Those from low to high, which is not included (int64)."""
    if not isinstance(part, tf.SparseTensor):
        return part[low:high]
    rest = part.dense_shape[1:]
    start = tf.concat([[low], tf.zeros_like(rest)], axis=0)
    return tf.sparse.slice(part, start, tf.concat([[high - low], rest], axis=0))
