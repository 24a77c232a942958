"""The whole value of a Keras variable, whatever lies behind it: copies, pieces, a remote server.

A mirrored variable has a copy on each replica, a partitioned one has pieces of its rows on
several parameter servers. Both are read and written in blocks of rows, so that a table that needs
several servers never has to fit into this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.training import _keras_private as kp

__all__ = [
    "BLOCK_BYTES",
    "assign_rows",
    "assign_whole",
    "blocks",
    "blocks_of",
    "read_rows",
    "whole_value",
]

BLOCK_BYTES = 64 * 2**20


def whole_value(variable: Any) -> np.ndarray:
    """The value of a Keras variable: of its first copy here, its pieces put together.

    Where the strategy reads variables in a way of its own, what it reads.
    """
    shape = tuple(variable.shape)
    ranges = list(blocks(variable))
    if len(ranges) == 1:
        return read_rows(variable, *ranges[0]).reshape(shape)
    whole = np.empty(shape, kp.raw_value(variable).dtype.as_numpy_dtype)
    for start, stop in ranges:
        whole[start:stop] = read_rows(variable, start, stop)
    return whole


def assign_whole(variable: Any, value: Any) -> None:
    """Give a Keras variable a value, on every copy here and on every piece.

    Raises:
        ValueError: `value` has another shape.
    """
    value = np.asarray(value)
    if value.shape != tuple(variable.shape):
        raise ValueError(
            f"{variable.path!r} has the shape {tuple(variable.shape)}; a value of shape"
            f" {value.shape} arrived."
        )
    rows = np.atleast_1d(value)
    for start, stop in blocks(variable):
        assign_rows(variable, start, rows[start:stop])


def blocks(variable: Any) -> Iterator[tuple[int, int]]:
    """The ranges of rows in which a Keras variable is read and written: `blocks_of` its value."""
    return blocks_of(tuple(variable.shape), kp.raw_value(variable).dtype.size)


def blocks_of(shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of ranges of rows that are no bigger than BLOCK_BYTES.

    A scalar counts as one row. A range has one row at least, however big it is.
    """
    rows, *rest = shape or (1,)
    row_bytes = int(np.prod(rest, dtype=np.int64)) * item_bytes
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def read_rows(variable: Any, start: int, stop: int) -> np.ndarray:
    """The rows from `start` up to `stop`; of a scalar, an array of one value."""
    raw = kp.raw_value(variable)
    strategy = getattr(raw, "distribute_strategy", None)
    if isinstance(strategy, StrategyTemplate) and strategy.has_own_reading:
        return np.atleast_1d(raw.numpy())[start:stop]
    parts = []
    for first, rows, copies in _pieces(variable):
        low, high = max(start - first, 0), min(stop - first, rows)
        if (low, high) == (0, rows):
            parts.append(np.atleast_1d(copies[0].numpy()))
        elif low < high:
            copy = copies[0]
            # A gather runs where the variable is: only these rows are moved.
            taken = tf.raw_ops.ResourceGather(
                resource=copy.handle, indices=tf.range(low, high), dtype=copy.dtype
            )
            parts.append(taken.numpy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def assign_rows(variable: Any, start: int, values: np.ndarray) -> None:
    """Give the rows from `start` on new values, on every copy here and on every piece."""
    for first, rows, copies in _pieces(variable):
        low, high = max(start - first, 0), min(start + len(values) - first, rows)
        if low >= high:
            continue
        part = tf.constant(values[low + first - start : high + first - start], copies[0].dtype)
        for copy in copies:
            if (low, high) == (0, rows):
                copy.assign(tf.reshape(part, copy.shape))
            else:
                tf.raw_ops.ResourceScatterUpdate(
                    resource=copy.handle, indices=tf.range(low, high), updates=part
                )


def _pieces(variable: Any) -> Iterator[tuple[int, int, Sequence[Any]]]:
    """(first row, rows, the plain variables that are its copies here) of each piece."""
    raw = kp.raw_value(variable)
    first = 0
    for piece in getattr(raw, "variables", [raw]):  # those of a partitioned variable
        rows = piece.shape[0] if piece.shape.rank else 1
        yield first, rows, _copies(piece)
        first += rows


def _copies(piece: Any) -> list[Any]:
    strategy = getattr(piece, "distribute_strategy", None)
    copies = [piece] if strategy is None else strategy.experimental_local_results(piece)
    return [_unwrapped(copy) for copy in copies]


def _unwrapped(variable: Any) -> Any:
    # Central storage and parameter servers wrap their variables to aggregate, or to cache.
    while hasattr(variable, "get"):
        variable = variable.get()
    return variable
