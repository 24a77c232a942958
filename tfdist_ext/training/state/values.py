"""Reads and writes whole values of Keras variables, on every strategy.

A mirrored variable has a copy on each replica. A partitioned one has pieces of its rows on several
parameter servers. Both are read and written in blocks of rows, so a table that needs several
servers never has to fit into this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.placement.live.creating import pieces_of
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.training import _keras_private as kp

__all__ = [
    "BLOCK_BYTES",
    "assign_rows",
    "assign_whole",
    "block_ranges",
    "blocks",
    "read_rows",
    "snapshot",
    "whole_value",
]

BLOCK_BYTES = 64 * 2**20


def whole_value(variable: keras.Variable, buffer: np.ndarray | None = None) -> np.ndarray:
    """Returns the value of a variable: its first copy, its pieces joined.

    A strategy with its own way of reading variables reads it.

    Args:
        buffer: memory for the value, if it fits; new memory costs time.
    """
    shape, dtype = tuple(variable.shape), kp.raw_value(variable).dtype.as_numpy_dtype
    if buffer is None or (buffer.shape, buffer.dtype) != (shape, dtype):
        buffer = np.empty(shape, dtype)
    for start, stop in blocks(variable):
        np.atleast_1d(buffer)[start:stop] = read_rows(variable, start, stop)
    return buffer


def assign_whole(variable: keras.Variable, value: npt.ArrayLike) -> None:
    """Assigns a value to every copy and every piece of a variable."""
    rows = np.broadcast_to(value, tuple(variable.shape))
    for start, stop in blocks(variable):
        assign_rows(variable, start, np.atleast_1d(rows)[start:stop])


def snapshot(variables: Iterable[keras.Variable]) -> Callable[[], None]:
    """Returns a function that gives variables the values that they have now."""
    values = [(variable, whole_value(variable)) for variable in variables]

    def restore() -> None:
        for variable, value in values:
            assign_whole(variable, value)

    return restore


def blocks(variable: keras.Variable | tf.Variable) -> Iterator[tuple[int, int]]:
    """Returns the ranges of rows in which a variable is read and written."""
    return block_ranges(tuple(variable.shape), kp.raw_value(variable).dtype.size)


def block_ranges(shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (first row, row after the last) of blocks of at most BLOCK_BYTES.

    A scalar is one row. A block has at least one row, however big that is.
    """
    rows, *rest = shape or (1,)
    row_bytes = int(np.prod(rest, dtype=np.int64)) * item_bytes
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def read_rows(variable: keras.Variable | tf.Variable, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` up to `stop`; of a scalar, an array of one value.

    The rows may be a view of the memory of a tensor. TensorFlow never changes that memory.
    """
    if _has_own_reading(variable):
        return np.atleast_1d(kp.raw_value(variable).numpy())[start:stop]
    parts = []
    for piece, first, end in pieces_of(kp.raw_value(variable)):
        low, high = max(start, first) - first, min(stop, end) - first
        if low >= high:
            continue
        copy = _copies(piece)[0]
        if high - low == end - first or _is_in_this_process(copy):
            value = copy.read_value()
            rows = np.asarray(value) if value.shape.rank else np.atleast_1d(value.numpy())
            parts.append(rows[low:high])
        else:
            # A gather runs where the variable is: only these rows are moved.
            taken = tf.raw_ops.ResourceGather(
                resource=copy.handle, indices=tf.range(low, high), dtype=copy.dtype
            )
            parts.append(taken.numpy())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def assign_rows(variable: keras.Variable | tf.Variable, start: int, values: np.ndarray) -> None:
    """Assigns the rows from `start` on, in every copy and every piece."""
    for piece, first, end in pieces_of(kp.raw_value(variable)):
        low, high = max(start, first), min(start + len(values), end)
        if low >= high:
            continue
        part = tf.constant(values[low - start : high - start], piece.dtype)
        for copy in _copies(piece):
            if high - low == end - first:
                copy.assign(tf.reshape(part, copy.shape))
            else:
                rows = tf.range(low - first, high - first)
                tf.raw_ops.ResourceScatterUpdate(resource=copy.handle, indices=rows, updates=part)


def _has_own_reading(variable: keras.Variable | tf.Variable) -> bool:
    strategy = getattr(kp.raw_value(variable), "distribute_strategy", None)
    return isinstance(strategy, StrategyTemplate) and strategy.has_own_reading


def _is_in_this_process(variable: tf.Variable) -> bool:
    return "CPU" in variable.device and "/job:ps" not in variable.device


def _copies(piece: tf.Variable) -> list[tf.Variable]:
    """Returns the plain variables that are the local copies of a piece."""
    strategy = getattr(piece, "distribute_strategy", None)
    copies = [piece] if strategy is None else strategy.experimental_local_results(piece)
    return [_unwrapped(copy) for copy in copies]


def _unwrapped(variable: tf.Variable) -> tf.Variable:
    # Central storage and parameter servers wrap their variables to aggregate, or to cache.
    while hasattr(variable, "get"):
        variable = variable.get()
    return variable
