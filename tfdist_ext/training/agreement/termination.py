"""SIGTERM to a worker that trains: it ends between two executions, also while it waits for a peer.

Python runs a handler of a signal between two bytecodes of the main thread, so not while that
waits in TensorFlow for another worker. The file descriptor to which Python writes the number of
each signal can be read by another thread meanwhile.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

__all__ = ["STATUS", "Termination"]


STATUS = 128 + signal.SIGTERM


class Termination:
    """Whether SIGTERM has come. A handler of the user's own is left alone.

    Attributes:
        received: the monotonic time at which it came, if it did.
        deferred: it ends nothing until `check` is called. TensorFlow's calls need that: an
            exception that is raised while they raise one of theirs hides both.
    """

    def __init__(self) -> None:
        self.received: float | None = None
        self.deferred = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope in which SIGTERM raises SystemExit(143) in the main thread."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop reads it
            signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, self._end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if before == -1:
                signal.set_wakeup_fd(-1)

    def check(self) -> None:
        """Raise the SystemExit that was deferred, or lost, as one raised in a finalizer is."""
        if self.received is not None:
            raise SystemExit(STATUS)

    def wait(self, seconds: float) -> None:
        """Sleep in another thread than the main one, at most until a signal comes."""
        came = select.select([self._reader], [], [], seconds)[0]
        if came and signal.SIGTERM in self._reader.recv(64):
            self._note()

    def _end(self, *_: object) -> None:
        self._note()
        if not self.deferred:
            raise SystemExit(STATUS)

    def _note(self) -> None:
        self.received = self.received or time.monotonic()
