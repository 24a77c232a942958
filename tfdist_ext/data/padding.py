"""Parts of one size: rows of sample weight 0 fill up those that are short.

For steps that want static shapes (XLA, TPUs). Weight 0 keeps losses and metrics exact where they
are sums of weighted rows over the weights' sum, as Keras's are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.data.shards import Remainder
from tfdist_ext.errors import DataError

__all__ = ["check_padded", "one_at_least", "padded"]


def check_padded(remainder: Remainder, spec: Any) -> None:
    """
    Raises:
        DataError: no Remainder, or PAD where there is no place for sample weights.
    """
    if not isinstance(remainder, Remainder):
        raise DataError(
            f"remainder must be Remainder.KEEP, Remainder.DROP or Remainder.PAD, got {remainder!r}."
        )
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
