"""Runs actions on the chief for all tasks, and sends the chief's values to the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.state.naming import state_of
from tfdist_ext.training.state.values import BLOCK_BYTES, assign_rows, blocks, read_rows

__all__ = [
    "broadcast_arrays",
    "broadcast_state",
    "broadcast_text",
    "broadcast_variables",
    "run_on_chief",
]

_TEXT = 2000  # characters of an error message that the other workers get

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
    words = broadcast_text(reduction, f"{type(failure).__name__}: {failure}"[:_TEXT])
    if failure is not None:
        raise failure
    time.sleep(1)  # the chief's own error is shown first
    raise TrainingError(f"the chief could not {what}. It says: {words}")


def broadcast_text(reduction: Reduction, text: str) -> str:
    """Returns the chief's text; every worker must call."""
    return _broadcast_bytes(reduction, text.encode()).decode(errors="replace")


def broadcast_arrays(
    reduction: Reduction, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the chief's arrays by name; every worker must call."""
    if not reduction.multi_worker:
        return dict(arrays)
    head = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    received = {}
    for name, (dtype, shape) in json.loads(broadcast_text(reduction, json.dumps(head))).items():
        mine = arrays[name].tobytes() if name in arrays else b""
        data = _broadcast_bytes(reduction, mine)
        like = tf.as_dtype(dtype).as_numpy_dtype  # bfloat16, too
        received[name] = np.frombuffer(bytearray(data), like).reshape(shape)
    return received


def broadcast_state(
    model: keras.Model, reduction: Reduction, others: Iterable[tf.Variable] = ()
) -> None:
    """Gives every worker the chief's state, to the bit; every worker must call.

    Args:
        others: variables that need not belong to the model.
    """
    if reduction.multi_worker:
        state = [variable for group in state_of(model).values() for variable in group.values()]
        known = {id(kp.raw_value(variable)) for variable in state}
        broadcast_variables(reduction, [*state, *(v for v in others if id(v) not in known)])


def broadcast_variables(
    reduction: Reduction, variables: Sequence[keras.Variable | tf.Variable]
) -> None:
    """Gives every worker the chief's values, to the bit; every worker must call.

    They are sent in pieces, so that a big model needs little more memory than it has.
    """
    for message in _messages(variables):
        values = [value for _, _, value in message]
        sent = b"".join(value.tobytes() for value in values)
        bits = np.frombuffer(_from_chief(reduction, sent), np.uint8)
        ends = np.cumsum([value.nbytes for value in values])
        parts = np.split(bits, ends[:-1])
        for (variable, start, value), part in zip(message, parts, strict=True):
            assign_rows(variable, start, part.view(value.dtype).reshape(value.shape))


def _broadcast_bytes(reduction: Reduction, data: bytes) -> bytes:
    """Returns the chief's bytes; every worker must call."""
    if not reduction.multi_worker:
        return data
    size = int(reduction.from_chief(len(data)))
    received = bytearray()
    for start in range(0, size, BLOCK_BYTES):
        count = min(size - start, BLOCK_BYTES)
        mine = data[start : start + count] if reduction.is_chief else b""
        received += _from_chief(reduction, mine.ljust(count, b"\0"))
    return bytes(received)


def _from_chief(reduction: Reduction, data: bytes) -> bytes:
    """Returns the chief's bytes; every worker gives the same number of them."""
    words = np.zeros(-(-len(data) // 4), np.int32)  # every collective can sum this dtype
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return reduction.from_chief(words).tobytes()[: len(data)]


def _messages(variables: Sequence[keras.Variable | tf.Variable]) -> Iterator[list[Rows]]:
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
