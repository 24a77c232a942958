"""SIGTERM to a task that trains: it ends between two executions, also while it waits for a peer.

A `fit` that writes checkpoints ends at a step that all tasks agree on, so there the signal is only
noted. Python runs a handler of a signal between two bytecodes of the main thread, so not while that
waits in TensorFlow for another worker. The file descriptor to which Python writes the number of
each signal can be read by another thread meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

from tfdist_ext.launch.exit_codes import GRACE, PREEMPTED, PREEMPTION_SIGNAL

STATUS = PREEMPTED


_USUAL_GRACE = 30.0  # seconds from the signal to the kill, by Slurm and Kubernetes


class Termination:
    """Whether SIGTERM has come. A handler of the user's own is left alone.

    Attributes:
        received: the monotonic time at which it came, if it did.
        grace: seconds from then until the process may be killed.
        only_noted: it ends nothing at all: the training does, at a step.
        deferred: it ends nothing until `check` is called. TensorFlow's calls need that: an
            exception that is raised while they raise one of theirs hides both.
    """

    def __init__(self) -> None:
        self.received: float | None = None
        self.deferred = False
        self.only_noted = False
        self.grace = float(os.environ.get(GRACE) or _USUAL_GRACE)
        self._signals = {signal.SIGTERM}
        if name := os.environ.get(PREEMPTION_SIGNAL):
            self._signals.add(signal.Signals[name])
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def close(self) -> None:
        """Give up the sockets; nothing is handled any more."""
        self._reader.close()
        self._writer.close()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope in which SIGTERM raises SystemExit(143) in the main thread."""
        main = threading.current_thread() is threading.main_thread()
        # Whoever asks for saving by another signal may have it ignored until somebody saves.
        free = {signal.SIGTERM: {signal.SIG_DFL}}
        handlers = {each: signal.getsignal(each) for each in self._signals}
        ours = {
            each: handler
            for each, handler in handlers.items()
            if handler in free.get(each, {signal.SIG_DFL, signal.SIG_IGN})
        }
        if not main or not ours:
            yield
            return
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop reads it
            signal.set_wakeup_fd(before)
        for each in ours:
            signal.signal(each, self._end)
        _taken.update(ours)
        try:
            yield
        finally:
            _taken.difference_update(ours)
            for each, handler in ours.items():
                signal.signal(each, handler)
            if before == -1:
                signal.set_wakeup_fd(-1)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Scope in which the signal is only noted; whoever opens it looks at `received`.

        Raises:
            SystemExit: at its end, where one has come that nobody has obeyed.
        """
        self.only_noted = True
        try:
            with self.handled():
                yield
        finally:
            self.only_noted = False
        self.check()

    def check(self, *, failed: bool = False) -> None:
        """Raise the SystemExit that was deferred, or lost, as one raised in a finalizer is.

        Args:
            failed: what the training does cannot succeed any more, also where it is only noted.
        """
        if self.received is not None and (failed or not self.only_noted):
            raise SystemExit(STATUS)

    def wait(self, seconds: float) -> None:
        """Sleep in another thread than the main one, at most until a signal comes."""
        came = select.select([self._reader], [], [], seconds)[0]
        if came and self._signals.intersection(self._reader.recv(64)):
            self._note()

    def _end(self, *_: object) -> None:
        self._note()
        if not self.deferred and not self.only_noted:
            raise SystemExit(STATUS)

    def _note(self) -> None:
        self.received = self.received or time.monotonic()


_taken: set[signal.Signals] = set()  # by this process


def _give_back_in_child() -> None:
    """A process that was forked, as a loader of data is, ends by SIGTERM, and tells nobody."""
    if _taken:
        signal.set_wakeup_fd(-1)
        for each in _taken:
            signal.signal(each, signal.SIG_DFL)
        _taken.clear()


os.register_at_fork(after_in_child=_give_back_in_child)
