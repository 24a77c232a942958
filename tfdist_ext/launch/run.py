"""Running a plan: start the tasks, watch them, and leave nothing behind."""

from __future__ import annotations

import enum
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.output import OutputPump, Printer, wants_color
from tfdist_ext.launch.plan import LaunchPlan
from tfdist_ext.launch.processes import ProcessSet, TaskProcess
from tfdist_ext.launch.report import (
    Blame,
    failure_report,
    log_report,
    peer_failure_report,
    shell_status,
    timeout_report,
)

__all__ = ["RunResult", "run_plan"]

_TIMED_OUT = 124  # as coreutils' timeout does
_FILES_PER_TASK = 4  # its output twice, its log, the lock of its port
_FILES_BESIDE = 64
_SETTLE = 5.0  # seconds for the task that another one blames to end by itself


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        exit_status: 0, or that of the task that failed first (128 + n where signal n ended it;
            where it failed because another one had left with 0: its own);
            128 + n where the run itself was ended by signal n, 124 where its time was up.
        failed_task: the root cause: the task that failed first, or that this one says has left or
            failed before; None where none did.
        returncodes: of each task; -n where signal n ended it, None where nothing could end it.
        last_lines: of each task, at most 20.
    """

    exit_status: int
    failed_task: str | None
    returncodes: Mapping[str, int | None]
    last_lines: Mapping[str, tuple[str, ...]]


def run_plan(
    plan: LaunchPlan,
    *,
    env: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    report: TextIO | None = None,
    grace: float = 5.0,
    linger: float = 5.0,
    timeout: float | None = None,
) -> RunResult:
    """Run every task of a plan to its end, and end every process that came of it.

    The first task that ends with anything but 0 is the root cause, unless its output names another
    one that it failed because of. The others get SIGTERM, and SIGKILL after `grace`. The same
    happens on SIGINT, SIGTERM and SIGHUP, when this is called in the main thread, and when
    `timeout` is over; a second signal kills at once. Where the plan has a coordinator, its success
    ends the run: the others have `linger` to end by themselves.
    Services are ended when nothing else runs; one that ends before has failed, whatever its code.

    Args:
        env: what the tasks' environment starts from; None: this process's.
        stream: where the tasks' lines go; None: standard output.
        report: where the launcher itself speaks; None: standard error.
        grace: seconds between SIGTERM and SIGKILL.
        linger: seconds between the coordinator's success and SIGTERM for the others.
        timeout: seconds the whole run may take; None: any time.

    Raises:
        LaunchError: a program could not be started, or a log file not be written. What had
            started by then has been ended.
    """
    for name, seconds in (("grace", grace), ("linger", linger), ("timeout", timeout)):
        if seconds is not None and not 0 <= seconds < threading.TIMEOUT_MAX:
            raise LaunchError(f"{name} must be a number of seconds of at least 0, got {seconds}")
    _check_open_files(len(plan.tasks))
    env = os.environ if env is None else env
    stream = sys.stdout if stream is None else stream
    printer = Printer(stream)
    reporter = Printer(sys.stderr if report is None else report)
    names = [task.name for task in plan.tasks]
    pump = OutputPump(printer, names, color=wants_color(stream, env), report=reporter)
    run = _Run(
        plan,
        pump,
        reporter,
        grace=grace,
        linger=linger,
        timeout=timeout,
    )
    with run.signals():
        return run.run(env)


def _check_open_files(tasks: int) -> None:
    needed = _FILES_PER_TASK * tasks + _FILES_BESIDE
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise LaunchError(
            f"the limit of open files must be about {needed} for {tasks} tasks, got {limit}; ask"
            " for fewer tasks, or raise the limit (ulimit -n)"
        )


class _Phase(enum.Enum):
    RUNNING = "all tasks are at work"
    SETTLING = "a task has failed because of another one, which may be about to end"
    LINGERING = "the coordinator has succeeded; the others may end by themselves"
    ENDING = "SIGTERM was sent"
    KILLING = "SIGKILL was sent"


class _Run:
    """The state of a run. Events arrive in a queue; one thread decides."""

    def __init__(
        self,
        plan: LaunchPlan,
        pump: OutputPump,
        report: Printer,
        *,
        grace: float,
        linger: float,
        timeout: float | None,
    ) -> None:
        self._plan = plan
        self._pump = pump
        self._report = report
        self._grace = grace
        self._linger = linger
        self._timeout = timeout
        # SimpleQueue, because its put may be called in a signal handler.
        self._events: queue.SimpleQueue[signal.Signals | tuple[TaskProcess, int]] = (
            queue.SimpleQueue()
        )
        self._phase = _Phase.RUNNING
        self._start = time.monotonic()
        self._deadline = None if timeout is None else self._start + timeout
        self._status = 0
        self._hurried = False  # ended by a signal or the hard limit: readers must not hold it
        self._failed: TaskProcess | None = None
        self._failed_after = 0.0
        self._victim: tuple[TaskProcess, Blame, float] | None = None  # failed because of another
        self._ended_after: dict[str, float] = {}
        self._others: list[TaskProcess] = []  # that were running when the ending began

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP as events, where that is possible."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: nohup
            wanted.append(signal.SIGHUP)
        before = {
            number: signal.signal(number, lambda got, _: self._events.put(signal.Signals(got)))
            for number in wanted
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: a handler that was not set from Python cannot be given back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def run(self, env: Mapping[str, str]) -> RunResult:
        """Start, supervise, end."""
        self._processes = processes = ProcessSet(env)
        try:
            for plan in self._plan.tasks:
                task = processes.start(plan)
                self._pump.add(task.name, task.output, plan.log_file)
            self._pump.start()
            for task in processes.tasks:
                task.watch(lambda task, code: self._events.put((task, code)))
            while processes.running() and self._handle_next():
                pass
            self._end_leftovers()
        finally:
            # Killing first: it closes the pipes that the pump may still be reading.
            processes.end()
            self._pump.close(give_up=self._output_given_up)
            processes.close()
        self._say_why()
        self._report.write(log_report(self._pump.log_errors()))
        return RunResult(
            exit_status=self._status,
            failed_task=None if self._failed is None else self._failed.name,
            returncodes={task.name: task.returncode for task in processes.tasks},
            last_lines={task.name: self._pump.last_lines(task.name) for task in processes.tasks},
        )

    def _handle_next(self) -> bool:
        """Handle one event or the passing of a deadline; False when nothing more can be done."""
        wait = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            event = self._events.get(timeout=wait)
        except queue.Empty:
            return self._deadline_passed()
        if isinstance(event, signal.Signals):
            self._signalled(event)
        else:
            self._ended(*event)
        return True

    def _deadline_passed(self) -> bool:
        match self._phase:
            case _Phase.RUNNING:
                self._status = _TIMED_OUT
                self._hurried = True
                self._begin_ending()
            case _Phase.LINGERING:
                self._begin_ending()
            case _Phase.SETTLING:
                self._blame_victim()
            case _Phase.ENDING:
                self._kill()
            case _Phase.KILLING:
                return False
        return True

    def _signalled(self, number: signal.Signals) -> None:
        if self._phase in (_Phase.ENDING, _Phase.KILLING):
            self._kill()
            return
        self._status = 128 + number
        self._hurried = True
        self._report.write(
            f"tfdist: {number.name}: ending {len(self._processes.running())} tasks, for at most "
            f"{self._grace:g} s; once more kills them at once\n"
        )
        self._begin_ending()

    def _ended(self, task: TaskProcess, returncode: int) -> None:
        task.returncode = returncode
        # A task is over when its first process is; what that leaves behind has no master.
        task.signal_group(signal.SIGTERM)
        self._pump.task_ended(task.name)
        self._ended_after[task.name] = time.monotonic() - self._start
        if self._phase is _Phase.SETTLING:
            assert self._victim is not None
            if task.name == self._victim[1].task:
                self._root_cause(task)
            elif not self._processes.running():
                self._blame_victim()
        if self._phase is _Phase.RUNNING:
            if returncode or self._serves(task):
                self._failure(task)
            elif task.name == self._plan.coordinator:
                self._phase = _Phase.LINGERING
                self._deadline = time.monotonic() + self._linger
        if self._phase in (_Phase.RUNNING, _Phase.LINGERING):
            running = self._processes.running()
            if running and all(map(self._serves, running)):  # for nobody: they never end
                self._begin_ending()

    def _failure(self, task: TaskProcess) -> None:
        """The first failure; the cause may be another task, which this one names."""
        blame = self._pump.blame(task.name) if len(self._processes.tasks) > 1 else None
        if blame is None or blame.task == task.name:
            self._root_cause(task)
            return
        self._victim = task, blame, self._ended_after[task.name]
        of_run = {other.name: other for other in self._processes.tasks}
        cause = of_run.get(blame.task)
        if cause is not None and cause.returncode is None:
            self._phase = _Phase.SETTLING
            settled = time.monotonic() + _SETTLE
            self._deadline = settled if self._deadline is None else min(settled, self._deadline)
        elif cause is not None and cause.returncode == 0:
            self._root_cause(cause)
        else:
            self._blame_victim()

    def _blame_victim(self) -> None:
        """Its cause runs on, or is a task of another machine."""
        assert self._victim is not None
        self._root_cause(self._victim[0])

    def _root_cause(self, task: TaskProcess) -> None:
        self._failed = task
        self._failed_after = self._ended_after[task.name]
        code = task.returncode
        if not code and self._victim is not None:
            code = self._victim[0].returncode
        self._status = shell_status(code or 0) or 1
        self._begin_ending()

    def _serves(self, task: TaskProcess) -> bool:
        return task.name in self._plan.services

    def _begin_ending(self) -> None:
        self._phase = _Phase.ENDING
        self._deadline = time.monotonic() + self._grace
        self._others = self._processes.running()
        if self._failed is not None and self._others:
            how = "left" if self._left_early else "failed"
            self._report.write(f"tfdist: {self._failed.name} {how}; ending the others\n")
        self._processes.signal_all(signal.SIGTERM)

    def _kill(self) -> None:
        self._phase = _Phase.KILLING
        self._deadline = time.monotonic() + 5.0  # then it is the kernel's fault, and is reported
        self._processes.signal_all(signal.SIGKILL)

    def _end_leftovers(self) -> None:
        """Give what the tasks left behind (children of theirs) what remains of the grace."""
        if not self._processes.leftovers():
            return
        if self._phase in (_Phase.RUNNING, _Phase.LINGERING):
            self._begin_ending()
        # Asked again and again: the end of what is not this process's own child is no event.
        while self._phase is _Phase.ENDING and self._processes.leftovers():
            try:
                self._events.get(timeout=0.05)
            except queue.Empty:
                if self._deadline is None or time.monotonic() >= self._deadline:
                    return
            else:  # all tasks have ended, so this is a second signal
                return

    def _output_given_up(self) -> bool:
        """Whether a reader that does not read has had its time; asked after the last task."""
        while not self._events.empty():
            self._hurried |= isinstance(self._events.get(), signal.Signals)
        return self._hurried and time.monotonic() >= (self._deadline or 0.0)

    @property
    def _left_early(self) -> bool:
        """Whether the cause is a task that ended with 0 while others needed it."""
        if self._failed is None or self._victim is None:
            return False
        return self._failed.returncode == 0 and self._failed is not self._victim[0]

    def _say_who_was_needed(self) -> None:
        if self._victim is None:
            return
        task, blame, after = self._victim
        assert task.returncode is not None
        at = time.localtime(time.time() - (time.monotonic() - self._start - self._failed_after))
        self._report.write(
            peer_failure_report(
                task.name,
                task.returncode,
                after,
                blame,
                self._failed_after if self._left_early else None,
                time.strftime("%H:%M:%S", at),
            )
        )

    def _say_why(self) -> None:
        if self._failed is not None and self._failed.returncode is not None:
            self._say_who_was_needed()
            self._report.write(
                failure_report(
                    self._failed.name,
                    self._failed.returncode,
                    self._failed_after,
                    self._pump.last_lines(self._failed.name),
                    self._failed.plan.log_file,
                    {task.name: task.returncode for task in self._others},
                    verb="left" if self._left_early else "failed first",
                )
            )
        elif self._status == _TIMED_OUT and self._timeout is not None:
            self._report.write(
                timeout_report(
                    self._timeout,
                    {
                        task.name: self._pump.last_lines(task.name)
                        for task in self._others
                        if not self._serves(task)
                    },
                )
            )
