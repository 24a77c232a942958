"""The tasks of one start of a run: each a process in a session of its own, watched to its end.

The processes that a task starts are in its process group, and end with it. A process that leaves
the group, as a daemon does, is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil

from tfdist_ext.errors import LaunchError
from tfdist_ext.failures import ERROR_FILE, Failure, failure_in
from tfdist_ext.launcher.exit_codes import PREEMPTION_SIGNAL
from tfdist_ext.launcher.output import Printer, TaskOutput
from tfdist_ext.launcher.plan import LaunchPlan, TaskPlan

_UNKILLABLE = 5.0  # seconds; a process that SIGKILL has not ended by then will not end


# (command, environment, descriptor for its output) -> the id of a process that leads a session of
# its own; a function that waits for its return code; and one that frees the id.
Started: TypeAlias = tuple[int, Callable[[], int], Callable[[], object]]
StartProcess: TypeAlias = Callable[[Sequence[str], Mapping[str, str], int], Started]


def start_process(argv: Sequence[str], env: Mapping[str, str], output: int) -> Started:
    """Start a program."""
    process = subprocess.Popen(
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

    def wait() -> int:
        if not hasattr(os, "waitid"):  # on some systems other than Linux
            return process.wait()
        # Not process.wait(), which frees the id: signals to the children would go to another group.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    return process.pid, wait, process.wait


class TaskProcess:
    """A task that was started.

    Args:
        wait: waits for the return code of the process.
        free: frees the id of the process after its end.
        error_file: the file in which the task writes why it fails.
        on_end: called with this task and its return code, from a thread, at the moment it ends.

    Attributes:
        pid: the process, which leads a session of its own.
        output: what the process writes.
        returncode: None until the process has ended; -n where signal n ended it.
        began: when it was started, in monotonic time.
        ended_after: how long the run had lasted when it ended, in seconds.
    """

    def __init__(
        self,
        plan: TaskPlan,
        pid: int,
        wait: Callable[[], int],
        free: Callable[[], object],
        output: TaskOutput,
        error_file: Path,
        on_end: Callable[[TaskProcess, int], object],
    ) -> None:
        self.plan = plan
        self.name = plan.name
        self.pid = pid
        self.output = output
        self.returncode: int | None = None
        self.began = time.monotonic()
        self.ended_after = 0.0
        self._error_file = error_file
        self._free = free
        self._is_reaped = False
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and its id was freed
            self._process = psutil.Process(pid)
        # One thread for each task, because the order in which tasks end decides which failure is
        # the root cause.
        self._waiting = threading.Thread(
            target=self._wait, args=(wait, on_end), name=f"wait {self.name}", daemon=True
        )
        self._waiting.start()

    def _wait(self, wait: Callable[[], int], on_end: Callable[[TaskProcess, int], object]) -> None:
        code = wait()
        self.signal_group(signal.SIGTERM)  # the children of the task end with it
        self.output.task_ended()
        on_end(self, code)

    @property
    def failure(self) -> Failure | None:
        """Why the task failed; None if it has not written a reason."""
        return failure_in(self._error_file)

    def reap(self) -> None:
        """Wait for the end of a process that was killed; no signal goes to it any more."""
        self._waiting.join(_UNKILLABLE)  # it may be stuck in the kernel, on a dead disk
        self._is_reaped = True
        if not self._waiting.is_alive():
            self._free()
        self.output.task_ended()

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                self._process.send_signal(number)  # not to another process with this id

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and to its children that are still there."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.owns_group:
                os.killpg(self.pid, number)

    @property
    def owns_group(self) -> bool:
        """Whether the id of the group is that of this task, and of no later process.

        The system gives no new process the id of a group that has members.
        """
        if self._is_reaped or self._process is None:
            return False
        return self._process.is_running() or not psutil.pid_exists(self.pid)


class Tasks:
    """The tasks of a run, and the processes that they start.

    Args:
        plan: the tasks.
        env: environment variables of all tasks.
        screen: shows the lines of tasks.
        report: shows the messages of the launcher.
        start: starts a process.
        error_folder: for the files in which tasks write why they fail.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        env: Mapping[str, str],
        screen: Printer,
        report: Printer,
        start: StartProcess,
        error_folder: Path,
    ) -> None:
        self.all: list[TaskProcess] = []
        self._plan = plan
        self._env = env
        self._watchdog = _Watchdog(env)
        self._screen = screen
        self._report = report
        self._start_process = start
        self._error_folder = error_folder
        self._width = max(len(task.name) for task in plan.tasks) + len("[] ")

    def start(self, on_end: Callable[[TaskProcess, int], object]) -> None:
        """Start all tasks.

        Args:
            on_end: called with a task and its return code, from any thread, when it ends.

        Raises:
            LaunchError: a program could not be started, or a log file cannot be written; `kill`
                ends the tasks that were started.
        """
        self._on_end = on_end
        for plan in self._plan.tasks:
            self.all.append(self._start(plan))
        self._report_ids(self.all)

    def start_again(self, task: TaskProcess) -> None:
        """Start another process in the place of one that has ended."""
        task.signal_group(signal.SIGKILL)
        task.reap()
        task.output.wait()
        self.all[self.all.index(task)] = again = self._start(task.plan, append=True)
        self._report_ids([again])

    def _report_ids(self, tasks: Sequence[TaskProcess]) -> None:
        if self._plan.shows_ids:
            ids = ", ".join(f"{task.name} {task.pid}" for task in tasks)
            self._report.write(f"tfdist: process ids: {ids}\n")

    def _start(self, plan: TaskPlan, *, append: bool = False) -> TaskProcess:
        output = TaskOutput(
            plan.name,
            prefix=f"[{plan.name}]".ljust(self._width),
            log_file=plan.log_file,
            append=append,
            screen=self._screen,
            report=self._report,
        )
        defaults = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}
        error_file = self._error_folder / plan.name
        error_file.unlink(missing_ok=True)
        env = {**defaults, **self._env, **plan.env, ERROR_FILE: str(error_file)}
        try:
            pid, wait, free = self._start_process(self._argv(plan), env, output.write_end)
            # Before anybody can see the output of the task.
            groups = [pid, *(task.pid for task in self.all if task.plan is not plan)]
            self._watchdog.watch(groups)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{plan.name} could not be started: {plan.argv[0]!r}: {error}; "
                "check that the program runs on this machine without tfdist"
            ) from error
        finally:
            output.start()
        return TaskProcess(plan, pid, wait, free, output, error_file, self._on_end)

    def _argv(self, plan: TaskPlan) -> tuple[str, ...]:
        name = self._env.get(PREEMPTION_SIGNAL, "SIGTERM")
        if name == "SIGTERM":
            return plan.argv
        # A scheduler sends this signal to every process. It must not end a task that does not save
        # yet, a server, or a child of the script.
        ignoring = f'trap \'\' {name.removeprefix("SIG")}; exec "$0" "$@"'
        return ("sh", "-c", ignoring, *plan.argv)

    def running(self) -> list[TaskProcess]:
        """The tasks that have not ended."""
        return [task for task in self.all if task.returncode is None]

    def are_there(self) -> bool:
        """Whether a task, or a process that a task has started, is still there."""
        return bool(self.running()) or self._has_leftovers()

    def _has_leftovers(self) -> bool:
        groups = {task.pid for task in self.all if task.owns_group}
        for process in psutil.process_iter() if groups else ():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess, PermissionError):
                is_member = os.getpgid(process.pid) in groups
                if is_member and process.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False

    def signal_all(self, number: int) -> None:
        """Send a signal to every task and to the processes that the tasks have started."""
        for task in self.all:
            task.signal_group(number)

    def kill(self) -> None:
        """Kill all remaining processes, and wait until they have ended."""
        self.signal_all(signal.SIGKILL)
        deadline = time.monotonic() + _UNKILLABLE
        while self._has_leftovers() and time.monotonic() < deadline:
            time.sleep(0.02)
        for task in self.all:  # afterwards, because the ids of the groups are free then
            task.reap()

    def close(self) -> None:
        """Dismiss the watchdog; after `kill`."""
        self._watchdog.dismiss()


class _Watchdog:
    """A process that kills groups of processes if this process is killed.

    PR_SET_PDEATHSIG would not do: it does not reach grandchildren, and it follows the thread that
    started the task.
    """

    # Each line names all groups. The end of the input is the end of the launcher.
    _SCRIPT = """
        trap '' HUP USR1 USR2
        while read -r line; do groups=$line; done
        [ -z "$groups" ] || kill -s KILL -- $groups
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        # Away from the launcher's group, so that what ends the launcher does not end the watchdog.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Kill these groups, and no others, if this process is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # killed from outside: the run continues
            self._process.stdin.write((" ".join(f"-{group}" for group in groups) + "\n").encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Stop watching: all processes have ended."""
        self.watch(())
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
