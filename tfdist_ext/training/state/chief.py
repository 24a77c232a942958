"""Runs actions on the chief for all tasks, and sends the chief's values to the others."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.state.naming import state_of
from tfdist_ext.training.state.values import BLOCK_BYTES, assign_rows, blocks, read_rows

__all__ = ["broadcast_bytes", "broadcast_state", "broadcast_variables", "run_on_chief"]

_TEXT = 2000  # bytes of an error message that the other workers get

_Result = TypeVar("_Result")


def run_on_chief(reduction: Reduction, action: Callable[[], _Result], what: str) -> _Result | None:
    """Runs `action` on the chief; every worker must call, and returns when it is done.

    Returns:
        On the chief the result of the action, elsewhere None.

    Raises:
        Exception: what the action raises, on the chief.
        TrainingError: on the others, with the chief's message.
    """
    failure, result = None, None
    if reduction.is_chief:
        try:
            result = action()
        except Exception as error:  # the others must not wait for a chief that has failed
            failure = error
    if not reduction.any_worker(failure is not None):
        return result
    words = broadcast_bytes(reduction, f"{type(failure).__name__}: {failure}".encode()[:_TEXT])
    if failure is not None:
        raise failure
    time.sleep(1)  # the chief's own error is shown first
    raise TrainingError(f"the chief could not {what}. It says: {words.decode(errors='replace')}")


def broadcast_state(
    model: keras.Model, reduction: Reduction, others: Iterable[tf.Variable] = ()
) -> None:
    """Gives every worker the chief's state, to the bit; every worker must call.

    Args:
        others: variables that need not belong to the model.
    """
    if reduction.multi_worker:
        broadcast_variables(reduction, [*state_of(model).values(), *others])


def broadcast_variables(
    reduction: Reduction, variables: Iterable[keras.Variable | tf.Variable]
) -> None:
    """Gives every worker the chief's values, to the bit; every worker must call.

    Small variables are sent together, and large ones in blocks, so that a big model needs little
    more memory than it has.
    """
    different = {id(kp.raw_value(variable)): variable for variable in variables}
    messages: dict[int, list[tuple[keras.Variable | tf.Variable, int, int]]] = {}
    size = 0
    for variable in different.values():
        row_bytes = int(np.prod(tuple(variable.shape)[1:])) * kp.raw_value(variable).dtype.size
        for start, stop in blocks(variable):
            messages.setdefault(size // BLOCK_BYTES, []).append((variable, start, stop))
            size += (stop - start) * row_bytes
    for parts in messages.values():
        before = [read_rows(*part) for part in parts]
        data = b"".join(rows.tobytes() for rows in before)
        received = io.BytesIO(_from_chief(reduction, data, len(data)))
        for (variable, start, _), rows in zip(parts, before, strict=True):
            values = np.frombuffer(received.read(rows.nbytes), rows.dtype)
            assign_rows(variable, start, values.reshape(rows.shape))


def broadcast_bytes(reduction: Reduction, data: bytes) -> bytes:
    """Returns the chief's bytes; every worker must call."""
    size = int(reduction.from_chief(len(data)))
    parts = range(0, size, BLOCK_BYTES)
    return b"".join(
        _from_chief(reduction, data[start : start + BLOCK_BYTES], min(size - start, BLOCK_BYTES))
        for start in parts
    )


def _from_chief(reduction: Reduction, data: bytes, size: int) -> bytes:
    if not size:
        return b""
    words = np.zeros(-(-size // 4), np.int32)  # every collective can sum this dtype
    if reduction.is_chief:
        words.view(np.uint8)[:size] = np.frombuffer(data, np.uint8)
    return reduction.from_chief(words).tobytes()[:size]
