"""SIGTERM to a task that trains: the task ends between two executions, even if it waits for a peer.

A `fit` that writes checkpoints ends at a step that all tasks agree on, so it only notes the signal.
Python runs signal handlers in the main thread, and not while that thread waits in TensorFlow for
another worker. Python also writes the number of each signal to a file descriptor, which another
thread can read meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

from tfdist_ext.launch.exit_codes import GRACE, PREEMPTED, PREEMPTION_SIGNAL

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
        # A launcher that asks for a checkpoint by another signal may have it ignored at the start.
        self._replaceable = {signal.SIGTERM: {signal.SIG_DFL}}
        if name := os.environ.get(PREEMPTION_SIGNAL):
            self._replaceable[signal.Signals[name]] = {signal.SIG_DFL, signal.SIG_IGN}
        self._replaced: dict[signal.Signals, int] = {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        os.register_at_fork(after_in_child=self._restore_handlers)  # as of a data loader

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope in which SIGTERM raises SystemExit(143) in the main thread."""
        if self._replaced or threading.current_thread() is not threading.main_thread():
            yield
            return
        for each, replaceable in self._replaceable.items():
            if (handler := signal.getsignal(each)) in replaceable:
                self._replaced[each] = handler
                signal.signal(each, self._end)
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1 or not self._replaced:  # an event loop reads it
            signal.set_wakeup_fd(before)
        try:
            yield
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        if self._replaced:
            before = signal.set_wakeup_fd(-1)
            if before != self._writer.fileno():
                signal.set_wakeup_fd(before)
        for each, handler in self._replaced.items():
            signal.signal(each, handler)
        self._replaced = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Scope in which the signal is only noted; the caller looks at `received`.

        Raises:
            SystemExit: at the end of the scope, if a signal has come.
        """
        self.received, self.only_noted = None, True
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
            raise SystemExit(PREEMPTED)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, in a thread other than the main one."""
        came = select.select([self._reader], [], [], seconds)[0]
        if came and set(self._replaceable).intersection(self._reader.recv(64)):
            self._note()

    def _end(self, *_: object) -> None:
        self._note()
        if not self.deferred and not self.only_noted:
            raise SystemExit(PREEMPTED)

    def _note(self) -> None:
        self.received = self.received or time.monotonic()


termination_of_process = functools.cache(Termination)
