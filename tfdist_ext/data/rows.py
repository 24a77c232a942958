"""Rows of a batch, a structure of any kinds of tensors; None where a part of it is left out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["batch_size_of", "rows_between"]


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
