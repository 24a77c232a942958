"""Running a plan, and running it again after a failure.

`next_attempt` decides, a pure function of how the starts so far have ended.
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
from typing import Literal, TypeAlias

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.exit_codes import DONE, FAILED, PREEMPTED, STARTS_AGAIN
from tfdist_ext.launch.output import Printer
from tfdist_ext.launch.plan import LaunchPlan
from tfdist_ext.launch.run import Limits, RunResult, run_plan
from tfdist_ext.launch.stop_signals import StopSignals

__all__ = [
    "RESTARTS",
    "Attempt",
    "Next",
    "RestartPolicy",
    "next_attempt",
    "run_with_restarts",
]

RESTARTS = "TFDIST_RESTARTS"  # in the environment of tasks: how many starts were before this one
_IN_A_ROW = 2  # failures in a row of one worker, after which it is left out
_AT_ONCE = 10.0  # seconds; an earlier preemption counts, or a run could restart without end
_SIGNALS = 128  # the first exit status that is worth a restart

# (workers, folder of logs) -> the plan of one start, its ports reserved meanwhile.
Planned: TypeAlias = Callable[[tuple[int, ...], Path], AbstractContextManager[LaunchPlan]]


@dataclass(frozen=True)
class RestartPolicy:
    """When a run is started again, and with how many workers.

    Attributes:
        max_restarts: how often; preemptions do not count.
        workers: the number of workers in the first start.
        min_workers: how many are enough; a worker that fails repeatedly is left out.

    Raises:
        LaunchError: the numbers contradict each other.
    """

    max_restarts: int
    workers: int
    min_workers: int

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise LaunchError(
                f"--max-restarts must be a number of at least 0, got {self.max_restarts}; 3, for"
                " example"
            )
        if self.min_workers != self.workers and not 1 <= self.min_workers < self.workers:
            raise LaunchError(
                f"--min-workers must be from 1 to the number of workers, {self.workers}, got"
                f" {self.min_workers}; change it, or leave it out"
            )
        if self.min_workers < self.workers and not self.max_restarts:
            raise LaunchError(
                f"--min-workers {self.min_workers} must come with --max-restarts, got none: workers"
                " are left out when the run starts again; add --max-restarts 3"
            )


@dataclass(frozen=True)
class Attempt:
    """How one start of a run ended, or one worker that was replaced during a start.

    Attributes:
        status: the exit status.
        workers: the workers that took part, by their numbers in the first start.
        seconds: how long it took.
        failed: the worker that was the root cause; None where it was no worker.
        raised: the Python exception that was the root cause, and its place; "" where there was
            none.
        lost: a task does not answer, and the others have failed because of that.
        stopped: a signal to the launcher or its time limit has ended the run.
    """

    status: int
    workers: tuple[int, ...]
    seconds: float = 0.0
    failed: int | None = None
    raised: str = ""
    lost: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Next:
    """What comes after an attempt.

    Attributes:
        workers: the workers of the next start; None if the job is not started again.
        why: a sentence for a person; "" where there is nothing to say.
    """

    workers: tuple[int, ...] | None = None
    why: str = ""


def next_attempt(policy: RestartPolicy, past: Sequence[Attempt]) -> Next:
    """What comes after the last of these attempts."""
    last = past[-1]
    if last.status == DONE or last.stopped or not policy.max_restarts:
        return Next()
    if last.status == PREEMPTED and not _counts(last):
        return Next(last.workers, "preempted; this start does not count")
    if last.raised:
        if any(attempt.raised == last.raised for attempt in past[:-1]):
            return Next(why="the same exception as before, in the same place: not started again")
    elif last.status < _SIGNALS and not last.lost:
        return Next(why=f"exit code {last.status} is a permanent failure: not started again")
    failures = sum(map(_counts, past))
    if failures > policy.max_restarts:
        return Next(why=f"all {policy.max_restarts} restarts (--max-restarts) are used up")
    workers, left_out = _without_the_failing(policy, past)
    return Next(workers, f"restart {failures} of {policy.max_restarts}{left_out}")


def _counts(attempt: Attempt) -> bool:
    if attempt.status == PREEMPTED and attempt.seconds >= _AT_ONCE:
        return False
    return attempt.status != DONE


def _without_the_failing(
    policy: RestartPolicy, past: Sequence[Attempt]
) -> tuple[tuple[int, ...], str]:
    """The workers of the next start, and what to say of the worker that is left out."""
    workers = past[-1].workers
    last = [attempt.failed for attempt in past if _counts(attempt)][-_IN_A_ROW:]
    failing = last[-1]
    again = len(last) == _IN_A_ROW and len(set(last)) == 1
    if failing is None or not again or len(workers) <= policy.min_workers:
        return workers, ""
    left = tuple(worker for worker in workers if worker != failing)
    times = f"failed {_IN_A_ROW} times in a row"
    return left, f"; worker {failing} has {times} and is left out: {len(left)} workers"


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
        LaunchError: the first start was not possible.
    """
    began = time.monotonic()
    history = _History(policy)
    if policy.max_restarts:
        env = {**env, STARTS_AGAIN: "1"}
    with stop.handled():
        for number in itertools.count():
            folder = log_dir / f"restart-{number}" if number else log_dir
            if number and limits.timeout is not None:
                left = max(0.0, round(limits.timeout - (time.monotonic() - began), 1))
                these = dataclasses.replace(limits, timeout=left)
            else:
                these = limits
            history.begin()
            try:
                with planned(history.workers, folder) as plan:
                    own = {**env, RESTARTS: str(number)}
                    # Beside parameter servers, the others do the work of a worker that fails.
                    replaces = history.replaces if plan.coordinator else None
                    result = run_plan(plan, these, env=own, stop=stop, replaces=replaces)
            except LaunchError as error:
                if not number:
                    raise
                history.say(f"not started again: {error}")
                return dataclasses.replace(result, exit_status=FAILED)
            if not history.ended(result):
                return result
            if stop.first is not None:  # the signal arrived between two starts
                return dataclasses.replace(result, exit_status=stop.status)
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
        self._since = 0.0
        self._gone: set[int] = set()  # left out while the others went on

    def say(self, text: str) -> None:
        """Show a sentence."""
        self._report.write(f"tfdist: {text}\n")

    def begin(self) -> None:
        """Begin a start."""
        self._since = time.monotonic()
        self._gone.clear()

    def replaces(
        self, task: str, status: int, raised: str, seconds: float
    ) -> Literal["start", "leave out", "fail"]:
        """What becomes of a task that has failed, beside parameter servers."""
        number = self._number_of(task)
        if number is None:
            return "fail"
        self._add(status, task, raised, seconds)
        following = next_attempt(self._policy, self._past)
        if following.workers is None:
            self._past.pop()  # it ends the start, and `ended` adds it
            return "fail"
        self.say(f"{task} failed (exit status {status}); the others do its work; {following.why}")
        if number in following.workers:
            return "start"
        self._gone.add(number)
        return "leave out"

    def ended(self, result: RunResult) -> bool:
        """Record the end of a start; returns whether another one follows."""
        self._add(
            result.exit_status,
            result.failed_task,
            result.raised,
            time.monotonic() - self._since,
            lost=result.lost,
            stopped=result.ended_by != "tasks",
        )
        following = next_attempt(self._policy, self._past)
        if following.why:
            self.say(following.why)
        if following.workers is None:
            return False
        self.workers = following.workers
        return True

    def _add(self, status: int, task: str | None, raised: str, seconds: float, **how: bool) -> None:
        self._past.append(
            Attempt(
                status=status,
                workers=tuple(each for each in self.workers if each not in self._gone),
                seconds=seconds,
                failed=self._number_of(task),
                # Where the script chose another exit code, an earlier traceback is not the cause.
                raised=raised if status == FAILED else "",
                **how,
            )
        )

    def _number_of(self, task: str | None) -> int | None:
        """The number of a worker in the first start; None where the task is no worker."""
        job, _, index = (task or "").partition(":")
        known = job == "worker" and index.isdigit() and int(index) < len(self.workers)
        return self.workers[int(index)] if known else None
