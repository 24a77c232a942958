"""The tasks of one start of a run: each a process in a session of its own, watched to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import watchdog
from tfdist_ext.launch.exit_codes import PREEMPTION_SIGNAL
from tfdist_ext.launch.output import Printer, TaskOutput
from tfdist_ext.launch.plan import LaunchPlan, TaskPlan

__all__ = ["Process", "StartProcess", "TaskProcess", "Tasks", "start_process"]

_ENDS = "SIGTERM"  # what asks every process to end, as it always does
_LOOK_EVERY = 1.0  # seconds between two looks for tasks that are stopped
_UNKILLABLE = 5.0  # seconds; a process that SIGKILL has not ended by then will not end


class Process(Protocol):
    """What the launcher uses of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...


# (command, environment, descriptor for its output) -> a process that leads a session of its own.
StartProcess: TypeAlias = Callable[[Sequence[str], Mapping[str, str], int], Process]


def start_process(argv: Sequence[str], env: Mapping[str, str], output: int) -> Process:
    """Start a program."""
    return subprocess.Popen(
        argv,
        # No standard input: several tasks cannot share a keyboard.
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # A session of its own: a terminal's Ctrl-C reaches the launcher only, and the task's
        # own children are in its group.
        start_new_session=True,
        env=env,
    )


class TaskProcess:
    """A task that was started.

    Args:
        on_end: called with this task and its return code, from a thread, at the moment it ends.

    Attributes:
        output: what it writes.
        returncode: None until its first process has ended; -n where signal n ended it.
        began: when it was started, in monotonic time.
        ended_after: how long the run had lasted when it ended, in seconds.
        killed_because: why the launcher has killed it, in words; "" where it has not.
        log: where its log file is; "" where it has none.
    """

    def __init__(
        self,
        plan: TaskPlan,
        process: Process,
        output: TaskOutput,
        on_end: Callable[[TaskProcess, int], object],
    ) -> None:
        self.plan = plan
        self.name = plan.name
        self.pid = process.pid
        self.output = output
        self.returncode: int | None = None
        self.began = time.monotonic()
        self.ended_after = 0.0
        self.killed_because = ""
        self.log = "" if plan.log_file is None else str(plan.log_file)
        self._process = process
        # A thread for each task, not one that polls them in turn: the order in which they end
        # decides which failure is the root cause.
        self._waiting = threading.Thread(
            target=self._wait, args=(on_end,), name=f"wait {self.name}", daemon=True
        )
        self._waiting.start()

    def _wait(self, on_end: Callable[[TaskProcess, int], object]) -> None:
        code = self._process.wait()
        # A task is over when its first process is; what that leaves behind has no master.
        self.signal_group(signal.SIGTERM)
        self.output.task_ended()
        on_end(self, code)

    def reap(self) -> None:
        """Wait for the end of a process that was killed."""
        self._waiting.join(_UNKILLABLE)  # it may be stuck in the kernel, on a dead disk

    def signal_group(self, number: int) -> None:
        """Send a signal to the task and all it has started, as far as they are still there."""
        watchdog.signal_group(self.pid, number)

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped (SIGSTOP); False where there is no /proc."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] == "T"  # "t": a debugger holds it


