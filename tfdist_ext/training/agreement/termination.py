"""SIGTERM to a task that trains: the task ends between two executions, even if it waits for a peer.

A `fit` that writes checkpoints ends at a step that all tasks agree on, so it only notes the signal.
Python runs signal handlers in the main thread, and not while that thread waits in TensorFlow for
another worker. Python also writes the number of each signal to a file descriptor, which another
thread can read meanwhile.
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
    """Whether SIGTERM has come. A handler that the user has set is not replaced.

    Attributes:
        received: the monotonic time of the signal; None if there was none.
        grace: seconds from the signal until the process may be killed.
        only_noted: the signal raises nothing; the training ends at a later step.
        deferred: the signal raises nothing until `check` is called. An exception that is raised
            while TensorFlow raises one hides both.
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
        """Close the sockets. No signal is handled afterwards."""
        self._reader.close()
        self._writer.close()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope in which SIGTERM raises SystemExit(143) in the main thread."""
        main = threading.current_thread() is threading.main_thread()
        # A launcher that asks for a checkpoint by another signal may have it ignored at the start.
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
        """Scope in which the signal is only noted; the caller looks at `received`.

        Raises:
            SystemExit: at the end of the scope, if a signal has come.
        """
        self.only_noted = True
        try:
            with self.handled():
                yield
        finally:
            self.only_noted = False
        self.check()

    def check(self, *, failed: bool = False) -> None:
        """Raise the SystemExit that was deferred, or lost in a finalizer.

        Args:
            failed: the training cannot continue to a step at which it would end.
        """
        if self.received is not None and (failed or not self.only_noted):
            raise SystemExit(STATUS)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, in a thread other than the main one."""
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
    """Restore the default handlers in a forked process, such as a data loader."""
    if _taken:
        signal.set_wakeup_fd(-1)
        for each in _taken:
            signal.signal(each, signal.SIG_DFL)
        _taken.clear()


os.register_at_fork(after_in_child=_give_back_in_child)
