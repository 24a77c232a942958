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
    """SIGINT, SIGTERM, SIGHUP and that of a preemption, to this process.

    The first one ends the run, whatever it is at: there is no other start after it. One that comes
    later kills.

    Attributes:
        preemption: the signal that asks the training to save, beside SIGTERM.
        first: the one that came first; None as long as none has.
        tell: called with each that is a new request, in the handler; None while nothing runs.
    """

    def __init__(self, preemption: signal.Signals = signal.SIGTERM) -> None:
        self.preemption = preemption
        self.first: signal.Signals | None = None
        self.tell: Callable[[signal.Signals], None] | None = None
        self._at = 0.0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope in which they are taken; in another thread than the main one it changes nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = {signal.SIGINT, signal.SIGTERM, self.preemption}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: nohup
            wanted.add(signal.SIGHUP)
        before = {number: signal.signal(number, self._came) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: a handler that was not set from Python cannot be given back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def status(self) -> int:
        """The exit status of a run that the first one has ended, as shells give it."""
        assert self.first is not None
        return PREEMPTED if self.first == self.preemption else 128 + self.first

    def _came(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._at = signal.Signals(number), now
        elif number == self.first and now - self._at < _SAME:
            return
        if self.tell is not None:
            self.tell(signal.Signals(number))
