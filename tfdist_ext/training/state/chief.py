"""Runs actions on the chief for all tasks, and sends the chief's values to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

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

# A variable, the first row, and this task's values of the rows.
Rows = tuple[keras.Variable | tf.Variable, int, np.ndarray]


def run_on_chief(reduction: Reduction, action: Callable[[], object], what: str) -> None:
    """Runs `action` on the chief; every worker must call, and returns when it is done.

    Raises:
        Exception: what the action raises, on the chief.
        TrainingError: on the others, with the chief's message.
    """
    failure: Exception | None = None
    if reduction.is_chief:
        try:
            action()
        except Exception as error:  # the others must not wait for a chief that has failed
            failure = error
    if not reduction.any_worker(failure is not None):
        return
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
        state = state_of(model).values()
        known = {id(kp.raw_value(variable)) for variable in state}
        broadcast_variables(reduction, [*state, *(v for v in others if id(v) not in known)])


def broadcast_variables(
    reduction: Reduction, variables: Iterable[keras.Variable | tf.Variable]
) -> None:
    """Gives every worker the chief's values, to the bit; every worker must call.

    They are sent in pieces, so that a big model needs little more memory than it has.
    """
    for message in _messages(variables):
        values = [value for _, _, value in message]
        sent = b"".join(value.tobytes() for value in values)
        bits = np.frombuffer(broadcast_bytes(reduction, sent), np.uint8)
        parts = np.split(bits, np.cumsum([value.nbytes for value in values])[:-1])
        for (variable, start, value), part in zip(message, parts, strict=True):
            assign_rows(variable, start, part.view(value.dtype).reshape(value.shape))


def broadcast_bytes(reduction: Reduction, data: bytes) -> bytes:
    """Returns the chief's bytes; every worker must call."""
    if not reduction.multi_worker:
        return data
    size = int(reduction.from_chief(len(data)))
    received = bytearray()
    for start in range(0, size, BLOCK_BYTES):
        count = min(size - start, BLOCK_BYTES)
        words = np.zeros(-(-count // 4), np.int32)  # every collective can sum this dtype
        if reduction.is_chief:
            words.view(np.uint8)[:count] = np.frombuffer(data, np.uint8, count, start)
        received += reduction.from_chief(words).tobytes()
    return bytes(received[:size])


def _messages(variables: Iterable[keras.Variable | tf.Variable]) -> Iterator[list[Rows]]:
    """Yields the rows of all variables, up to about two blocks at once."""
    message: list[Rows] = []
    for variable in variables:
        for start, stop in blocks(variable):
            message.append((variable, start, read_rows(variable, start, stop)))
            if sum(value.nbytes for _, _, value in message) >= BLOCK_BYTES:
                yield message
                message = []
    if message:
        yield message
