"""Running a plan once, and again as long as another start is worth it."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeAlias

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.exit_codes import FAILED, STARTS_AGAIN
from tfdist_ext.launch.output import Printer
from tfdist_ext.launch.plan import LaunchPlan
from tfdist_ext.launch.restarts import Attempt, RestartPolicy, next_attempt
from tfdist_ext.launch.run import Limits, RunResult, run_plan
from tfdist_ext.launch.stop_signals import StopSignals

__all__ = ["RESTARTS", "run_with_restarts"]

RESTARTS = "TFDIST_RESTARTS"  # in the environment of tasks: how many starts were before this one

# (workers, folder of logs) -> the plan of one start, its ports reserved meanwhile.
Planned: TypeAlias = Callable[[tuple[int, ...], Path], AbstractContextManager[LaunchPlan]]


def run_with_restarts(
    planned: Planned,
    policy: RestartPolicy,
    log_dir: Path,
    env: Mapping[str, str],
    limits: Limits,
    stop: StopSignals,
    *,
    names_pids: bool = False,
) -> RunResult:
    """Run a plan, and start it again as the policy says; how the last start has ended.

    Args:
        planned: gives the plan of one start, its ports reserved meanwhile: of these workers, by
            their numbers among all, with log files in this folder.
        log_dir: gets the logs of the first start, and those of the others in folders
            `restart-1`, ...
        stop: the signals that end the run.
        names_pids: as of `run_plan`.

    Raises:
        LaunchError: the first start could not be made.
    """
    began = time.monotonic()
    history = _History(policy)
    if policy.max_restarts:
        env = {**env, STARTS_AGAIN: "1"}
    with stop.handled():
        for number in itertools.count():
            folder = log_dir / f"restart-{number}" if number else log_dir
            left = _limits_after(time.monotonic() - began, limits) if number else limits
            history.begin()
            try:
                with planned(history.workers, folder) as plan:
                    result = run_plan(
                        plan,
                        left,
                        env={**env, RESTARTS: str(number)},
                        stop=stop,
                        replaces=history.replaces,
                        names_pids=names_pids,
                    )
            except LaunchError as error:
                if not number:
                    raise
                history.say(f"not started again: {error}")
                return dataclasses.replace(result, exit_status=FAILED)
            if not history.ended(result):
                return result
            if stop.first is not None:  # in this moment
                return dataclasses.replace(result, exit_status=stop.status)
    raise AssertionError("unreachable")


def _limits_after(seconds: float, limits: Limits) -> Limits:
    """The limits of a later start."""
    if limits.timeout is None:
        return limits
    return dataclasses.replace(limits, timeout=max(0.0, round(limits.timeout - seconds, 1)))


class _History:
    """What has failed so far, in all starts, and what followed.

    Attributes:
        workers: of this start, or the next one, each by its number among all.
        past: the ends that count for what follows: those of starts, and of tasks that were
            replaced in one.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._report = Printer(sys.stderr)
        self.workers = tuple(range(policy.workers))
        self.past: list[Attempt] = []
        self._policy = policy
        self._since = 0.0
        self._gone: set[int] = set()  # left out while the others went on

    def say(self, text: str) -> None:
        """Show a sentence."""
        self._report.write(f"tfdist: {text}\n")

    def begin(self) -> None:
        """A start begins."""
        self._since = time.monotonic()
        self._gone.clear()

    def replaces(
        self, task: str, status: int, raised: str, seconds: float
    ) -> Literal["start", "leave out", "fail"]:
        """What becomes of a worker that has failed, and whose work the others do."""
        self._add(status, task, raised, seconds)
        following = next_attempt(self._policy, self.past)
        if following.workers is None:
            self.past.pop()  # it ends the start, whose end is told in a moment
            return "fail"
        self.say(f"{task} failed (exit status {status}); the others do its work; {following.why}")
        number = self._number_of(task)
        if number is None or number in following.workers:
            return "start"
        self._gone.add(number)
        return "leave out"

    def ended(self, result: RunResult) -> bool:
        """Take note of the end of a start; whether there is another one."""
        self._add(
            result.exit_status,
            result.failed_task,
            result.raised,
            time.monotonic() - self._since,
            lost=result.lost,
            stopped=result.ended_by != "tasks",
        )
        following = next_attempt(self._policy, self.past)
        if following.why:
            self.say(following.why)
        if following.workers is None:
            return False
        self.workers = following.workers
        return True

    def _add(self, status: int, task: str | None, raised: str, seconds: float, **how: bool) -> None:
        self.past.append(
            Attempt(
                status=status,
                workers=tuple(each for each in self.workers if each not in self._gone),
                seconds=seconds,
                failed=self._number_of(task),
                # An exit code of the script's own is no exception, whatever it has shown before.
                raised=raised if status == 1 else "",
                **how,
            )
        )

    def _number_of(self, task: str | None) -> int | None:
        """The number of a worker among all; None: it is no worker."""
        job, _, index = (task or "").partition(":")
        known = job == "worker" and index.isdigit() and int(index) < len(self.workers)
        return self.workers[int(index)] if known else None
