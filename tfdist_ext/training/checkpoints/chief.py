"""What the chief does for all: write and read files, and give its state to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.checkpoints.file import BLOCK_BYTES, assign_rows, blocks, read_rows
from tfdist_ext.training.checkpoints.state import state_of
from tfdist_ext.training.protocols import Reduction

__all__ = ["broadcast_state", "broadcast_text", "run_on_chief"]


_TEXT = 2000  # bytes of an error message that travel to the other workers


Rows = tuple[Any, int, np.ndarray]  # a Keras variable, the first row, the rows' values here


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
    words = broadcast_text(reduction, f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    time.sleep(1)  # the chief's own error is the one to be seen first
    raise TrainingError(f"the chief could not {what}. It says: {words}")


def broadcast_text(reduction: Reduction, text: str) -> str:
    """The chief's text, of its first 2000 bytes, on every worker; every worker must call."""
    letters = np.zeros(_TEXT, np.int32)
    said = text.encode()[:_TEXT]
    letters[: len(said)] = list(said)
    letters = reduction.from_chief(letters)
    return bytes(letters[letters > 0].astype(np.uint8)).decode(errors="replace")


def broadcast_state(model: keras.Model, reduction: Reduction) -> None:
    """Give every worker the chief's state, to the bit; every worker must call.

    It travels in pieces, so that big models need little more memory than they have.
    """
    if not reduction.multi_worker:
        return
    variables = [variable for group in state_of(model).values() for variable in group.values()]
    for message in _messages(variables):
        values = [value for _, _, value in message]
        bits = np.concatenate([np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in values])
        words = np.zeros(-(-bits.size // 4), np.int32)  # a dtype that every collective can sum
        words.view(np.uint8)[: bits.size] = bits
        bits = reduction.from_chief(words).view(np.uint8)
        ends = np.cumsum([value.nbytes for value in values])
        parts = np.split(bits[: ends[-1]], ends[:-1])
        for (variable, start, value), part in zip(message, parts, strict=True):
            assign_rows(variable, start, part.view(value.dtype).reshape(value.shape))


def _messages(variables: list[Any]) -> Iterator[list[Rows]]:
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
