"""Runs a plan: starts its tasks, watches them, reports a failure, and leaves no process behind."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO, TypeAlias

from tfdist_ext.failures import Failure
from tfdist_ext.launcher.exit_codes import (
    FAILED,
    PREEMPTED,
    PREEMPTION_SIGNAL,
    RESTART,
    StopSignals,
)
from tfdist_ext.launcher.output import Printer
from tfdist_ext.launcher.plan import LaunchPlan
from tfdist_ext.launcher.processes import StartProcess, TaskProcess, Tasks, start_process

_TIMED_OUT = 124  # as coreutils' timeout does
# Seconds to exit unaided: a blamed task, or tasks that saved during a preemption.
_SETTLE = 5.0
# Seconds from SIGTERM to SIGKILL at most: after a failure, as the others cannot save without the
# task that has failed; and after Ctrl-C, as a person waits.
_GRACE_OF_FAILURE, _GRACE_OF_CTRL_C = 1.0, 5.0
_STACKS = 0.5  # seconds to write the stacks
_PATIENCE = 1.0  # seconds to wait for a reader of the output after a signal or the time limit
_LOOK_EVERY = 0.05  # seconds between two looks for events, and for what tasks have left behind


# (task, its exit status, why it failed, seconds that it ran) -> whether a new process replaces it.
# False: the run fails.
Replaces: TypeAlias = Callable[[str, int, Failure | None, float], bool]
EndedBy: TypeAlias = Literal["tasks", "signal", "timeout"]
Verb: TypeAlias = Literal["failed", "was preempted", "left", "does not answer"]


@dataclass(frozen=True)
class Limits:
    """The time limits of a run.

    Attributes:
        grace: seconds between SIGTERM and SIGKILL after a preemption, in which tasks save. At most
            5 after Ctrl-C and after the timeout, and 1 after a failure.
        linger: seconds between the coordinator's success and SIGTERM for the others.
        timeout: seconds for all starts together; None: no limit.
        began: when the first start began, in monotonic time; None: with this start.
        at_timeout: makes tasks write their stacks after the timeout; None: they do not.
    """

    grace: float = 30.0
    linger: float = 5.0
    timeout: float | None = None
    began: float | None = None
    at_timeout: signal.Signals | None = None


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        exit_status: 0, or that of the root cause (128 + n where signal n ended it). If the root
            cause left with 0: that of the task that failed because of it. 138 if the root cause
            does not answer. 128 + n if signal n ended the run itself, 124 if its time was up.
        failed_task: the root cause: the task that failed first, or the task that the first one
            blames for its failure; None where no task failed.
        failures: why tasks failed, without tasks that wrote no reason.
        ended_by: "tasks"; or what has ended them: "signal" or "timeout".
        returncodes: of each task; -n where signal n ended it, None where nothing could end it.
        last_lines: of each task, at most 20.
    """

    exit_status: int
    failed_task: str | None
    failures: Mapping[str, Failure]
    ended_by: EndedBy
    returncodes: Mapping[str, int | None]
    last_lines: Mapping[str, tuple[str, ...]]


def run_plan(
    plan: LaunchPlan,
    limits: Limits,
    *,
    env: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    report: TextIO | None = None,
    stop: StopSignals | None = None,
    replaces: Replaces | None = None,
    start: StartProcess = start_process,
) -> RunResult:
    """Run every task of a plan to its end, and end every process that a task has started.

    The first task that ends with anything but 0 is the root cause, unless it blames another task.
    The others get SIGTERM, and SIGKILL after the grace. The same happens on SIGINT, SIGTERM and
    SIGHUP, when this is called in the main thread, and when the time is up; a second signal kills
    at once. Where the plan has a coordinator, its success ends the run.

    Args:
        limits: the time limits of the run.
        env: the environment that tasks start with; None: that of this process.
        stream: shows the lines of tasks; None: standard output.
        report: shows the messages of the launcher; None: standard error.
        stop: the signals of several runs one after another; None: those of this run.
        replaces: decides whether a task that fails is replaced; None: it fails the run.
        start: starts the process of a task.

    Raises:
        LaunchError: a program could not be started, or a log file cannot be written. Tasks that
            had started by then have been ended.
    """
    stop = stop or StopSignals()
    env = {**(os.environ if env is None else env), PREEMPTION_SIGNAL: stop.preemption.name}
    reporter = Printer(report or sys.stderr)
    with tempfile.TemporaryDirectory(prefix="tfdist-errors-") as errors, stop.handled():
        tasks = Tasks(plan, env, Printer(stream or sys.stdout), reporter, start, Path(errors))
        return _Run(plan, tasks, reporter, limits, stop, replaces).run()


