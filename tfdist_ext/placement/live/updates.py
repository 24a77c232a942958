"""Updates of variables in pieces: each piece where it is, with its rows of the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.placement.live.creating import is_partitioned, pieces_of

__all__ = ["rows_in_range", "updates_by_row", "with_each_piece"]

# Their update of a row depends on no other row, so each piece can be updated by itself.
_BY_ROW = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


def updates_by_row(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer can update each piece of a variable by itself."""
    return type(getattr(optimizer, "inner_optimizer", optimizer)) in _BY_ROW


def with_each_piece(raw: Any, args: Sequence[Any]) -> Iterator[tuple[int, Any, list[Any]]]:
    """(number, piece, its part of an update's arguments) of a raw value; a plain one is one piece.

    Of a gradient a piece gets its rows. Other arguments, and variables with pieces of their own,
    are for all.
    """

    def part(arg: Any, first: int, end: int) -> Any:
        if isinstance(arg, keras.Variable) or not tf.is_tensor(arg):
            return arg
        # A gradient's shape may not be known while the step is traced; a learning rate's is.
        of_all = arg.shape.rank != 0 and arg.shape.is_compatible_with(raw.shape)
        whole = isinstance(arg, tf.IndexedSlices) or of_all
        return rows_in_range(arg, first, end) if whole else arg

    for number, (piece, first, end) in enumerate(pieces_of(raw)):
        mine = [part(arg, first, end) for arg in args] if is_partitioned(raw) else list(args)
        yield number, piece, mine


def rows_in_range(value: Any, first: int, end: int) -> Any:
    """A gradient's rows first to end, as the gradient of the piece that has them."""
    if not isinstance(value, tf.IndexedSlices):
        return value[first:end]
    mine = tf.logical_and(value.indices >= first, value.indices < end)
    return tf.IndexedSlices(
        tf.boolean_mask(value.values, mine),
        tf.boolean_mask(value.indices, mine) - first,
        dense_shape=tf.constant([end - first, *value.values.shape[1:]]),
    )
