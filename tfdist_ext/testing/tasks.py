"""run_tasks: a function in each task of a real cluster on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import LaunchPlan, TaskPlan, addresses_needed, plan_local, reserve_ports
from tfdist_ext.testing import in_task, warm

__all__ = ["Results", "TasksFailed", "run_tasks", "supervise"]

_LINGER = 5.0  # seconds for servers to end after their coordinator
_STACKS = 0.5  # seconds to write the stacks in a hang
_TYPES = ("chief", "worker", "ps", "evaluator")


class TasksFailed(LaunchError):
    """A task failed, was killed, or did not end in time; the message has all that is known.

    Attributes:
        failed: names of the tasks, the first one is the root cause.
    """

    failed: tuple[str, ...] = ()


class Results(dict[str, Any]):
    """What the function returned, by name of task ("worker:0"); not of tasks that were ended.

    Attributes:
        outputs: what each task wrote to standard output and error.
    """

    outputs: dict[str, str]


def run_tasks(
    fn: Callable[..., Any],
    cluster: Mapping[str, int] | int,
    timeout: float = 60.0,
    *,
    args: tuple[Any, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Results:
    """Run `fn(*args)` once in each task of a cluster of processes on this machine.

    Each task has TF_CONFIG of its own, and a TensorFlow that is imported and has not started. Where
    there are parameter servers, the coordinator's success is that of all: what does not end within
    seconds after it is ended.

    Args:
        fn: a function at the top level of a module.
        cluster: numbers of tasks, {"worker": 2, "ps": 1}; or that of workers. With ps there is a
            chief, too: the coordinator.
        timeout: seconds for all. Then each task's stacks are written to its output, and all end.
        env: what the tasks' environment starts from; None: this process's.

    Returns:
        What `fn` returned in each task, by name: {"worker:0": ..., "worker:1": ...}.

    Raises:
        LaunchError: no cluster can be of these tasks, or `fn` cannot be sent to them.
        TasksFailed: a task raised (its traceback is in the message), was killed, or hung.
    """
    return supervise(fn, cluster, timeout, args=args, env=env)


def supervise(
    fn: Callable[..., Any],
    cluster: Mapping[str, int] | int | None,
    timeout: float,
    *,
    args: tuple[Any, ...] = (),
    env: Mapping[str, str] | None = None,
    told: Callable[[str, str, Any], None] = lambda task, kind, value: None,
    logical_cpus: int = 1,
) -> Results:
    """`run_tasks` for who also wants to hear what tasks tell (`told(task, kind, value)`).

    Without a cluster (None) it is one process.
    """
    counts = {} if cluster is None else _counts(cluster)
    needed = addresses_needed(**counts) if counts else 0
    env = dict(os.environ if env is None else env)
    with reserve_ports(needed) as ports, tempfile.TemporaryDirectory() as folder:
        if counts:
            plan = plan_local([sys.executable], **counts, ports=ports, env=env)
        else:
            plan = LaunchPlan((TaskPlan("process", (sys.executable,)),))
        call = functools.partial(_call, logical_cpus, fn)
        run = _Run(plan, call, args, env, Path(folder), timeout, told)
        return run.run()


def _call(logical_cpus: int, fn: Callable[..., Any], *args: Any) -> Any:
    if logical_cpus > 1:
        from tfdist_ext.testing.devices import logical_cpus as make

        make(logical_cpus)
    return fn(*args)


def _counts(cluster: Mapping[str, int] | int) -> dict[str, Any]:
    given = {"worker": cluster} if isinstance(cluster, int) else dict(cluster)
    if unknown := [name for name in given if name not in _TYPES]:
        raise LaunchError(
            f"a cluster has tasks of the types {', '.join(_TYPES)}; {unknown[0]!r} arrived."
        )
    for name, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise LaunchError(f"{name} is a number of tasks; {count!r} arrived.")
    for name in ("chief", "evaluator"):
        if given.get(name, 0) > 1:
            raise LaunchError(f"there is one {name} at most; {given[name]} arrived.")
    return {
        "workers": given.get("worker", 0),
        "chief": bool(given["chief"]) if "chief" in given else None,
        "ps": given.get("ps", 0),
        "evaluator": bool(given.get("evaluator", 0)),
    }


@dataclass
class _Task:
    name: str
    attempt: int
    process: BaseProcess
    connection: Connection
    output: Path
    result: Any = None
    error: str | None = None
    done: bool = False  # it has told its result, or its error
    ended: bool = False
    killed: bool = False  # because the test asked for it


class _Run:
    def __init__(
        self,
        plan: LaunchPlan,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        env: dict[str, str],
        folder: Path,
        timeout: float,
        told: Callable[[str, str, Any], None],
    ):
        self._plan = {task.name: task for task in plan.tasks}
        self._coordinator = plan.coordinator
        self._call, self._args, self._env, self._folder = call, args, env, folder
        self._timeout, self._told = timeout, told
        self._tasks: dict[str, _Task] = {}
        self._began = time.monotonic()
        self._failed: list[str] = []

    def run(self) -> Results:
        try:
            for name in self._plan:
                self._start(name)
            self._until_the_end()
            self._raise_what_failed()
            results = Results({t.name: t.result for t in self._tasks.values() if t.done})
            results.outputs = {task.name: _text(task) for task in self._tasks.values()}
            return results
        finally:
            for task in self._tasks.values():
                _kill(task)

    def _start(self, name: str, attempt: int = 0) -> None:
        here, there = Pipe()
        output = self._folder / f"{name.replace(':', '-')}.log"
        env = {**self._env, **self._plan[name].env}
        stay = self._coordinator is None
        process = warm.start(
            in_task.run,
            name,
            attempt,
            there,
            str(output),
            env,
            stay,
            self._call,
            self._args,
            env=env,
        )
        there.close()
        self._tasks[name] = _Task(name, attempt, process, here, output)

    def _until_the_end(self) -> None:
        """Listen to the tasks until all have ended, one has failed, or the time is up."""
        deadline = self._began + self._timeout
        released = False
        while not self._failed:
            running = [task for task in self._tasks.values() if not task.ended]
            if not running:
                return
            if self._coordinator and self._tasks[self._coordinator].ended and not released:
                released, deadline = True, min(deadline, time.monotonic() + _LINGER)
            if not self._coordinator and not released and all(t.done for t in running):
                released = True
                for task in running:
                    with contextlib.suppress(OSError):
                        task.connection.send("end")
            ready = wait(
                [each for task in running for each in _waitables(task)],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                if not (self._coordinator and released):
                    self._hung([task for task in running if not task.done] or running)
                return
            for task in running:
                if task.connection in ready and self._hear(task):
                    continue
                if task.connection in ready or task.process.sentinel in ready:
                    self._ended(task)

    def _hear(self, task: _Task) -> bool:
        """Take one message; False where none comes any more."""
        try:
            kind, value = task.connection.recv()
        except (EOFError, OSError):
            return False
        if kind == "result":
            task.result, task.done = value, True
        elif kind == "error":
            task.error, task.done = value, True
            self._failed.append(task.name)
        elif kind in ("kill", "restart"):
            task.connection.send(self._asked(kind, value))
        else:
            self._told(task.name, kind, value)
        return True

    def _asked(self, kind: str, name: str) -> Any:
        if name not in self._tasks:
            return LaunchError(f"there is no task {name}; there are {', '.join(self._tasks)}.")
        task = self._tasks[name]
        task.killed = True
        _kill(task)
        if kind == "restart":
            self._start(name, task.attempt + 1)
        return None

    def _ended(self, task: _Task) -> None:
        while not task.connection.closed and task.connection.poll(0) and self._hear(task):
            pass  # told just before the end
        task.process.join(5.0)
        task.ended = True
        if not task.done and not task.killed:
            self._failed.append(task.name)
            task.error = f"its process ended with {_words(task.process.exitcode)}."

    def _hung(self, hung: list[_Task]) -> None:
        for task in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(task.process.pid or 0, in_task.SHOW_STACKS)
        time.sleep(_STACKS)
        for task in hung:
            self._failed.append(task.name)
            task.error = f"had not ended after {self._timeout:g} s; its stacks are in its output."

    def _raise_what_failed(self) -> None:
        if not self._failed:
            return
        lines = []
        for name in self._failed:
            lines.append(f"{name}: {self._tasks[name].error}")
        for task in self._tasks.values():
            if text := _text(task).strip():
                lines.append(f"---- output of {task.name}\n{text[-6000:]}")
        error = TasksFailed("\n".join(lines))
        error.failed = tuple(self._failed)
        raise error


def _waitables(task: _Task) -> Iterator[Any]:
    yield task.connection
    yield task.process.sentinel


def _text(task: _Task) -> str:
    return task.output.read_text(errors="replace") if task.output.exists() else ""


def _words(status: int | None) -> str:
    if status is None or status >= 0:
        return f"status {status}"
    return signal.Signals(-status).name


def _kill(task: _Task) -> None:
    """End the process and all that it has started."""
    pid = task.process.pid
    if pid is not None and task.process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        task.process.kill()
    task.process.join(5.0)
    task.connection.close()
    task.ended = True