@dataclass
class _Run:
    """The state of a run. Events arrive in a queue, and one thread handles them."""

    plan: LaunchPlan
    tasks: Tasks
    report: Printer
    limits: Limits
    stop: StopSignals
    replaces: Replaces | None
    # Not a queue: a signal handler that appends must not wait for a lock, as in Queue, and after a
    # signal SimpleQueue may wait beyond its timeout (Python 3.11).
    events: deque[signal.Signals | tuple[TaskProcess, int]] = field(default_factory=deque)
    start: float = field(default_factory=time.monotonic)
    start_time: float = field(default_factory=time.time)
    status: int = 0
    ended_by: EndedBy = "tasks"
    signals: int = 0  # how many have arrived
    failed: TaskProcess | None = None  # the root cause
    verb: Verb = "failed"  # what the root cause did
    victim: TaskProcess | None = None  # failed because of another
    still_running: Sequence[TaskProcess] = ()  # when the run began to end them

    def run(self) -> RunResult:
        """Start, watch, end."""
        self.stop.notify = self.events.append
        if self.stop.first is not None:  # the signal arrived while no task ran
            self.events.append(self.stop.first)
        try:
            self.tasks.start(lambda task, code: self.events.append((task, code)))
            self.start, self.start_time = time.monotonic(), time.time()
            self._watch()
            self._end()
        finally:
            self.tasks.kill()
            self._wait_for_output()
            self.tasks.close()
            self.stop.notify = None
        if self.stop.first is not None:
            self.ended_by = "signal"
        self._report_failure()
        return RunResult(
            exit_status=self.status,
            failed_task=None if self.failed is None else self.failed.name,
            failures={task.name: task.failure for task in self.tasks.all if task.failure},
            ended_by=self.ended_by,
            returncodes={task.name: task.returncode for task in self.tasks.all},
            last_lines={task.name: tuple(task.output.last_lines) for task in self.tasks.all},
        )

    def _next_event(self, deadline: float) -> signal.Signals | TaskProcess | None:
        """Wait for a signal or the end of a task; None when the deadline has passed."""
        while not self.events:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY)
        event = self.events.popleft()
        if isinstance(event, signal.Signals):
            self.signals += 1
            return event
        task, returncode = event
        task.returncode = returncode
        task.ended_after = time.monotonic() - self.start
        return task

    def _watch(self) -> None:
        """Wait until all tasks have ended, or until there is a reason to end them."""
        limit = math.inf if self.limits.timeout is None else self.limits.timeout
        deadline, lingers = (self.limits.began or self.start) + limit, False
        while self.tasks.running():
            event = self._next_event(deadline)
            if isinstance(event, signal.Signals):
                self.status, self.ended_by = self.stop.status, "signal"
                return
            if event is None:
                if not lingers:
                    self.status, self.ended_by = _TIMED_OUT, "timeout"
                return
            if lingers:
                continue
            if event.returncode and not self._is_replaced(event):
                self._find_root_cause(event)
                return
            if event.returncode == 0 and event.name == self.plan.coordinator:
                lingers = True
                deadline = min(deadline, time.monotonic() + self.limits.linger)

    def _is_replaced(self, task: TaskProcess) -> bool:
        """Whether the run continues after this task failed; restarts the task if possible."""
        if self.replaces is None:
            return False
        status, failure = shell_status(task.returncode or 0), task.failure
        peer = "" if failure is None else failure.peer
        if status in (FAILED, RESTART) and peer not in ("", task.name):
            return False  # another task is the one to replace
        lasted = time.monotonic() - task.began
        if not self.replaces(task.name, status, failure, lasted):
            return False
        self.tasks.start_again(task)
        return True

    def _find_root_cause(self, task: TaskProcess) -> None:
        """Find the root cause: this task, which failed first, or the task that it blames."""
        failure = task.failure
        tasks = {other.name: other for other in self.tasks.all if other is not task}
        self.failed = task
        if failure is not None and failure.peer in tasks:
            blamed = tasks[failure.peer]
            self.failed, self.victim = blamed, task
            self._wait_while(lambda: blamed.returncode is None)
        self.status = shell_status(self.failed.returncode or task.returncode or 0)
        if self.failed.returncode is None:
            self.verb, self.status = "does not answer", RESTART
        elif self.failed.returncode == 0:
            self.verb = "left"
        elif self.status == PREEMPTED:
            self.verb = "was preempted"

    def _wait_while(self, pending: Callable[[], bool]) -> None:
        """Wait until tasks have ended by themselves, for `_SETTLE` seconds or until a signal."""
        deadline = time.monotonic() + _SETTLE
        while pending() and isinstance(self._next_event(deadline), TaskProcess):
            pass

    def _end(self) -> None:
        """Give the tasks, and the processes that they left behind, the grace to end."""
        if not self.tasks.are_there():
            return
        grace, running = self.limits.grace, self.tasks.running()
        if self.status != PREEMPTED:
            grace = min(grace, _GRACE_OF_CTRL_C if self.failed is None else _GRACE_OF_FAILURE)
        self.still_running = [task for task in running if task is not self.failed]
        if self.failed is not None and running:
            ending = "all tasks" if self.verb == "does not answer" else "the other tasks"
            self._say(f"{self.failed.name} {self.verb}; ending {ending}")
        elif self.ended_by == "signal" and self.stop.first is not None:
            self._say(
                f"{self.stop.first.name}: ending {len(running)} tasks within {grace:g} s; send it"
                " again to kill them now"
            )
        elif self.ended_by == "timeout" and self.limits.at_timeout is not None:
            for task in running:
                task.signal(self.limits.at_timeout)
            time.sleep(_STACKS)
        if self.failed is not None and self.failed.returncode == PREEMPTED:  # it has saved
            self._wait_while(lambda: bool(self.tasks.running()))
        deadline = time.monotonic() + grace
        if self.ended_by == "signal" or self.status == PREEMPTED:
            self._end_coordinator(deadline)
        self.tasks.signal_all(signal.SIGTERM)
        deadline = max(deadline, time.monotonic() + _GRACE_OF_FAILURE)
        while self.tasks.are_there() and time.monotonic() < deadline and self.signals < 2:
            # Processes that tasks have left behind end without an event.
            self._next_event(time.monotonic() + _LOOK_EVERY)
        self.tasks.kill()
        while self._next_event(0.0):  # the ends of the tasks
            pass

    def _end_coordinator(self, deadline: float) -> None:
        """End the coordinator before the other tasks: it saves the variables of its servers."""
        for task in self.tasks.running():
            if task.name == self.plan.coordinator:
                task.signal_group(signal.SIGTERM)
                while task.returncode is None and self.signals < 2:
                    if self._next_event(deadline) is None:
                        break

    def _wait_for_output(self) -> None:
        """Wait until the output is shown. A reader such as a pager may take its time."""
        patience = _PATIENCE
        while patience > 0 and not all(t.output.wait(_LOOK_EVERY) for t in self.tasks.all):
            if self.stop.first is not None or self.ended_by == "timeout":
                patience -= _LOOK_EVERY

    def _say(self, text: str) -> None:
        self.report.write(f"tfdist: {text}\n")

    def _report_failure(self) -> None:
        if self.failed is not None:
            self.report.write(
                failure_report(
                    self.failed, self.verb, self.still_running, self.victim, self.start_time
                )
            )
        elif self.ended_by == "timeout":
            after = f"{self.limits.timeout:g} s (--timeout)"
            self._say(f"not finished after {after}; these tasks were still running:")
            for task in self.still_running:
                last = task.output.last_lines[-1] if task.output.last_lines else "(wrote nothing)"
                self.report.write(f"    {task.name}: {last}\n")


