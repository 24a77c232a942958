"""Running a plan: start the tasks, watch them, and leave nothing behind."""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TextIO, TypeAlias

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.exit_codes import FAILED, GRACE, PREEMPTED, PREEMPTION_SIGNAL, RESTART
from tfdist_ext.launch.lines import Blame
from tfdist_ext.launch.output import Printer
from tfdist_ext.launch.plan import LaunchPlan
from tfdist_ext.launch.processes import StartProcess, TaskProcess, Tasks, start_process
from tfdist_ext.launch.report import (
    failure_report,
    shell_status,
    timeout_report,
)
from tfdist_ext.launch.stop_signals import StopSignals

__all__ = ["Limits", "RunResult", "run_plan"]

_TIMED_OUT = 124  # as coreutils' timeout does
_SETTLE = 5.0  # seconds for the task that another one blames to end by itself
# Seconds from SIGTERM to SIGKILL at most: after a failure, as the others cannot save without the
# task that has failed; and after Ctrl-C, as a person waits.
_GRACE_OF_FAILURE, _GRACE_OF_CTRL_C = 1.0, 5.0


# (task, its exit status, the Python exception in it, seconds that it ran) -> what becomes of a task
# that has failed, and whose work the others do.
Replaces: TypeAlias = Callable[[str, int, str, float], Literal["start", "leave out", "fail"]]
EndedBy: TypeAlias = Literal["tasks", "signal", "timeout"]


