"""What the launcher and its tasks agree on: exit statuses, environment variables, and signals.

The statuses are conventions of others. As in Kubeflow, a task with a status from 128 may be started
again. TensorFlow's PreemptionCheckpointHandler exits with 143, the status after SIGTERM.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

DONE = 0
FAILED = 1  # permanent, as all statuses up to 127: the next start would fail again
RESTART = 138  # 128 + SIGUSR1: "start me again"
PREEMPTED = 143  # 128 + SIGTERM: "start me again, and do not count it"

# Seconds within which a repeated signal is the same request: timeout(1) sends two.
_SAME = 1.0

# In the environment of tasks.
PREEMPTION_SIGNAL = "TFDIST_PREEMPTION_SIGNAL"  # the name of a signal like SIGTERM
STALL_TIMEOUT = "TFDIST_STALL_TIMEOUT"  # seconds without progress that end a task; 0: never
USUAL_STALL_TIMEOUT = 60.0
COMMAND = "TFDIST_COMMAND"  # the line that started the launcher
STARTS_AGAIN = "TFDIST_STARTS_AGAIN"  # "1": the launcher starts tasks again that fail


def stall_timeout(env: Mapping[str, str], usual: float = USUAL_STALL_TIMEOUT) -> float:
    """The stall timeout in this environment, in seconds; 0: nothing is watched."""
    try:
        timeout = float(env.get(STALL_TIMEOUT, usual))
    except ValueError:
        timeout = usual
    return timeout if 0 < timeout < math.inf else 0.0


def is_started_again() -> bool:
    """Whether the launcher restarts this task after a failure, or says why it does not."""
    return bool(os.environ.get(STARTS_AGAIN))


def is_launched() -> bool:
    """Whether a launcher has started this process."""
    return COMMAND in os.environ


def command_line() -> str | None:
    """The command line of the launcher, or of this process where no launcher started it.

    None in an interactive session.
    """
    if line := os.environ.get(COMMAND):
        return line
    if hasattr(sys, "ps1") or not sys.argv[0]:
        return None
    return shlex.join(sys.orig_argv)


@contextlib.contextmanager
def signals_to(
    handler: Callable[[int, Any], object] | signal.Handlers, numbers: Iterable[int]
) -> Iterator[bool]:
    """Scope with a handler of signals, in the main thread alone; yields whether it is set."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield bool(before)
    finally:
        for number, previous in before.items():
            # None: a handler that was not set from Python cannot be given back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


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
        wanted = {signal.SIGINT, signal.SIGTERM, self.preemption}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: nohup
            wanted.add(signal.SIGHUP)
        # If SIGCHLD is ignored, the system forgets how a process has ended, and waitid fails.
        is_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        with (
            signals_to(self._handle, wanted),
            signals_to(signal.SIG_DFL, [signal.SIGCHLD] if is_ignored else []),
        ):
            yield

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
