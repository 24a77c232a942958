"""A training that has stalled: detected by the task itself, which names its phase.

Each task notes its current phase. The limit of a phase follows from the longest phase of its kind
so far, and is at least a multiple of the stall timeout: a trace or a callback may take longer than
a step. Only the ticks of a thread of this process count, because a process that was stopped, or a
laptop that slept, has not waited.

Then all tasks write the stacks of their Python threads to stderr, one sentence names the task and
its phase, and the job ends with a status that means "start me again".
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tfdist_ext.cluster.liveness.reports import say, show_stacks
from tfdist_ext.launch.exit_codes import RESTART, USUAL_STALL_TIMEOUT, stall_timeout

__all__ = [
    "Phases",
    "Progress",
    "end_to_be_restarted",
    "python_in_step",
    "watch",
    "watched_process",
    "who_stalls",
]


FACTOR = 5.0  # times the longest phase of its kind


# Of the stall timeout, at least. To compile takes minutes where a step takes none.
_AT_LEAST = {"starting": 10.0, "compiling": 10.0, "callbacks": 5.0, "checkpoint": 5.0, "steps": 1.0}


_TICK = 1.0
_MARGIN = 15.0  # seconds; the threads of a process on a busy machine come late


class Phases:
    """The phase that a task is in, and how long it may be in it.

    Args:
        timeout: seconds; that of steps, at least.

    Attributes:
        name: of the phase; "" in code that is none of a training's.
        waited: seconds of it that the ticks have counted.
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
        """As the launcher, or whoever started this task, has set it; None: nothing is watched."""
        timeout = stall_timeout(os.environ, usual)
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        return cls(timeout) if timeout and not interactive else None

    def enter(self, name: str, now: float | None = None) -> None:
        """The task is in a phase from now on; again in the same one is progress, too."""
        now = time.monotonic() if now is None else now
        took = now - self._since
        if self.name and took > self.longest.get(self.name, 0.0):
            self.longest[self.name] = took
        self.name, self._since = name, now
        self._number += 1

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Scope of a public call, which may be made in a callback."""
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
        """Let time pass; whether the phase takes too long."""
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


@dataclass(frozen=True)
class Progress:
    """The progress of a task in an execution that takes long.

    Attributes:
        number: of the barrier.
        batches: read so far in this process.
        python: the line of Python that TensorFlow has called, and waits for; "" for none.
    """

    number: int = 0
    batches: int = 0
    python: str = ""


def who_stalls(known: Mapping[str, Progress]) -> tuple[str, str]:
    """(task, description) of the tasks that hold up the others; "" where none stands out.

    A task that has read less than others waits for its data; one in which TensorFlow waits for
    Python waits for that.
    """
    least = min(progress.batches for progress in known.values())
    behind = [task for task, progress in known.items() if progress.batches == least]
    in_python = [task for task in behind if known[task].python]
    causes = in_python or behind
    if len(causes) == len(known):
        each = [f"{task} at {progress.python}" for task, progress in known.items() if in_python]
        at = f", {'; '.join(each)}" if each else ""
        return "", f"all workers have stalled{at}"
    others = f" with {', '.join(causes[1:])}" if causes[1:] else ""
    reading = "" if len(behind) == len(known) else " reading its data"
    at = f", at {known[causes[0]].python}" if in_python else ""
    return causes[0], f"{causes[0]}{others} has stalled{reading}{at}"


def watch(
    me: str,
    phases: Phases,
    suspects: Callable[[], str] = lambda: "",
    tell_others: Callable[[], object] = lambda: None,
    heartbeat: Callable[[float, str], object] = lambda seconds, text: None,
) -> None:
    """End a process that trains alone, or drives parameter servers, when it stalls.

    Args:
        me: this task, for messages; "" where it is no task of a cluster.
        phases: its own; the thread ends when they are gone.
        suspects: names the tasks its steps wait for; "" where it does not know.
        tell_others: makes them show their stacks, too.
        heartbeat: called with the seconds until the next heartbeat at most, and a description of
            the current phase; 0 for no limit. No Python thread runs while TensorFlow holds
            Python's lock.
    """
    watched = weakref.ref(phases)
    del phases

    def look() -> None:
        beating = False
        while (phases := watched()) is not None:
            if phases.name or beating:
                beating = bool(phases.name)
                left = phases.limit - phases.waited + _MARGIN
                heartbeat(left if beating else 0.0, f"{me} has stalled in {phases.name}")
            if phases.tick(_TICK):
                text = f"{me or 'this process'} has stalled: {phases}"
                waits_for = suspects() if phases.name == "steps" else ""
                tell_others()
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


def python_in_step() -> str:
    """The line of Python that TensorFlow runs in a step or a pipeline; "" for none."""
    for identifier, frame in sys._current_frames().items():
        if identifier == threading.get_ident():
            continue
        stack = traceback.extract_stack(frame)
        inside = next(
            (n for n, at in enumerate(stack) if at.filename.endswith(_CALLS_PYTHON)), None
        )
        own = [at for at in stack[inside or 0 :] if "/tensorflow/" not in at.filename]
        if inside is not None and own:
            return f"{own[0].filename}:{own[0].lineno} in {own[0].name}"
    return ""


_CALLS_PYTHON = os.path.join("ops", "script_ops.py")  # py_function, generators


@functools.cache
def watched_process() -> Phases | None:
    """The phases of a process that trains alone, if the launcher asks for a watch."""
    phases = Phases.of_environment(usual=0.0)
    if phases is not None:
        watch("", phases)
    return phases
