"""Writes checkpoints in a thread, from copies of the state, while the training continues."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace

import keras
import numpy as np

from tfdist_ext.training.checkpoints.format import Content
from tfdist_ext.training.state.values import copy_value

__all__ = ["Writer"]

_WAITS = 1.0  # seconds


class Writer:
    """Writes checkpoints: at once, or in a thread, one after another, from copies of the state.

    With a thread, the training waits only while the state is copied, and while the checkpoint
    before is written.

    Args:
        write: writes a checkpoint, and calls its second argument after each block.
        progress: called after each block that is written while the training waits.
        in_background: use a thread.
    """

    def __init__(
        self,
        write: Callable[[Content, Callable[[], object]], None],
        progress: Callable[[], object],
        *,
        in_background: bool,
    ):
        self._write = write
        self._progress = progress
        self._blocks = 0
        self._running: futures.Future[None] | None = None
        self._buffers: dict[tuple[str, str], np.ndarray] = {}
        self._thread: futures.ThreadPoolExecutor | None = None
        if in_background:
            self._thread = futures.ThreadPoolExecutor(1, "tfdist-checkpoints", _lower_priority)

    def begin(self, content: Content) -> None:
        """Writes a checkpoint; with a thread, returns when the state is copied.

        Raises:
            Exception: the error of the checkpoint before.
        """
        self.wait()
        if self._thread is None:
            self._write(content, self._progress)
        else:
            self._running = self._thread.submit(self._write, self._copied(content), self._wrote)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            Exception: the error of `write`.
        """
        seen = -1
        while (running := self._running) is not None:
            if futures.wait([running], _WAITS).done:
                self._running = None
                return running.result()
            if seen != self._blocks:
                seen = self._blocks
                self._progress()

    def close(self) -> None:
        """Ends the thread, and frees the memory of the copies."""
        if self._thread is not None:
            self._thread.shutdown()
        self._buffers = {}

    def _copied(self, content: Content) -> Content:
        """Returns the content with copies of its values; the copies before are overwritten."""
        groups = {
            group: {name: self._copy((group, name), array) for name, array in arrays.items()}
            for group, arrays in content.groups.items()
        }
        return replace(content, groups=groups)

    def _copy(self, key: tuple[str, str], array: keras.Variable | np.ndarray) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array.copy()
        copy = self._buffers[key] = copy_value(array, self._buffers.get(key))
        return copy

    def _wrote(self) -> None:
        self._blocks += 1


def _lower_priority() -> None:
    """Gives the training precedence; each thread has its own niceness."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
