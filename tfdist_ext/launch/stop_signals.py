"""The signals that end a run, from its first start to the end of its last one."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tfdist_ext.launch.exit_codes import PREEMPTED

__all__ = ["StopSignals"]

# Seconds in which the same signal again is the same request: timeout(1) sends two.
_SAME = 1.0


class StopSignals:
    """SIGINT, SIGTERM, SIGHUP and the preemption signal, sent to this process.

    The first signal ends the run, and no other start follows. A later signal kills the tasks.

    Attributes:
        preemption: the signal that asks the training to save, beside SIGTERM.
        first: the signal that came first; None before that.
        notify: called in the handler with each signal that is a new request; None while nothing
            runs.
    """

    def __init__(self, preemption: signal.Signals = signal.SIGTERM) -> None:
        self.preemption = preemption
        self.first: signal.Signals | None = None
        self.notify: Callable[[signal.Signals], None] | None = None
        self._at = 0.0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope in which the signals are handled; outside of the main thread it changes nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = {signal.SIGINT, signal.SIGTERM, self.preemption}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: nohup
            wanted.add(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: a handler that was not set from Python cannot be given back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def status(self) -> int:
        """The exit status of a run that the first signal has ended, as shells give it."""
        assert self.first is not None
        return PREEMPTED if self.first == self.preemption else 128 + self.first

    def _handle(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._at = signal.Signals(number), now
        elif number == self.first and now - self._at < _SAME:
            return
        if self.notify is not None:
            self.notify(signal.Signals(number))
