"""Whole numbers that come from a user: checked once, with a message that says which one it was."""

from __future__ import annotations

import operator
from typing import Any

from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

__all__ = ["whole"]


def whole(value: Any, name: str, least: int = 0, most: int | None = None) -> int:
    """The value as a Python integer; 3 and numpy's int64(3) are whole numbers, 3.0 and True not.

    Raises:
        DataError: it is no whole number, or not in [least, most].
    """
    limits = f"from {least}" + (f" to {most}" if most is not None else "")
    refusal = DataError(f"{name} must be a whole number {limits}. Received: {shown(value)}.")
    if isinstance(value, bool):
        raise refusal
    try:
        number = operator.index(value)
    except TypeError:
        raise refusal from None
    if number < least or (most is not None and number > most):
        raise refusal
    return number