@dataclass(frozen=True)
class Limits:
    """How long a run waits for what.

    Attributes:
        grace: seconds between SIGTERM and SIGKILL where the tasks may have something to save: at
            most 5 after Ctrl-C and at the end of the time, 1 where a task has failed.
        linger: seconds between the coordinator's success and SIGTERM for the others.
        timeout: seconds that all starts together may take; None: any time.
        stall_timeout: seconds after which a task that is stopped (SIGSTOP) is killed; 0: never.

    Raises:
        LaunchError: a number of seconds that is none.
    """

    grace: float = 30.0
    linger: float = 5.0
    timeout: float | None = None
    stall_timeout: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds is not None and not 0 <= seconds < threading.TIMEOUT_MAX:
                raise LaunchError(
                    f"{name} must be a number of seconds of at least 0, got {seconds}"
                )


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        exit_status: 0, or that of the task that failed first (128 + n where signal n ended it;
            where it failed because another one had left with 0 or does not answer: its own);
            128 + n where the run itself was ended by signal n, 124 where its time was up.
        failed_task: the root cause: the task that failed first, or that this one says has left,
            has failed before, or does not answer; None where none did.
        raised: the Python exception of that task, with its frames; "" where it was none.
        lost: that task does not answer: it had not ended by itself.
        ended_by: "tasks"; or what has ended them: "signal" or "timeout".
        returncodes: of each task; -n where signal n ended it, None where nothing could end it.
        last_lines: of each task, at most 20.
    """

    exit_status: int
    failed_task: str | None
    raised: str
    lost: bool
    ended_by: EndedBy
    returncodes: Mapping[str, int | None]
    last_lines: Mapping[str, tuple[str, ...]]


def run_plan(
    plan: LaunchPlan,
    limits: Limits | None = None,
    *,
    env: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    report: TextIO | None = None,
    stop: StopSignals | None = None,
    replaces: Replaces | None = None,
    start: StartProcess = start_process,
    names_pids: bool = False,
) -> RunResult:
    """Run every task of a plan to its end, and end every process that came of it.

    The first task that ends with anything but 0 is the root cause, unless its output names another
    one that it failed because of. The others get SIGTERM, and SIGKILL after the grace. The same
    happens on SIGINT, SIGTERM and SIGHUP, when this is called in the main thread, and when the time
    is up; a second signal kills at once. Where the plan has a coordinator, its success ends the
    run.

    Args:
        limits: None: those of `Limits()`.
        env: what the tasks' environment starts from; None: this process's.
        stream: where the tasks' lines go; None: standard output.
        report: where the launcher itself speaks; None: standard error.
        stop: the signals of several runs one after another; None: those of this run.
        replaces: what becomes of a task of `plan.replaceable` that fails; None: it fails the run.
        start: starts the process of a task.
        names_pids: names each task that starts, with its process id, on standard error.

    Raises:
        LaunchError: a program could not be started, or a log file not be written. What had
            started by then has been ended.
    """
    limits = limits or Limits()
    own = stop is None
    stop = stop or StopSignals()
    env = {**(os.environ if env is None else env), GRACE: f"{limits.grace:g}"}
    env[PREEMPTION_SIGNAL] = stop.preemption.name
    reporter = Printer(report or sys.stderr)
    tasks = Tasks(plan, env, Printer(stream or sys.stdout), reporter, start)
    run = _Run(plan, tasks, reporter, limits, stop, replaces, names_pids)
    with stop.handled() if own else contextlib.nullcontext():
        return run.run()


class _Phase(enum.Enum):
    RUNNING = "all tasks are at work"
    SETTLING = "a task has failed because of another one, which may be about to end"
    LINGERING = "the coordinator has succeeded; the others may end by themselves"
    ENDING = "SIGTERM was sent"
    KILLING = "SIGKILL was sent"


@dataclass
class _Run:
    """The state of a run. Events arrive in a queue; one thread decides."""

    plan: LaunchPlan
    tasks: Tasks
    report: Printer
    limits: Limits
    stop: StopSignals
    replaces: Replaces | None
    names_pids: bool
    # SimpleQueue, because its put may be called in a signal handler.
    events: queue.SimpleQueue[signal.Signals | tuple[TaskProcess, int]] = field(
        default_factory=queue.SimpleQueue
    )
    phase: _Phase = _Phase.RUNNING
    start: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    status: int = 0
    ended_by: EndedBy = "tasks"
    signalled: bool = False
    hurried: bool = False  # ended by a signal or the hard limit: readers must not hold it
    failed: TaskProcess | None = None  # the root cause
    lost: bool = False  # which had not ended by itself
    victim: tuple[TaskProcess, Blame] | None = None  # failed because of another
    others: Sequence[TaskProcess] = ()  # that were running when the ending began

    def run(self) -> RunResult:
        """Start, supervise, end."""
        self.stop.tell = self.events.put
        if self.stop.first is not None:  # while nothing ran
            self.events.put(self.stop.first)
        try:
            on_end = lambda task, code: self.events.put((task, code))  # noqa: E731
            self.tasks.start(on_end, names_pids=self.names_pids)
            self.start = time.monotonic()
            if self.limits.timeout is not None:
                self.deadline = self.start + self.limits.timeout
            if self.limits.stall_timeout:
                self.tasks.kill_stopped(self.limits.stall_timeout)
            while self.tasks.running() and self._handle_next():
                pass
            self._end_leftovers()
        finally:
            # Killing first: it closes the pipes that are still being read.
            self.tasks.end()
            self.tasks.close(self._output_given_up)
            self.stop.tell = None
        if self.stop.first is not None:
            self.ended_by = "signal"
        self._say_why()
        return RunResult(
            exit_status=self.status,
            failed_task=None if self.failed is None else self.failed.name,
            raised="" if not self.failed or self.lost else self.failed.output.raised(),
            lost=self.lost,
            ended_by=self.ended_by,
            returncodes={task.name: task.returncode for task in self.tasks.all},
            last_lines={task.name: tuple(task.output.last_lines) for task in self.tasks.all},
        )

    def _handle_next(self) -> bool:
        """Handle one event or the passing of a deadline; False when nothing more can be done."""
        wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            event = self.events.get(timeout=wait)
        except queue.Empty:
            return self._deadline_passed()
        if isinstance(event, signal.Signals):
            self._signalled(event)
        else:
            self._ended(*event)
        return True

    def _deadline_passed(self) -> bool:
        match self.phase:
            case _Phase.RUNNING:
                self.status, self.ended_by = _TIMED_OUT, "timeout"
                self.hurried = True
                self._begin_ending()
            case _Phase.LINGERING:
                self._begin_ending()
            case _Phase.SETTLING:
                self._root_cause(self._blamed)
            case _Phase.ENDING:
                self._kill()
            case _Phase.KILLING:
                return False
        return True

    def _signalled(self, number: signal.Signals) -> None:
        if self.signalled:
            self._kill()
            return
        self.signalled = self.hurried = True
        if self.phase in (_Phase.ENDING, _Phase.KILLING):
            self.report.write(
                f"tfdist: {number.name}: not started again; once more kills what is left at once\n"
            )
            return
        self.status, self.ended_by = self.stop.status, "signal"
        self.report.write(
            f"tfdist: {number.name}: ending {len(self.tasks.running())} tasks, for at most "
            f"{self._grace:g} s; once more kills them at once\n"
        )
        self._begin_ending()

    def _ended(self, task: TaskProcess, returncode: int) -> None:
        task.returncode = returncode
        task.ended_after = time.monotonic() - self.start
        if self.phase is _Phase.SETTLING and task is self._blamed:
            self._root_cause(task)
        if self.phase is _Phase.RUNNING:
            if returncode and self._is_replaced(task):
                return
            if returncode:
                self._failure(task)
            elif task.name == self.plan.coordinator:
                self.phase = _Phase.LINGERING
                lingers = time.monotonic() + self.limits.linger
                self.deadline = lingers if self.deadline is None else min(lingers, self.deadline)

    def _is_replaced(self, task: TaskProcess) -> bool:
        """Whether the others do without a task that has failed; it may have been started again."""
        if self.replaces is None or task.name not in self.plan.replaceable:
            return False
        status = shell_status(task.returncode or 0)
        blame = _blame(task) if status in (FAILED, RESTART) else None
        if blame is not None and blame.task != task.name:  # it is not the one to be replaced
            return False
        lasted = time.monotonic() - task.began
        does = self.replaces(task.name, status, task.output.raised(), lasted)
        if does == "start":
            self.tasks.start_again(task)
        return does != "fail"

    def _failure(self, task: TaskProcess) -> None:
        """The first failure; the cause may be another task of this run, which this one names."""
        blame = _blame(task)
        names = [each.name for each in self.tasks.all if each is not task]
        if blame is None or blame.task not in names:
            self._root_cause(task)
            return
        self.victim = task, blame
        if self._blamed.returncode is not None:
            self._root_cause(self._blamed)
            return
        self.phase = _Phase.SETTLING
        settled = time.monotonic() + _SETTLE
        self.deadline = settled if self.deadline is None else min(settled, self.deadline)

    @property
    def _blamed(self) -> TaskProcess:
        """The task that the victim names."""
        assert self.victim is not None
        return next(task for task in self.tasks.all if task.name == self.victim[1].task)

    def _root_cause(self, task: TaskProcess) -> None:
        self.failed, self.lost = task, task.returncode is None
        code = task.returncode or (self.victim[0].returncode if self.victim else 0)
        self.status = shell_status(code or 0) or 1
        self._begin_ending()

    def _begin_ending(self) -> None:
        self.phase = _Phase.ENDING
        self.deadline = time.monotonic() + self._grace
        running = self.tasks.running()
        self.others = [task for task in running if task is not self.failed]
        if self.failed is not None and running:
            name, did = self.failed.name, self._what_it_did
            ending = "all tasks" if self.lost else "the others"
            self.report.write(f"tfdist: {name} {did}; ending {ending}\n")
        self.tasks.signal_all(signal.SIGTERM)

    @property
    def _grace(self) -> float:
        """Seconds from SIGTERM to SIGKILL."""
        if self.status == PREEMPTED:
            return self.limits.grace
        return min(
            self.limits.grace, _GRACE_OF_CTRL_C if self.failed is None else _GRACE_OF_FAILURE
        )

    def _kill(self) -> None:
        self.phase = _Phase.KILLING
        self.deadline = time.monotonic() + 5.0  # then it is the kernel's fault, and is reported
        self.tasks.signal_all(signal.SIGKILL)

    def _end_leftovers(self) -> None:
        """Give what the tasks left behind (children of theirs) what remains of the grace."""
        if not self.tasks.leftovers():
            return
        if self.phase in (_Phase.RUNNING, _Phase.LINGERING):
            self._begin_ending()
        # Asked again and again: the end of what is not this process's own child is no event.
        while self.phase is _Phase.ENDING and self.tasks.leftovers() and not self._late():
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=0.05)
                if isinstance(event, signal.Signals):  # all tasks have ended
                    self._signalled(event)

    def _output_given_up(self) -> bool:
        """Whether a reader that does not read has had its time; asked after the last task."""
        while not self.events.empty():
            self.hurried |= isinstance(self.events.get(), signal.Signals)
        return self.hurried and self._late()

    def _late(self) -> bool:
        return time.monotonic() >= (self.deadline or 0.0)

    @property
    def _what_it_did(self) -> str:
        """The verb for the root cause."""
        if self.lost:
            return "does not answer"
        if self.victim is not None and self.failed is not None and self.failed.returncode == 0:
            return "left"
        return "was preempted" if self.status == PREEMPTED else "failed"

    def _say_why(self) -> None:
        if self.failed is not None:
            verb = self._what_it_did
            verb = f"{verb} first" if verb == "failed" else verb
            last_lines = tuple(self.failed.output.last_lines)
            self.report.write(
                failure_report(self.failed, verb, last_lines, self.others, self.victim)
            )
        elif self.ended_by == "timeout" and self.limits.timeout is not None:
            last = {task.name: tuple(task.output.last_lines) for task in self.others}
            self.report.write(timeout_report(self.limits.timeout, last))


def _blame(task: TaskProcess) -> Blame | None:
    """Whom a task that has ended blames for its failure."""
    task.output.wait()
    return task.output.blame
