"""A training that has stalled: each task detects this for itself, and names its phase.

The limit of a phase follows from the longest phase of its kind so far, and is at least a multiple
of the stall timeout: a trace or a callback may take longer than a step. A thread counts ticks
instead of reading the clock, because a process that was stopped, or a laptop that slept, has not
waited.

After a stall all tasks write the stacks of their Python threads to stderr, one sentence names the
task and its phase, and the job ends with a status that means "start me again".
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tfdist_ext.cluster.liveness.reports import say, show_stacks
from tfdist_ext.cluster.liveness.sessions import STALLED, Servers
from tfdist_ext.launch.exit_codes import RESTART, USUAL_STALL_TIMEOUT, stall_timeout

FACTOR = 5.0  # times the longest phase of its kind


# The smallest limits, in stall timeouts. Compiling may take minutes where a step takes seconds.
_AT_LEAST = {"starting": 10.0, "compiling": 10.0, "callbacks": 5.0, "checkpoint": 5.0, "steps": 1.0}


_TICK = 1.0


class Phases:
    """The phase that a task is in, and how long it may be in it.

    Args:
        timeout: the smallest limit of steps, in seconds.

    Attributes:
        name: of the phase; "" outside of a training.
        waited: seconds in this phase, counted by ticks.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self.name = ""
        self.waited = 0.0
        self._number = self._ticked = 0  # of the phase; of the one that the last tick saw
        self._since = 0.0
        self.longest: dict[str, float] = {}

    @classmethod
    def of_environment(cls, usual: float = USUAL_STALL_TIMEOUT) -> Phases | None:
        """The phases with the stall timeout of the environment; None: nothing is watched."""
        timeout = stall_timeout(os.environ, usual)
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        return cls(timeout) if timeout and not interactive else None

    def enter(self, name: str, now: float | None = None) -> None:
        """Begin a phase. To begin the same phase again counts as progress."""
        now = time.monotonic() if now is None else now
        took = now - self._since
        if self.name and took > self.longest.get(self.name, 0.0):
            self.longest[self.name] = took
        self.name, self._since = name, now
        self._number += 1

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Scope of a public call, which a callback may make in another call."""
        outer = self.name
        self.enter("starting")
        try:
            yield
        finally:
            self.enter(outer)

    @property
    def limit(self) -> float:
        """Seconds that the phase may take."""
        at_least = _AT_LEAST.get(self.name, math.inf) * self._timeout
        return max(at_least, FACTOR * self.longest.get(self.name, 0.0))

    def tick(self, seconds: float) -> bool:
        """Count more seconds; return whether the phase takes too long."""
        if self._ticked != self._number:
            self._ticked, self.waited = self._number, 0.0
        self.waited += seconds
        return self.waited >= self.limit

    def __str__(self) -> str:
        longest = self.longest.get(self.name, 0.0)
        before = f"the longest before took {longest:.1f} s" if longest else "it is the first"
        return (
            f"{self.waited:.0f} s in {self.name} ({before}; more than {self.limit:.0f} s are no"
            " progress: see --stall-timeout)"
        )


def watch(
    me: str,
    phases: Phases,
    suspects: Callable[[], str] = lambda: "",
    servers: Servers | None = None,
) -> None:
    """End a process that trains alone, or drives parameter servers, when it stalls.

    Args:
        me: this task, for messages; "" where it is no task of a cluster.
        phases: its own; the thread ends when they are gone.
        suspects: names the tasks its steps wait for; "" where it does not know.
        servers: show their stacks, too.
    """
    watched = weakref.ref(phases)
    del phases

    def look() -> None:
        while (phases := watched()) is not None:
            if phases.tick(_TICK):
                text = f"{me or 'this process'} has stalled: {phases}"
                waits_for = suspects() if phases.name == "steps" else ""
                if servers is not None:
                    servers.end(STALLED)
                show_stacks()
                end_to_be_restarted(f"{text}; it waits for {waits_for}" if waits_for else text)
            del phases
            time.sleep(_TICK)

    threading.Thread(target=look, daemon=True, name="tfdist-stalls").start()


def end_to_be_restarted(text: str) -> None:
    """End this process at once; a process that has stalled answers to nothing else."""
    say(f"tfdist: {text}. The job ends, to be started again.")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(RESTART)


@functools.cache
def watched_process() -> Phases | None:
    """The phases of a process that trains alone, if the launcher has set a stall timeout."""
    phases = Phases.of_environment(usual=0.0)
    if phases is not None:
        watch("", phases)
    return phases
