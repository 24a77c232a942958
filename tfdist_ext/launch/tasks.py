"""The tasks of one start of a run: their processes, and what those write."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from tfdist_ext.launch.output import OutputPump, Printer
from tfdist_ext.launch.plan import TaskPlan
from tfdist_ext.launch.processes import ProcessSet, TaskProcess
from tfdist_ext.launch.report import Blame

__all__ = ["Tasks"]


class Tasks:
    """The tasks of a run.

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
        self._on_end: Callable[[TaskProcess, int], object] = lambda task, code: None
        self._stderr = Printer(sys.stderr) if say_started else None  # of this machine

    @property
    def tasks(self) -> Sequence[TaskProcess]:
        """In the order of the plan."""
        return self._processes.tasks

    def start(
        self, plans: Sequence[TaskPlan], on_end: Callable[[TaskProcess, int], object]
    ) -> None:
        """Start them all.

        Args:
            on_end: called with a task and its return code, from any thread, when it ends.

        Raises:
            LaunchError: a program could not be started, or a log file not be written; `end` and
                `close` end what was.
        """
        self._on_end = on_end
        for plan in plans:
            self._add(self._processes.start(plan))
        self._pump.start()
        for task in self._processes.tasks:
            task.watch(self._ended)
        if self._stall_timeout:
            self._processes.kill_stopped(self._stall_timeout)

    def start_again(self, task: TaskProcess) -> None:
        """Start another process in the place of a task that has ended."""
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
        self._on_end(task, code)

    def signal_all(self, number: int) -> None:
        """Send a signal to every task and to everything the tasks have started."""
        self._processes.signal_all(number)

    def leftovers(self) -> bool:
        """Whether something that the tasks have started is still there, or a task is."""
        return bool(self._processes.leftovers())

    def end(self) -> None:
        """Kill what is left, until nothing is."""
        self._processes.end()

    def close(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Show what has been written until now, and give everything back; after `end`.

        Args:
            give_up: asked whether to wait for a slow reader of the output.
        """
        self._pump.close(give_up)
        self._processes.close()

    def blame(self, name: str) -> Blame | None:
        """Whom a task that has ended blames for its failure."""
        return self._pump.blame(name)

    def raised(self, name: str) -> str:
        """The Python exception that a task which has ended has shown last, and its place."""
        return self._pump.raised(name)

    def last_lines(self, name: str) -> tuple[str, ...]:
        """The last lines of a task's output."""
        return self._pump.last_lines(name)

    def log_errors(self) -> dict[str, OSError]:
        """Task -> what has ended its log file before its output."""
        return self._pump.log_errors()
