"""Runs a plan, and runs it again after a failure.

`next_attempt`, a pure function of the failures so far, decides what follows.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tfdist_ext.errors import LaunchError
from tfdist_ext.failures import Failure
from tfdist_ext.launcher.exit_codes import DONE, FAILED, PREEMPTED, STARTS_AGAIN, StopSignals
from tfdist_ext.launcher.output import Printer
from tfdist_ext.launcher.plan import LaunchPlan
from tfdist_ext.launcher.run import Limits, RunResult, run_plan
from tfdist_ext.messages import check_int

RESTARTS = "TFDIST_RESTARTS"  # in the environment of tasks: how many starts were before this one
_IN_A_ROW = 2  # failures in a row of one worker, after which it is left out
_AT_ONCE = 10.0  # seconds; an earlier preemption counts, or a run could restart without end
_REPEATS = 3600.0  # seconds; after a longer run, an exception that was raised before is no repeat
_SIGNALS = 128  # the first exit status that is worth a restart

# (workers, folder of logs) -> the plan of one start, its ports reserved meanwhile.
Planned: TypeAlias = Callable[[tuple[int, ...], Path], AbstractContextManager[LaunchPlan]]


@dataclass(frozen=True)
class RestartPolicy:
    """When a run restarts, and with how many workers.

    Attributes:
        max_restarts: the maximum number of restarts; preemptions do not count.
        workers: the number of workers in the first start.
        min_workers: the minimum number of workers; a worker that fails repeatedly is left out.

    Raises:
        LaunchError: the numbers contradict each other.
    """

    max_restarts: int
    workers: int
    min_workers: int

    def __post_init__(self) -> None:
        check_int(self.max_restarts, "--max-restarts", error=LaunchError)
        if self.min_workers != self.workers:
            check_int(self.min_workers, "--min-workers", 1, self.workers, error=LaunchError)
            if not self.max_restarts:
                raise LaunchError(
                    f"--min-workers {self.min_workers} needs --max-restarts: workers are left out"
                    " when the run restarts. Add --max-restarts 3."
                )


@dataclass(frozen=True)
class Attempt:
    """The failure of one start of a run, or of one worker that restarts alone.

    Attributes:
        status: the exit status.
        workers: the workers that took part, by their numbers in the first start.
        seconds: the time from the start to the failure.
        failed: the worker that was the root cause; None if it was another task.
        raised: the type and the message of the exception that the root cause raised; "" if it
            raised none.
    """

    status: int
    workers: tuple[int, ...]
    seconds: float = 0.0
    failed: int | None = None
    raised: str = ""


def next_attempt(
    policy: RestartPolicy, past: Sequence[Attempt]
) -> tuple[tuple[int, ...] | None, str]:
    """Decide what follows the last of these attempts.

    Returns:
        The workers of the next start, or None if the run does not start again; and the reason.
    """
    last = past[-1]
    if not _counts(last):
        return last.workers, "preempted; this does not count as a restart"
    if last.raised:
        is_known = any(attempt.raised == last.raised for attempt in past[:-1])
        if is_known and last.seconds < _REPEATS:
            return None, "the same exception as before: not started again"
    elif last.status < _SIGNALS:
        return None, f"exit code {last.status} is a permanent failure: not started again"
    failed = [attempt.failed for attempt in past if _counts(attempt)]
    if len(failed) > policy.max_restarts:
        return None, f"all {policy.max_restarts} restarts (--max-restarts) are used up"
    workers, why = last.workers, f"restart {len(failed)} of {policy.max_restarts}"
    repeats = failed[-_IN_A_ROW:] == [last.failed] * _IN_A_ROW
    if repeats and last.failed is not None and len(workers) > policy.min_workers:
        workers = tuple(worker for worker in workers if worker != last.failed)
        times = f"has failed {_IN_A_ROW} times in a row"
        left = f"{len(workers)} worker{'s' * (len(workers) > 1)}"
        why += f"; worker {last.failed} {times} and is left out: {left}, numbered from 0"
    return workers, why


def _counts(attempt: Attempt) -> bool:
    return attempt.status != PREEMPTED or attempt.seconds < _AT_ONCE


def run_with_restarts(
    planned: Planned,
    policy: RestartPolicy,
    log_dir: Path,
    env: Mapping[str, str],
    limits: Limits,
    stop: StopSignals,
) -> RunResult:
    """Run a plan, and start it again as the policy says; returns how the last start ended.

    Args:
        planned: gives the plan of one start, with these workers, by their numbers in the first
            start, and with log files in this folder.
        log_dir: gets the logs of the first start, and those of the others in folders
            `restart-1`, ...
        stop: the signals that end the run.

    Raises:
        LaunchError: a start was not possible.
    """
    limits = dataclasses.replace(limits, began=time.monotonic())
    history = _History(policy)
    if policy.max_restarts:
        env = {**env, STARTS_AGAIN: "1"}
    with stop.handled():
        for number in itertools.count():
            folder = log_dir / f"restart-{number}" if number else log_dir
            since = time.monotonic()
            with planned(history.workers, folder) as plan:
                result = run_plan(
                    plan,
                    limits,
                    env={**env, RESTARTS: str(number)},
                    stop=stop,
                    # Beside parameter servers, the others do the work of a worker that fails.
                    replaces=history.replaces if plan.coordinator else None,
                )
            if not history.starts_again(result, time.monotonic() - since):
                return result
    raise AssertionError("unreachable")


class _History:
    """The failures so far, in all starts.

    Attributes:
        workers: the workers of this start or the next one, by their numbers in the first start.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.workers = tuple(range(policy.workers))
        self._report = Printer(sys.stderr)
        self._policy = policy
        self._past: list[Attempt] = []

    def replaces(self, task: str, status: int, failure: Failure | None, seconds: float) -> bool:
        """Whether a task that failed beside parameter servers restarts alone."""
        if not self._policy.max_restarts:
            return False
        attempt = self._attempt(task, status, failure, seconds)
        workers, why = next_attempt(self._policy, [*self._past, attempt])
        if attempt.failed is None or workers != self.workers:
            return False
        self._past.append(attempt)
        self._say(f"{task} failed (exit status {status}); the other workers do its work; {why}")
        return True

    def starts_again(self, result: RunResult, seconds: float) -> bool:
        """Record the end of a start; returns whether another one follows."""
        status, task = result.exit_status, result.failed_task
        if not self._policy.max_restarts or status == DONE or result.ended_by != "tasks":
            return False
        failure = result.failures.get(str(task))
        self._past.append(self._attempt(task, status, failure, seconds))
        workers, why = next_attempt(self._policy, self._past)
        self._say(why)
        self.workers = workers or self.workers
        return workers is not None

    def _attempt(
        self, task: str | None, status: int, failure: Failure | None, seconds: float
    ) -> Attempt:
        # With sys.exit, the script chose its exit code.
        is_exception = status == FAILED and failure is not None and failure.traceback
        raised = str(failure) if is_exception else ""
        return Attempt(status, self.workers, seconds, self._number_of(task), raised)

    def _number_of(self, task: str | None) -> int | None:
        """The number of a worker in the first start; None where the task is no worker."""
        job, _, index = (task or "").partition(":")
        return self.workers[int(index)] if job == "worker" else None

    def _say(self, text: str) -> None:
        self._report.write(f"tfdist: {text}\n")
