"""What a task of a training is doing, whether it must stop, and its end when it has stalled.

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
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.cluster.liveness import log_line, show_stacks
from tfdist_ext.cluster.liveness.watching import STALLED, Servers
from tfdist_ext.errors import PeerError
from tfdist_ext.failures import preemption
from tfdist_ext.launcher.exit_codes import (
    PREEMPTED,
    PREEMPTION_SIGNAL,
    RESTART,
    USUAL_STALL_TIMEOUT,
    signals_to,
    stall_timeout,
)

FACTOR = 5.0  # times the longest phase of its kind
# The smallest limits, in stall timeouts. Compiling may take minutes where a step takes seconds.
_AT_LEAST = {"starting": 10.0, "compiling": 10.0, "callbacks": 5.0, "checkpoint": 5.0, "steps": 1.0}
_TICK = 1.0


class TaskStatus:
    """What a task is doing, for its watchdog and for the other tasks.

    Args:
        timeout: the smallest limit of steps, in seconds; infinite if nothing is watched.

    Attributes:
        phase: "starting", "compiling", "steps", "callbacks" or "checkpoint"; "" outside of a call.
        stop_requested: whether a signal has come, in the scope of `ends_at_a_step`.
    """

    def __init__(self, timeout: float = math.inf) -> None:
        self.timeout = timeout
        self.phase = ""
        self.stop_requested = False
        self._ticked = self._since = 0.0  # seconds, counted by ticks: until now; until the phase
        self._longest: dict[str, float] = {}

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Scope of a public call, which a callback may make in another call."""
        outer = self.phase
        self.enters("starting")
        try:
            yield
        finally:
            self.enters(outer)

    def barrier(self, detail: str = "") -> contextlib.AbstractContextManager[None]:
        """Scope in which this task waits for the others."""
        return contextlib.nullcontext()

    def enters(self, phase: str) -> None:
        """Begins a phase. To begin the same phase again counts as progress."""
        waited = self._ticked - self._since
        self._longest[self.phase] = max(self._longest.get(self.phase, 0.0), waited)
        if self.phase == "compiling":  # the first steps run, and read their data, before it ends
            most = _AT_LEAST["compiling"] * self.timeout / FACTOR
            self._longest["steps"] = max(self._longest.get("steps", 0.0), min(waited, most))
        self._since = self._ticked  # before the phase: another thread compares it with a limit
        self.phase = phase

    def tick(self, seconds: float) -> str:
        """Counts more seconds; returns a sentence if the phase takes too long, else ""."""
        self._ticked += seconds
        phase = self.phase
        longest = self._longest.get(phase, 0.0)
        limit = max(_AT_LEAST.get(phase, math.inf) * self.timeout, FACTOR * longest)
        waited = self._ticked - self._since
        if waited < limit:
            return ""
        return (
            f"{waited:.0f} s in {phase} (longest before: {longest:.1f} s, limit: {limit:.0f} s,"
            " see --stall-timeout)"
        )

    def reads_batches(self, count: Callable[[], int]) -> None:
        """Sets the function that counts the batches the running execution has read."""

    @contextlib.contextmanager
    def ends_at_a_step(self) -> Iterator[None]:
        """Scope in which SIGTERM sets `stop_requested`: all tasks end at the same step.

        A handler that the user has set is not replaced, and other threads than the main one cannot
        set a handler.

        Raises:
            SystemExit: at the end of the scope, if a signal has come.
        """
        replaceable: dict[int, set[Any]] = {signal.SIGTERM: {signal.SIG_DFL}}
        # A launcher that asks for a checkpoint by another signal may have it ignored at the start.
        if name := os.environ.get(PREEMPTION_SIGNAL):
            replaceable[signal.Signals[name]] = {signal.SIG_DFL, signal.SIG_IGN}
        process = os.getpid()

        def note(number: int, _: object) -> None:
            if os.getpid() == process:
                self.stop_requested = True
            else:  # a child that was forked, as of a data loader
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        numbers = [n for n, handlers in replaceable.items() if signal.getsignal(n) in handlers]
        ended = False
        with signals_to(note, numbers) as handles:
            try:
                yield
            except PeerError:  # another task may have ended at the signal
                if not (handles and self.stop_requested):
                    raise
            finally:
                if handles:
                    ended, self.stop_requested = self.stop_requested, False
        if ended:
            raise preemption(PREEMPTED)


def watch_timeout(usual: float = USUAL_STALL_TIMEOUT) -> float:
    """Returns the stall timeout of the environment; infinite if nothing is watched."""
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return (not interactive and stall_timeout(os.environ, usual)) or math.inf


@functools.cache
def single_task(
    me: str = "", suspects: Callable[[], str] = str, servers: Servers | None = None
) -> TaskStatus:
    """Returns the status of a process that trains alone, or that drives parameter servers.

    A thread ends the process when it stalls. A process that trains alone is watched only if the
    launcher has set a stall timeout.

    Args:
        me: this task, for messages; "" where it is no task of a cluster.
        suspects: names the tasks its steps wait for; "" where it does not know.
        servers: show their stacks, too.
    """
    status = TaskStatus(watch_timeout(USUAL_STALL_TIMEOUT if me else 0.0))

    def watch() -> None:
        while not (why := status.tick(_TICK)):
            time.sleep(_TICK)
        waits_for = suspects() if status.phase == "steps" else ""
        if servers is not None:
            servers.end(STALLED)
        show_stacks()
        text = f"{me or 'this process'} has stalled: {why}"
        end_to_be_restarted(f"{text}; waiting for {waits_for}" if waits_for else text)

    if status.timeout < math.inf:
        threading.Thread(target=watch, daemon=True, name="tfdist-stalls").start()
    return status


def end_to_be_restarted(text: str) -> None:
    """End this process at once; a process that has stalled answers to nothing else."""
    log_line(f"tfdist: {text}. The job ends so that it can be restarted.")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(RESTART)


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
        """Sums a number or an array over all workers; every worker must call."""
        return np.asarray(value)

    def from_chief(self, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """The chief's number or array, on every worker; every worker must call."""
        value = np.asarray(value)
        return self.sum_over_workers(value if self.is_chief else np.zeros_like(value))

    def seed(self, known: int = 0) -> int:
        """Returns a seed that the chief knows, or draws by Python's generator, as Keras does."""
        drawn = random.randint(1, 2**31 - 1)  # also if it is not used: the next fit draws, too
        return int(self.from_chief(known or drawn))

    def any_worker(self, flag: bool) -> bool:
        """Whether the flag is set on any worker; every worker must call."""
        return bool(self.sum_over_workers(np.int32(flag)) > 0)
