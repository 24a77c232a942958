"""A training that stands still: noticed by the task itself, with the phase in which it does.

Each task notes the phase that it is in. How long a phase may take is learned from the longest one
of its kind so far, and is at least a multiple of the stall timeout: a trace or a callback may take
longer than a step. A process that was stopped, or a laptop that slept, has not waited: only the
ticks of a thread of this process count.

What happens then is the same everywhere: all tasks write the stacks of their Python threads to
stderr, one sentence names the task and its phase, and the job ends with a status that means "start
me again".
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

from tfdist_ext.launch.exit_codes import RESTART, USUAL_STALL_TIMEOUT, stall_timeout
from tfdist_ext.strategies.waiting import say, show_stacks

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
    """What a task knows of an execution that it is in.

    Attributes:
        number: of the meeting.
        batches: that it has read, in this process.
        python: the line of Python that TensorFlow has called, and waits for; "" for none.
    """

    number: int = 0
    batches: int = 0
    python: str = ""


def who_stalls(known: Mapping[str, Progress]) -> tuple[str, str]:
    """(task, what it does) of those that keep the others; "" where none can be told from others.

    One that has read less than others waits for its data; one in which TensorFlow waits for Python
    waits for that.
    """
    least = min(progress.batches for progress in known.values())
    behind = [task for task, progress in known.items() if progress.batches == least]
    in_python = [task for task in behind if known[task].python]
    keepers = in_python or behind
    if len(keepers) == len(known):
        each = [f"{task} at {progress.python}" for task, progress in known.items() if in_python]
        at = f", {'; '.join(each)}" if each else ""
        return "", f"all workers have stalled{at}"
    others = [f" with {', '.join(keepers[1:])}"] if keepers[1:] else []
    does = "has stalled" if len(behind) == len(known) else "has stalled reading its data"
    at = f", at {known[keepers[0]].python}" if in_python else ""
    return keepers[0], f"{keepers[0]}{''.join(others)} {does}{at}"


def watch(
    me: str,
    phases: Phases,
    suspects: Callable[[], str] = lambda: "",
    tell_others: Callable[[], object] = lambda: None,
    promise: Callable[[float, str], object] = lambda seconds, text: None,
) -> None:
    """End a process that trains alone, or drives parameter servers, when it stands still.

    Args:
        me: this task, for messages; "" where it is no task of a cluster.
        phases: its own; nobody watches any more when they are gone.
        suspects: names those whom its steps wait for; "" where it does not know.
        tell_others: that they should show their stacks, too.
        promise: is told, again and again, within how many seconds it is told again, and what this
            process is at: no thread of Python runs while TensorFlow holds Python's lock. 0: when it
            comes to it.
    """
    watched = weakref.ref(phases)
    del phases

    def look() -> None:
        promised = False
        while (phases := watched()) is not None:
            if phases.name or promised:
                promised = bool(phases.name)
                left = phases.limit - phases.waited + _MARGIN
                promise(left if promised else 0.0, f"{me} has stalled in {phases.name}")
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
    """End this process at once: what stands still answers to nothing else."""
    say(f"tfdist: {text}. The job ends, to be started again.")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(RESTART)


def python_in_step() -> str:
    """The line of Python that TensorFlow has called, in a step or a pipeline; "" for none."""
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
    """The phases of a process that trains alone, where the launcher asks for it."""
    phases = Phases.of_environment(usual=0.0)
    if phases is not None:
        watch("", phases)
    return phases
