"""The tasks of a run: started, listened to, and ended, whatever happens."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import LaunchPlan, TaskPlan, watchdog
from tfdist_ext.launch.guard import Guard
from tfdist_ext.launch.report import outcome
from tfdist_ext.testing.tasks import in_task, warm
from tfdist_ext.testing.tasks.task_error import task_error

__all__ = ["Results", "Supervision"]

_LINGER = 5.0  # seconds for servers to end after their coordinator
_STACKS = 0.5  # seconds to write the stacks in a hang


class Results(dict[str, Any]):
    """What the function returned, by name of task ("worker:0"); not of tasks that were ended.

    Attributes:
        outputs: what each task wrote to standard output and error.
    """

    outputs: dict[str, str]


@dataclass
class _Task:
    plan: TaskPlan
    attempt: int
    process: warm.WarmProcess
    connection: Connection
    output: Path
    result: Any = None
    error: str | None = None
    reported: bool = False  # its result or its error has come
    ended: bool = False
    killed: bool = False  # at the request of another task

    @property
    def name(self) -> str:
        return self.plan.name


@dataclass
class Supervision:
    """One run of a plan, from the start of its tasks to the end of the last.

    Attributes:
        plan: the tasks to start.
        call: the function that each task runs.
        args: its arguments.
        env: environment variables of all tasks.
        folder: for the output of the tasks.
        timeout: seconds until the tasks that still run are killed.
        on_message: called with a message of a task: (task, kind, content).
    """

    plan: LaunchPlan
    call: Callable[..., Any]
    args: tuple[Any, ...]
    env: dict[str, str]
    folder: Path
    timeout: float
    on_message: Callable[[str, str, Any], None]

    def __post_init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        self._began = time.monotonic()
        self._failed: list[str] = []
        self._guard = Guard(self.env)

    def run(self) -> Results:
        try:
            for plan in self.plan.tasks:
                self._start(plan)
            self._wait()
            self._raise_failures()
            results = Results({t.name: t.result for t in self._tasks.values() if t.reported})
            results.outputs = {task.name: _output(task) for task in self._tasks.values()}
            return results
        finally:
            for task in self._tasks.values():
                _kill(task)
            watchdog.signal_all(self._guard.marked(), signal.SIGKILL)
            self._guard.dismiss()

    def _start(self, plan: TaskPlan, attempt: int = 0) -> None:
        here, there = Pipe()
        output = self.folder / f"{plan.name.replace(':', '-')}.log"
        env = {**self._guard.env, **plan.env}
        wait_for_release = self.plan.coordinator is None
        task = (plan.name, attempt, there, str(output), env, wait_for_release, self.call, self.args)
        process = warm.start(in_task.run_and_report, *task, env=env)
        self._guard.add(process.pid)
        there.close()
        self._tasks[plan.name] = _Task(plan, attempt, process, here, output)

    def _wait(self) -> None:
        """Listen to the tasks until all have ended, one has failed, or the time is up."""
        deadline, coordinator = self._began + self.timeout, self.plan.coordinator
        released = False
        while not self._failed:
            running = [task for task in self._tasks.values() if not task.ended]
            if not running:
                return
            if coordinator and self._tasks[coordinator].ended and not released:
                released, deadline = True, min(deadline, time.monotonic() + _LINGER)
            if not coordinator and not released and all(t.reported for t in running):
                released = True
                for task in running:
                    with contextlib.suppress(OSError):
                        task.connection.send("end")
            ends = [end for task in running for end in (task.connection, task.process.sentinel)]
            ready = wait(ends, max(0.0, deadline - time.monotonic()))
            if not ready:
                if not (coordinator and released):
                    self._on_timeout([task for task in running if not task.reported] or running)
                return
            for task in running:
                if task.connection in ready and self._receive(task):
                    continue
                if task.connection in ready or task.process.sentinel in ready:
                    self._on_exit(task)

    def _receive(self, task: _Task) -> bool:
        """Take one message; False where none comes any more."""
        try:
            kind, value = task.connection.recv()
        except (EOFError, OSError):
            return False
        if kind == "result":
            task.result, task.reported = value, True
        elif kind == "error":
            task.error, task.reported = value, True
            self._failed.append(task.name)
        elif kind in ("kill", "restart"):
            answer = self._handle_request(kind, value, task)
            with contextlib.suppress(OSError):  # killed meanwhile by a third one
                task.connection.send(answer)
        else:
            self.on_message(task.name, kind, value)
        return True

    def _receive_all(self, task: _Task) -> None:
        """Take all messages that are there."""
        while not task.connection.closed and task.connection.poll(0) and self._receive(task):
            pass

    def _handle_request(self, kind: str, name: str, sender: _Task) -> Any:
        if name not in self._tasks:
            return LaunchError(f"there is no task {name}; there are {', '.join(self._tasks)}.")
        task = self._tasks[name]
        if task is sender:
            return LaunchError(f"{name} cannot {kind} itself; another task can.")
        self._receive_all(task)  # what it told before
        task.killed = True
        _kill(task)
        if kind == "restart":
            self._start(task.plan, task.attempt + 1)
        return None

    def _on_exit(self, task: _Task) -> None:
        self._receive_all(task)  # told just before the end
        task.process.join(5.0)
        task.ended = True
        if not task.reported and not task.killed:
            self._failed.append(task.name)
            task.error = f"its process ended: {outcome(task.process.exitcode)}."

    def _on_timeout(self, hung: list[_Task]) -> None:
        for task in hung:
            task.process.send_signal(in_task.SHOW_STACKS)
        time.sleep(_STACKS)
        for task in hung:
            self._failed.append(task.name)
            task.error = f"had not ended after {self.timeout:g} s; its stacks are in its output."

    def _raise_failures(self) -> None:
        if self._failed:
            errors = {name: self._tasks[name].error or "" for name in self._failed}
            raise task_error(errors, {task.name: _output(task) for task in self._tasks.values()})


def _output(task: _Task) -> str:
    return task.output.read_text(errors="replace") if task.output.exists() else ""


def _kill(task: _Task) -> None:
    """End the process and all that it has started."""
    watchdog.signal_group(task.process.pid, signal.SIGKILL)
    task.process.send_signal(signal.SIGKILL)
    task.process.join(5.0)
    task.connection.close()
    task.ended = True
