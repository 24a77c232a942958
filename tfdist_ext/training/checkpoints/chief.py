"""What the chief does for all: write and read files, and give its state to the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.checkpoints.file import BLOCK_BYTES, assign_rows, blocks, read_rows
from tfdist_ext.training.checkpoints.state import state_of
from tfdist_ext.training.protocols import Reduction

__all__ = [
    "broadcast_arrays",
    "broadcast_state",
    "broadcast_text",
    "broadcast_variables",
    "run_on_chief",
]


_TEXT = 2000  # characters of an error message that travel to the other workers


# A variable, the first row, the rows' values here.
Rows = tuple[keras.Variable | tf.Variable, int, np.ndarray]


def run_on_chief(reduction: Reduction, action: Callable[[], object], what: str) -> None:
    """Run `action` on the chief; every worker must call, and returns when it is done.

    Raises:
        Exception: what the action raises, on the chief.
        TrainingError: on the others, with the chief's words.
    """
    failure: Exception | None = None
    if reduction.is_chief:
        try:
            action()
        except Exception as error:  # the others must not wait for what never comes
            failure = error
    if not reduction.any_worker(failure is not None):
        return
    words = broadcast_text(reduction, f"{type(failure).__name__}: {failure}"[:_TEXT])
    if failure is not None:
        raise failure
    time.sleep(1)  # the chief's own error is the one to be seen first
    raise TrainingError(f"the chief could not {what}. It says: {words}")


def broadcast_text(reduction: Reduction, text: str) -> str:
    """The chief's text, on every worker; every worker must call."""
    return broadcast_bytes(reduction, text.encode()).decode(errors="replace")


def broadcast_arrays(
    reduction: Reduction, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The chief's arrays by name, on every worker; every worker must call."""
    if not reduction.multi_worker:
        return dict(arrays)
    head = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    received = {}
    for name, (dtype, shape) in json.loads(broadcast_text(reduction, json.dumps(head))).items():
        mine = arrays[name].tobytes() if name in arrays else b""
        data = broadcast_bytes(reduction, mine)
        like = tf.as_dtype(dtype).as_numpy_dtype  # bfloat16, too
        received[name] = np.frombuffer(bytearray(data), like).reshape(shape)
    return received


def broadcast_bytes(reduction: Reduction, data: bytes) -> bytes:
    """The chief's bytes, on every worker; every worker must call."""
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
    """The chief's bytes, of as many on every worker."""
    words = np.zeros(-(-len(data) // 4), np.int32)  # a dtype that every collective can sum
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return reduction.from_chief(words).tobytes()[: len(data)]


def broadcast_state(
    model: keras.Model, reduction: Reduction, others: Iterable[tf.Variable] = ()
) -> None:
    """Give every worker the chief's state, to the bit; every worker must call.

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
    """Give every worker the chief's values, to the bit; every worker must call.

    They travel in pieces, so that big models need little more memory than they have.
    """
    for message in _messages(variables):
        values = [value for _, _, value in message]
        sent = b"".join(value.tobytes() for value in values)
        bits = np.frombuffer(_from_chief(reduction, sent), np.uint8)
        ends = np.cumsum([value.nbytes for value in values])
        parts = np.split(bits, ends[:-1])
        for (variable, start, value), part in zip(message, parts, strict=True):
            assign_rows(variable, start, part.view(value.dtype).reshape(value.shape))


def _messages(variables: Sequence[keras.Variable | tf.Variable]) -> Iterator[list[Rows]]:
    """The rows of all variables, small variables together, up to about two blocks at once."""
    message: list[Rows] = []
    for variable in variables:
        for start, stop in blocks(variable):
            message.append((variable, start, read_rows(variable, start, stop)))
            if sum(value.nbytes for _, _, value in message) >= BLOCK_BYTES:
                yield message
                message = []
    if message:
        yield message
