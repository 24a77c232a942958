"""The tasks of a run while they run: what all sets of them can do, and those of this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from tfdist_ext.launch.output import OutputPump, Printer
from tfdist_ext.launch.plan import TaskPlan
from tfdist_ext.launch.processes import ProcessSet, TaskProcess
from tfdist_ext.launch.report import Blame

__all__ = ["Ended", "LocalTasks", "RunningTask", "TaskSet"]


class RunningTask(Protocol):
    """A task that was started, here or on another machine.

    Attributes:
        name: as "worker:1".
        log: where its log file is, for a person; "" where it has none.
        returncode: None until its first process has ended; -n: signal n.
        began: when it was started, in monotonic time.
        ended_after: how long the run had lasted when it ended, in seconds.
        killed_because: why the launcher has ended it, or counts it as ended; "" where it does not.
    """

    returncode: int | None
    ended_after: float

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> str: ...
    @property
    def began(self) -> float: ...
    @property
    def killed_because(self) -> str: ...


# Called with a task and its return code, from any thread, at the moment it ends.
Ended: TypeAlias = Callable[[RunningTask, int], object]
_Task = TypeVar("_Task", bound=RunningTask, contravariant=True)


class TaskSet(Protocol[_Task]):
    """All tasks of one start of a run, and what they have started."""

    @property
    def tasks(self) -> Sequence[RunningTask]:
        """In the order of the plan."""
        ...

    def start(self, plans: Sequence[TaskPlan], ended: Ended) -> None:
        """Start them all.

        Raises:
            LaunchError: a program could not be started, or a log file not be written; `end` and
                `close` end what was.
        """
        ...

    def start_again(self, task: _Task) -> None:
        """Start another process in the place of a task that has ended."""
        ...

    def signal_all(self, number: int) -> None:
        """Send a signal to every task and to everything the tasks have started."""
        ...

    def leftovers(self) -> bool:
        """Whether something that the tasks have started is still there, or a task is."""
        ...

    def end(self) -> None:
        """Kill what is left, until nothing is."""
        ...

    def close(self, give_up: Callable[[], bool]) -> None:
        """Show what has been written until now, and give everything back; after `end`.

        Args:
            give_up: asked whether to wait for a slow reader of the output.
        """
        ...

    def blame(self, name: str) -> Blame | None:
        """Whom a task that has ended blames for its failure."""
        ...

    def raised(self, name: str) -> str:
        """The Python exception that a task which has ended has shown last, and its place."""
        ...

    def last_lines(self, name: str) -> tuple[str, ...]:
        """The last lines of a task's output."""
        ...

    def log_errors(self) -> dict[str, OSError]:
        """Task -> what has ended its log file before its output."""
        ...


class LocalTasks:
    """The tasks of this machine: processes and their output.

    Args:
        env: what their environment starts from.
        pump: reads their output.
        stall_timeout: seconds after which a task that is stopped is killed; 0: never.
        say_started: whether each task that starts is named on standard error, with its pid.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        pump: OutputPump,
        stall_timeout: float = 0.0,
        *,
        say_started: bool = False,
    ) -> None:
        self._processes = ProcessSet(env)
        self._pump = pump
        self._stall_timeout = stall_timeout
        self._stderr = Printer(sys.stderr) if say_started else None  # of this machine
        self._tell: Ended = lambda task, code: None

    @property
    def tasks(self) -> Sequence[TaskProcess]:
        return self._processes.tasks

    def start(self, plans: Sequence[TaskPlan], ended: Ended) -> None:
        self._tell = ended
        for plan in plans:
            self._add(self._processes.start(plan))
        self._pump.start()
        for task in self._processes.tasks:
            task.watch(self._ended)
        if self._stall_timeout:
            self._processes.kill_stopped(self._stall_timeout)

    def start_again(self, task: TaskProcess) -> None:
        again = self._processes.start_again(task)
        self._add(again)
        again.watch(self._ended)

    def _add(self, task: TaskProcess) -> None:
        self._pump.add(task.name, task.output, task.plan.log_file)
        if self._stderr is not None:
            self._stderr.write(f"tfdist: {task.name} started, pid {task.pid}\n")

    def _ended(self, task: TaskProcess, code: int) -> None:
        # A task is over when its first process is; what that leaves behind has no master.
        task.signal_group(signal.SIGTERM)
        self._pump.task_ended(task.name)
        self._tell(task, code)

    def signal_all(self, number: int) -> None:
        self._processes.signal_all(number)

    def leftovers(self) -> bool:
        return bool(self._processes.leftovers())

    def end(self) -> None:
        self._processes.end()

    def close(self, give_up: Callable[[], bool] = lambda: False) -> None:
        self._pump.close(give_up)
        self._processes.close()

    def blame(self, name: str) -> Blame | None:
        return self._pump.blame(name)

    def raised(self, name: str) -> str:
        return self._pump.raised(name)

    def last_lines(self, name: str) -> tuple[str, ...]:
        return self._pump.last_lines(name)

    def log_errors(self) -> dict[str, OSError]:
        return self._pump.log_errors()
