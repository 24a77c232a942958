"""Writes checkpoints in a thread, from copies of the state, while the training continues."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent import futures

import keras
import numpy as np

from tfdist_ext.training.checkpoints.format import Arrays, Progress, encode_checkpoint
from tfdist_ext.training.state.values import copy_value

__all__ = ["Writer"]


class Writer:
    """Writes checkpoints: at once, or in a thread, one after another, from copies of the state.

    With a thread, the training waits only while the state is copied, and while the checkpoint
    before is written.

    Args:
        write: writes a file, from the progress of the training and the bytes of the checkpoint.
        report: called after each block that is written while the training waits.
        in_background: use a thread.
    """

    def __init__(
        self,
        write: Callable[[Progress, Iterable[bytes | memoryview]], None],
        report: Callable[[], object],
        *,
        in_background: bool,
    ):
        self._write = write
        self._report = report
        self._training_waits = False
        self._running: futures.Future[None] | None = None
        self._buffers: dict[str, np.ndarray] = {}
        self._thread: futures.ThreadPoolExecutor | None = None
        if in_background:
            self._thread = futures.ThreadPoolExecutor(1, "tfdist-checkpoints", _lower_priority)

    def begin(self, progress: Progress, arrays: Arrays) -> None:
        """Writes a checkpoint; with a thread, returns when the state is copied.

        Raises:
            Exception: the error of the checkpoint before.
        """
        self.wait()
        if self._thread is None:
            self._write(progress, encode_checkpoint(progress, arrays, self._report))
        else:
            copies = {name: self._copy(name, array) for name, array in arrays.items()}
            blocks = encode_checkpoint(progress, copies, self._wrote)
            self._running = self._thread.submit(self._write, progress, blocks)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            Exception: the error of `write`.
        """
        if self._running is not None:
            self._training_waits = True
            futures.wait([self._running])
            self._training_waits, running, self._running = False, self._running, None
            running.result()

    def close(self) -> None:
        """Ends the thread, and frees the memory of the copies."""
        if self._thread is not None:
            self._thread.shutdown()
        self._buffers = {}

    def _wrote(self) -> None:
        if self._training_waits:
            self._report()

    def _copy(self, name: str, array: keras.Variable | np.ndarray) -> np.ndarray:
        """Returns a copy of a value; the copy of the checkpoint before is overwritten."""
        if isinstance(array, np.ndarray):
            return array.copy()
        copy = self._buffers[name] = copy_value(array, self._buffers.get(name))
        return copy


def _lower_priority() -> None:
    """Gives the training precedence; each thread has its own niceness."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
