"""What a task of a training is doing, and the end of a task that has stalled.

With several workers, `PeerMonitor` and `SynchronousReduction` extend the classes of this module.

The limit of a phase follows from the longest phase of its kind so far, and is at least a multiple
of the stall timeout: a trace or a callback may take longer than a step. A thread counts ticks
instead of reading the clock, because a process that was stopped, or a laptop that slept, has not
waited.

After a stall all tasks write the stacks of their Python threads to stderr, one sentence names the
task and its phase, and the job ends with a status that means "start me again".
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.cluster.liveness import say, show_stacks
from tfdist_ext.cluster.liveness.watching import STALLED, Servers
from tfdist_ext.launch.exit_codes import RESTART, USUAL_STALL_TIMEOUT, stall_timeout
from tfdist_ext.training.agreement.termination import termination_of_process

FACTOR = 5.0  # times the longest phase of its kind
# The smallest limits, in stall timeouts. Compiling may take minutes where a step takes seconds.
_AT_LEAST = {"starting": 10.0, "compiling": 10.0, "callbacks": 5.0, "checkpoint": 5.0, "steps": 1.0}
_TICK = 1.0


class Phases:
    """The phase that a task is in, and how long it may be in it.

    Args:
        timeout: the smallest limit of steps, in seconds; infinite if nothing is watched.

    Attributes:
        name: of the phase; "" outside of a training.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.name = ""
        self._ticked = self._since = 0.0  # seconds, counted by ticks: until now; until the phase
        self._longest: dict[str, float] = {}

    @classmethod
    def of_environment(cls, usual: float = USUAL_STALL_TIMEOUT) -> Phases:
        """The phases with the stall timeout of the environment."""
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        return cls((not interactive and stall_timeout(os.environ, usual)) or math.inf)

    def enter(self, name: str) -> None:
        """Begin a phase. To begin the same phase again counts as progress."""
        self._longest[self.name] = max(self._longest.get(self.name, 0.0), self.waited)
        self._since = self._ticked  # before the name: another thread compares it with a limit
        self.name = name

    @contextlib.contextmanager
    def of_call(self) -> Iterator[None]:
        """Scope of a public call, which a callback may make in another call."""
        outer = self.name
        self.enter("starting")
        try:
            yield
        finally:
            self.enter(outer)

    @property
    def waited(self) -> float:
        """Seconds in this phase."""
        return self._ticked - self._since

    @property
    def limit(self) -> float:
        """Seconds that the phase may take."""
        at_least = _AT_LEAST.get(self.name, math.inf) * self.timeout
        return max(at_least, FACTOR * self._longest.get(self.name, 0.0))

    def tick(self, seconds: float) -> bool:
        """Count more seconds; return whether the phase takes too long."""
        self._ticked += seconds
        limit = self.limit
        return self.waited >= limit

    def __str__(self) -> str:
        longest = self._longest.get(self.name, 0.0)
        return (
            f"{self.waited:.0f} s in {self.name} (the longest before took {longest:.1f} s; more"
            f" than {self.limit:.0f} s are no progress: see --stall-timeout)"
        )


@functools.cache
def watched_phases(
    me: str = "", suspects: Callable[[], str] = str, servers: Servers | None = None
) -> Phases:
    """The phases of a process that trains alone, or drives parameter servers.

    A thread ends the process when it stalls. A process that trains alone is watched only if the
    launcher has set a stall timeout.

    Args:
        me: this task, for messages; "" where it is no task of a cluster.
        suspects: names the tasks its steps wait for; "" where it does not know.
        servers: show their stacks, too.
    """
    phases = Phases.of_environment(USUAL_STALL_TIMEOUT if me else 0.0)

    def watch() -> None:
        while not phases.tick(_TICK):
            time.sleep(_TICK)
        text = f"{me or 'this process'} has stalled: {phases}"
        waits_for = suspects() if phases.name == "steps" else ""
        if servers is not None:
            servers.end(STALLED)
        show_stacks()
        end_to_be_restarted(f"{text}; it waits for {waits_for}" if waits_for else text)

    if phases.timeout < math.inf:
        threading.Thread(target=watch, daemon=True, name="tfdist-stalls").start()
    return phases


def end_to_be_restarted(text: str) -> None:
    """End this process at once; a process that has stalled answers to nothing else."""
    say(f"tfdist: {text}. The job ends, to be started again.")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(RESTART)


class TaskStatus:
    """What a task is doing, for its watchdog and for the other tasks.

    Args:
        phases: the phases that a watchdog watches.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._termination = termination_of_process()

    def call(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Scope of a public call."""
        return self._phases.of_call()

    def barrier(self, detail: str = "") -> contextlib.AbstractContextManager[None]:
        """Scope in which this task waits for the others."""
        return contextlib.nullcontext()

    def reached(self, place: str) -> None:
        """Records the last step that is done, as "step 120", for messages."""

    def enters(self, phase: str) -> None:
        """Begins a phase: "compiling", "steps", "callbacks" or "checkpoint"."""
        self._phases.enter(phase)

    def reads_batches(self, count: Callable[[], int]) -> None:
        """Sets the function that counts the batches the running execution has read."""

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM has come, in the scope of `ends_at_a_step`."""
        return self._termination.only_noted and self._termination.received is not None

    def ends_at_a_step(self) -> contextlib.AbstractContextManager[None]:
        """Scope of a training that ends at a step of all tasks after a task got SIGTERM."""
        return self._termination.noted()


class Reduction:
    """Reduces values of replicas and tasks to one value for all.

    Attributes:
        replicas: number of parts of a global batch, over all workers.
        local_replicas: number of replicas of this worker.
        first_replica: the index of this worker's first replica, over all workers.
        workers: number of workers.
        worker: the index of this worker.
        multi_worker: whether there are several workers.
        is_chief: whether this task writes files and prints.
        peers: the status of this task among the others.
    """

    replicas = local_replicas = workers = 1
    first_replica = worker = 0
    multi_worker = False
    is_chief = True

    def __init__(self, strategy: tf.distribute.Strategy, peers: TaskStatus) -> None:
        self.strategy = strategy
        self.peers = peers

    def call(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Scope of a public call; all workers wait until each has made it."""
        return self.peers.call(name)

    def task_names(self) -> list[str]:
        """The tasks that compute, in the order of their replicas, as "worker 1"."""
        return ["the chief"]

    def sum_over_workers(self, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """The sum over workers of each worker's number or array; every worker must call."""
        return np.asarray(value)

    def from_chief(self, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """The chief's number or array, on every worker; every worker must call."""
        value = np.asarray(value)
        return self.sum_over_workers(value if self.is_chief else np.zeros_like(value))

    def any_worker(self, flag: bool) -> bool:
        """Whether the flag is set on any worker; every worker must call."""
        return bool(self.sum_over_workers(np.int32(flag)) > 0)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_every_worker(method: _Method) -> _Method:
    """Decorator of a public method that every worker must call; a missing call is an error."""

    @functools.wraps(method)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._reduction.call(method.__name__):
            return method(self, *args, **kwargs)

    return cast(_Method, called)
