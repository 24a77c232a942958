"""The processes of a run: each task in a session of its own, and the watchdog beside them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import watchdog
from tfdist_ext.launch.exit_codes import PREEMPTION_SIGNAL
from tfdist_ext.launch.guard import Guard
from tfdist_ext.launch.plan import TaskPlan

__all__ = ["ProcessSet", "TaskProcess"]

_ENDS = "SIGTERM"  # what asks every process to end, as it always does
_LOOK_EVERY = 1.0  # seconds between two looks for tasks that are stopped
_UNKILLABLE = 5.0  # seconds; a process that SIGKILL has not ended by then will not end


class TaskProcess:
    """A task that was started. `returncode` is None until its first process has ended.

    Attributes:
        began: when it was started, in monotonic time.
        ended_after: how long the run had lasted when it ended, in seconds.
        killed_because: why the launcher has killed it, in words; "" where it has not.
        log: where its log file is; "" where it has none.
    """

    def __init__(self, plan: TaskPlan, popen: subprocess.Popen[bytes]) -> None:
        self.plan = plan
        self.name = plan.name
        self.returncode: int | None = None
        self.began = time.monotonic()
        self.ended_after = 0.0
        self.killed_because = ""
        self.log = "" if plan.log_file is None else str(plan.log_file)
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> int:
        """The descriptor its standard output and error are read from."""
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def watch(self, ended: Callable[[TaskProcess, int], None]) -> None:
        """Call `ended(self, returncode)` from a thread, at the moment the task ends."""
        # A thread a task, not one that polls them in turn: the order in which they end decides
        # which failure is the root cause.
        threading.Thread(
            target=lambda: ended(self, self._wait()), name=f"wait {self.name}", daemon=True
        ).start()

    def _wait(self) -> int:
        if not hasattr(os, "waitid"):  # macOS
            return self._popen.wait()
        # Not reaped yet: as long as the process is a zombie, the number of its group cannot be
        # given to somebody else, and the group can be signalled safely.
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the embedding process reaps its children elsewhere
            return self._popen.wait()
        assert info is not None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

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

    def close(self) -> None:
        """Reap the process, which has ended or was killed, and close its output."""
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a dead disk
            self._popen.wait(timeout=_UNKILLABLE)


class ProcessSet:
    """All processes of one run, and those that they start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.tasks: list[TaskProcess] = []
        self._guard = Guard(env)
        self._closed = threading.Event()

    def start(self, plan: TaskPlan) -> TaskProcess:
        """Start one task.

        Raises:
            LaunchError: the system refuses to start its program.
        """
        try:
            with _on_cores(plan.cores):
                popen = self._started(plan)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{plan.name} could not be started: {plan.argv[0]!r}: {error}; "
                "check that the program runs on this machine by itself"
            ) from error
        task = TaskProcess(plan, popen)
        self.tasks.append(task)
        self._guard.add(task.pid)
        return task

    def start_again(self, task: TaskProcess) -> TaskProcess:
        """Start another process in the place of one that has ended.

        Raises:
            LaunchError: the system refuses to start its program.
        """
        place = self.tasks.index(task)
        task.signal_group(signal.SIGKILL)  # what it has left behind
        self.tasks.pop(place).close()  # what it has written was read
        again = self.start(task.plan)
        self.tasks.insert(place, self.tasks.pop())
        return again

    def _started(self, plan: TaskPlan) -> subprocess.Popen[bytes]:
        name = self._guard.env.get(PREEMPTION_SIGNAL, _ENDS)
        # A scheduler sends that signal to every process. It must end none of them: a task that does
        # not save yet, a server, a child of the script's.
        ignoring = ("sh", "-c", f'trap \'\' {name.removeprefix("SIG")}; exec "$0" "$@"')
        return subprocess.Popen(
            plan.argv if name == _ENDS else (*ignoring, *plan.argv),
            # No standard input: several tasks cannot share a keyboard.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            # A session of its own: a terminal's Ctrl-C reaches the launcher only, and the task's
            # own children are in its group.
            start_new_session=True,
            env={"PYTHONUNBUFFERED": "1", **self._guard.env, **plan.env},
        )

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
        return [task for task in self.tasks if task.returncode is None]

    def leftovers(self) -> list[int]:
        """Processes of this run that are still there, tasks included."""
        return self._guard.marked()

    def signal_all(self, number: int) -> None:
        """Send a signal to every task and to everything the tasks have started."""
        for task in self.tasks:
            task.signal_group(number)
        groups = {task.pid for task in self.tasks}
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

    def close(self) -> None:
        """Dismiss the watchdog and reap everything; after `end`."""
        self._closed.set()
        self._guard.dismiss()
        for task in self.tasks:
            task.close()


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Scope in which this thread, and what it starts, runs on these cores alone; empty: on all."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