def shell_status(returncode: int) -> int:
    """The exit status as shells give it: 128 + n for signal n."""
    return 128 - returncode if returncode < 0 else returncode


def outcome(returncode: int | None) -> str:
    """`exit code 3`, `killed by SIGKILL (signal 9)`, or `still running`."""
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit code {returncode}"
    known = -returncode in set(map(int, signal.Signals))  # others are real-time signals
    name = signal.Signals(-returncode).name if known else f"SIG{-returncode}"
    return f"killed by {name} (signal {-returncode})"


def failure_report(
    task: TaskProcess,
    verb: Verb,
    still_running: Sequence[TaskProcess],
    victim: TaskProcess | None,
    start_time: float,
) -> str:
    """The root cause and why it failed, then what became of the other tasks, in order of time.

    Args:
        task: the root cause.
        verb: "left" if it ended with 0 and was needed; "does not answer" if it had not ended.
        still_running: the tasks that were running then.
        victim: the task that failed because of it.
        start_time: when the run started, in seconds since 1970.
    """
    returncode = None if verb == "does not answer" else task.returncode  # tfdist killed it later
    how, after, failure = outcome(returncode), task.ended_after, task.failure
    if verb == "left":
        how += ", but the other tasks still needed it"
    if failure is not None:  # its process may have ended later
        after = failure.time - start_time
    elif verb == "does not answer" and victim is not None:
        after = victim.ended_after
    what = "failed first" if verb == "failed" else verb
    lines = [f"{task.name} {what}, after {after:.1f} s: {how}"]
    if task.returncode == -signal.SIGKILL and verb == "failed":
        lines.append("tfdist did not send this signal: is the machine out of memory?")
    if failure is not None and failure.traceback:  # which was shown
        lines.append(f"    {failure}")
    elif last := list(task.output.last_lines):
        lines.append(f"the last lines of {task.name}:")
        lines += [f"    {line}" for line in last]
    else:
        lines.append(f"{task.name} wrote nothing")
    if task.plan.log_file is not None:
        lines.append(f"its log: {task.plan.log_file}")
    if victim is not None:
        lines.append(
            f"{victim.name} failed because of {task.name}, after {victim.ended_after:.1f} s:"
            f" {outcome(victim.returncode)}"
        )
        lines.append(f"    {victim.failure}")
    if still_running:
        ended = ", ".join(f"{other.name} {outcome(other.returncode)}" for other in still_running)
        lines.append(f"then the other tasks ended: {ended}")
    return "".join(f"{line}\n" if line.startswith(" ") else f"tfdist: {line}\n" for line in lines)
