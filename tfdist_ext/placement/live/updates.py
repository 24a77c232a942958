"""Updates of variables in pieces: each piece on its device, with its rows of the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.placement.live.creating import is_partitioned, pieces_of

__all__ = ["rows_in_range", "updates_by_row", "with_each_piece"]

# The update of a row depends on no other row, so each piece can be updated alone.
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
    """Whether an optimizer can update each piece of a variable alone."""
    return type(getattr(optimizer, "inner_optimizer", optimizer)) in _BY_ROW


def with_each_piece(raw: Any, args: Sequence[Any]) -> Iterator[tuple[int, Any, list[Any]]]:
    """(number, piece, its arguments of an update) for each piece of a raw value.

    A piece gets its rows of a gradient. Other arguments, and variables that are in pieces
    themselves, are passed to all pieces. A plain variable is one piece.
    """

    def part(arg: Any, first: int, end: int) -> Any:
        if isinstance(arg, keras.Variable) or not tf.is_tensor(arg):
            return arg
        # While the step is traced, the shape of a gradient may be unknown. That of a learning rate
        # is known.
        of_all = arg.shape.rank != 0 and arg.shape.is_compatible_with(raw.shape)
        whole = isinstance(arg, tf.IndexedSlices) or of_all
        return rows_in_range(arg, first, end) if whole else arg

    for number, (piece, first, end) in enumerate(pieces_of(raw)):
        mine = [part(arg, first, end) for arg in args] if is_partitioned(raw) else list(args)
        yield number, piece, mine


def rows_in_range(value: Any, first: int, end: int) -> Any:
    """The rows of a gradient from first to before end, as the gradient of a piece."""
    if not isinstance(value, tf.IndexedSlices):
        return value[first:end]
    mine = tf.logical_and(value.indices >= first, value.indices < end)
    return tf.IndexedSlices(
        tf.boolean_mask(value.values, mine),
        tf.boolean_mask(value.indices, mine) - first,
        dense_shape=tf.constant([end - first, *value.values.shape[1:]]),
    )
