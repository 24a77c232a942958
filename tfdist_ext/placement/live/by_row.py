"""Optimizers that update each row of a variable alone."""

from __future__ import annotations

import keras

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


def rows_can_be_owned(
    variable: keras.Variable, optimizer: keras.optimizers.Optimizer | None
) -> bool:
    """Whether several workers may own rows of a variable, instead of one worker all rows.

    A constraint such as `MaxNorm` looks at all rows.
    """
    return variable.constraint is None and (optimizer is None or updates_by_row(optimizer))