class Tasks:
    """The tasks of a run, and the processes that they start.

    Args:
        plan: the run.
        env: what their environment starts from.
        screen: shows their lines.
        report: shows what the launcher itself says.
        start: starts a process.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        env: Mapping[str, str],
        screen: Printer,
        report: Printer,
        start: StartProcess,
    ) -> None:
        self.all: list[TaskProcess] = []
        self._plan = plan
        self._guard = watchdog.Guard(env)
        self._screen = screen
        self._report = report
        self._start_process = start
        self._width = max(len(task.name) for task in plan.tasks) + len("[] ")
        self._closed = threading.Event()

    def start(self, on_end: Callable[[TaskProcess, int], object], *, names_pids: bool) -> None:
        """Start them all.

        Args:
            on_end: called with a task and its return code, from any thread, when it ends.
            names_pids: whether each is named on standard error, with its process id.

        Raises:
            LaunchError: a program could not be started, or a log file not be written; `end` and
                `close` end what was.
        """
        self._on_end = on_end
        self._names_pids = names_pids
        for plan in self._plan.tasks:
            self.all.append(self._start(plan))

    def start_again(self, task: TaskProcess) -> None:
        """Start another process in the place of one that has ended."""
        task.signal_group(signal.SIGKILL)  # what it has left behind
        task.output.wait()
        self.all[self.all.index(task)] = self._start(task.plan, append=True)

    def _start(self, plan: TaskPlan, *, append: bool = False) -> TaskProcess:
        output = TaskOutput(
            plan.name,
            prefix=f"[{plan.name}]".ljust(self._width),
            log_file=plan.log_file,
            append=append,
            screen=self._screen,
            report=self._report,
        )
        env = {"PYTHONUNBUFFERED": "1", **self._guard.env, **plan.env}
        try:
            process = self._start_process(self._argv(plan), env, output.write_end)
            if self._names_pids:
                self._report.write(f"tfdist: {plan.name} started, pid {process.pid}\n")
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{plan.name} could not be started: {plan.argv[0]!r}: {error}; "
                "check that the program runs on this machine by itself"
            ) from error
        finally:
            output.start()
        self._guard.add(process.pid)
        return TaskProcess(plan, process, output, self._on_end)

    def _argv(self, plan: TaskPlan) -> tuple[str, ...]:
        name = self._guard.env.get(PREEMPTION_SIGNAL, _ENDS)
        if name == _ENDS:
            return plan.argv
        # A scheduler sends that signal to every process. It must end none of them: a task that does
        # not save yet, a server, a child of the script's.
        ignoring = f'trap \'\' {name.removeprefix("SIG")}; exec "$0" "$@"'
        return ("sh", "-c", ignoring, *plan.argv)

    def kill_stopped(self, after: float) -> None:
        """Kill each task that is stopped for so many seconds, from now on.

        Others may not notice it: before its servers listen, a task that is stopped is one that is
        late.
        """

        def look() -> None:
            looks: dict[TaskProcess, int] = {}
            # Looks are counted, as this process may have been stopped itself.
            while not self._closed.wait(_LOOK_EVERY):
                looks = {task: looks.get(task, 0) + 1 for task in self.running() if task.is_stopped}
                for task, count in looks.items():
                    if count * _LOOK_EVERY >= after and not task.killed_because:
                        task.killed_because = (
                            f"killed by tfdist, as it was stopped (SIGSTOP) for {after:g} s"
                            " (--stall-timeout)"
                        )
                        task.signal_group(signal.SIGKILL)

        threading.Thread(target=look, name="stopped tasks", daemon=True).start()

    def running(self) -> list[TaskProcess]:
        """The tasks that have not ended."""
        return [task for task in self.all if task.returncode is None]

    def leftovers(self) -> list[int]:
        """Processes of this run that are still there, tasks included."""
        return self._guard.marked()

    def signal_all(self, number: int) -> None:
        """Send a signal to every task and to everything the tasks have started."""
        for task in self.all:
            task.signal_group(number)
        groups = {task.pid for task in self.all}
        outside = [pid for pid in self.leftovers() if _group_of(pid) not in groups]
        watchdog.signal_all(outside, number)

    def end(self) -> None:
        """Kill what is left, until nothing is."""
        deadline = time.monotonic() + _UNKILLABLE
        self.signal_all(signal.SIGKILL)
        # Again, for what was being started by a process that is dead by now.
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.02)
            self.signal_all(signal.SIGKILL)

    def close(self, give_up: Callable[[], bool]) -> None:
        """Show what has been written until now, and dismiss the watchdog; after `end`.

        A reader of the output may take its time (a pager, Ctrl-S).

        Args:
            give_up: asked whether to wait for it.
        """
        self._closed.set()
        for task in self.all:
            task.reap()
            task.output.task_ended()
            while not task.output.wait(0.05) and not give_up():
                pass
        self._guard.dismiss()


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
