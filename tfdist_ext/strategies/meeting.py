"""The preflight of this task's cluster before TensorFlow's servers start, in a strategy's words."""

from __future__ import annotations

import time

import tensorflow as tf

from tfdist_ext.cluster.addresses import identity
from tfdist_ext.cluster.cards import card_of, tasks_of
from tfdist_ext.cluster.preflight import UNKNOWN, Late, PreflightError, listening, preflight
from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies import waiting
from tfdist_ext.strategies.resolvers import Described

__all__ = ["WAIT", "meet"]

WAIT = 300.0  # seconds for the other tasks to come


def meet(described: Described, wait: float | None, *, first: bool = False) -> None:
    """Return when all tasks of the cluster are there, and agree on it.

    Those that are late are named on stderr. A task that is not in the cluster does not wait, nor
    does one whose port is in use: TensorFlow listens there already, or will say that it cannot.

    Args:
        wait: seconds; None: 300.
        first: the strategy must be made before TensorFlow starts.

    Raises:
        StrategyError: names who is missing, or what differs; the same on every task.
        RuntimeError: as TensorFlow's own, where it has started.
    """
    wait = WAIT if wait is None else wait
    me, source = str(described.task), described.source
    tasks = tasks_of(described.jobs)
    if me not in tasks:
        return
    try:
        listening(identity(tasks[me])[1]).close()
    except OSError:
        return
    if first and _has_started():
        raise RuntimeError("Collective ops must be configured at program startup")
    devices = {"GPU": len(tf.config.list_physical_devices("GPU"))}
    try:
        preflight(
            card_of(me, described.jobs, devices), wait=wait, show=_Report(me, tasks, source).show
        )
    except PreflightError as error:
        if error.missing:
            failure = StrategyError(
                f"all tasks of {source} must be there within {wait:g} s (wait), got {error}. Start"
                " them, correct their addresses on every task, or allow more seconds."
            )
            failure.missing = error.missing
            raise failure from error
        raise StrategyError(
            f"all tasks of {source} must be started alike, each at its own address, got: {error}."
            " Correct that task, and start the job again."
        ) from error


def _has_started() -> bool:
    """Whether TensorFlow has: no public function says it, but its settings cannot change then."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


class _Report:
    """Says on stderr who is late: after 10 seconds, and then ever less often."""

    def __init__(self, me: str, tasks: dict[str, str], source: str) -> None:
        self._me, self._tasks, self._source = me, tasks, source
        self._began = time.monotonic()
        self._next = waiting.FIRST_AFTER

    def show(self, late: Late, tasks: int) -> None:
        waited = time.monotonic() - self._began
        if not late or waited < self._next:
            return
        self._next = waited + min(waited, waiting.LONGEST_PAUSE)
        seen = [task for task, state in late.items() if state != UNKNOWN]
        names = ", ".join(f"{task} ({self._tasks.get(task, '?')})" for task in seen)
        waiting.say(
            f"{self._me}: waiting for {names} for {waited:.0f} s. Is it started, is its address"
            f" right in {self._source} on every task, can this host reach it?"
        )
