"""The tasks of all machines, as node 0 sees them: those of its own, and those that it hears of."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.machines.connection import Link
from tfdist_ext.launch.plan import DATA_SERVICE, TaskPlan
from tfdist_ext.launch.report import Blame
from tfdist_ext.launch.task_sets import Ended, LocalTasks, RunningTask

__all__ = ["MachinesTasks", "RemoteTask"]

_TO_START = 60.0  # seconds for a node to start its tasks
_TO_END = 20.0  # seconds for a node to end what is left, and to show it


@dataclass(eq=False)
class RemoteTask:
    """A task of another machine; as `RunningTask`.

    Attributes:
        blame: whom it blames for its end.
        raised: the Python exception that it has shown last, and its place.
        last_lines: of its output, once it has ended.
    """

    plan: TaskPlan
    log: str = ""
    returncode: int | None = None
    began: float = field(default_factory=time.monotonic)
    ended_after: float = 0.0
    killed_because: str = ""
    blame: Blame | None = None
    raised: str = ""
    last_lines: tuple[str, ...] = ()
    is_over: bool = False  # its end was told

    @property
    def name(self) -> str:
        return self.plan.name


class MachinesTasks:
    """The tasks of one start on all machines; a `TaskSet`.

    Args:
        local: those of this machine, node 0.
        links: node -> the connection to it.
        places: worker -> its place among the workers of its node.
        start_number: how many starts were before this one.
    """

    def __init__(
        self,
        local: LocalTasks,
        links: Mapping[int, Link],
        places: Mapping[str, int],
        start_number: int,
    ) -> None:
        self.local = local
        self._links = dict(links)
        self._places = places
        self._start_number = start_number
        self._remote: dict[str, RemoteTask] = {}
        self._order: list[str] = []
        self._ended: Ended = lambda task, code: None
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, str] = {}  # node -> what is wrong, "" where its tasks have started
        self._waits_for: set[int] = set()  # nodes that have not ended what was theirs

    @property
    def tasks(self) -> Sequence[RunningTask]:
        known: dict[str, RunningTask] = {task.name: task for task in self.local.tasks}
        known |= self._remote
        return [known[name] for name in self._order if name in known]

    def start(self, plans: Sequence[TaskPlan], ended: Ended) -> None:
        self._ended = ended
        self._order = [plan.name for plan in plans]
        theirs: dict[int, list[TaskPlan]] = {}
        for plan in plans:
            if plan.node:
                theirs.setdefault(plan.node, []).append(plan)
                self._remote[plan.name] = RemoteTask(plan)
        self._links = {node: link for node, link in self._links.items() if node in theirs}
        self._waits_for = set(self._links)
        for node, link in self._links.items():
            message = {
                "tasks": [self._described(plan) for plan in theirs[node]],
                "names": self._order,
                "start": self._start_number,
            }
            link.send({"run": message})
            if link.is_lost:
                self.lose(link, "it has closed the connection")
        self.local.start([plan for plan in plans if not plan.node], ended)
        wrong = self._wait(lambda: set(self._links) <= set(self._answers), _TO_START)
        if wrong:
            raise LaunchError(wrong)

    def _described(self, plan: TaskPlan) -> dict[str, Any]:
        """What a node needs to know of one of its tasks; its command it knows itself."""
        service = list(plan.argv[3:]) if "TF_CONFIG" not in plan.env else None
        env = {name: plan.env[name] for name in ("TF_CONFIG", DATA_SERVICE) if name in plan.env}
        place = self._places.get(plan.name)
        return {"name": plan.name, "env": env, "service": service, "place": place}

    def _wait(self, done: Callable[[], bool], seconds: float) -> str:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not done() and time.monotonic() < deadline:
                self._changed.wait(0.1)
            return next((wrong for wrong in self._answers.values() if wrong), "")

    def hear(self, link: Link, message: dict[str, Any]) -> None:
        """A message of a node; of what this process does not expect nothing follows."""
        node = link.node
        if self._links.get(node) is not link:
            return
        if "started" in message or "failed" in message:
            wrong = message.get("failed")
            self._answer(node, f"{link}: {wrong}" if wrong else "")
        elif "over" in message:
            with self._changed:
                self._waits_for.discard(node)
                self._changed.notify_all()
        elif isinstance(told := message.get("ended"), dict):
            task = self._remote.get(str(told.get("task")))
            if task is not None and task.plan.node == node:
                task.log = f"{link.host}:{told['log']}" if told.get("log") else ""
                task.raised = str(told.get("raised", ""))
                task.last_lines = tuple(map(str, told.get("last_lines", ())))
                task.killed_because = str(told.get("killed_because", ""))
                blame = told.get("blame")
                task.blame = Blame(*map(str, blame)) if blame else None
                self._end(task, int(told.get("code", 1)))

    def _answer(self, node: int, wrong: str) -> None:
        with self._changed:
            self._answers.setdefault(node, wrong)
            self._changed.notify_all()

    def _end(self, task: RemoteTask, code: int) -> None:
        with self._lock:
            if task.is_over:
                return
            task.is_over = True
        self._ended(task, code)

    def lose(self, link: Link, why: str) -> None:
        """A node is lost, and its tasks with it."""
        if self._links.get(link.node) is not link:
            return
        for task in list(self._remote.values()):
            if task.plan.node == link.node and not task.is_over:
                task.killed_because = f"lost with its machine, {link}: {why}"
                self._end(task, -signal.SIGKILL)
        self._answer(link.node, "")
        with self._changed:
            self._waits_for.discard(link.node)
            self._changed.notify_all()

    def start_again(self, task: Any) -> None:
        if not isinstance(task, RemoteTask):
            self.local.start_again(task)
            return
        again = RemoteTask(task.plan)
        self._remote[task.name] = again
        link = self._links[task.plan.node]
        link.send({"again": task.name})
        if link.is_lost:
            self.lose(link, "it has closed the connection")

    def signal_all(self, number: int) -> None:
        for link in self._links.values():
            link.send({"signal": int(number)})
        self.local.signal_all(number)

    def leftovers(self) -> bool:
        return self.local.leftovers()  # other machines end theirs when they are told to `end`

    def end(self) -> None:
        for link in self._links.values():
            link.send({"end": True})
        self.local.end()

    def close(self, give_up: Callable[[], bool]) -> None:
        self.local.close(give_up)
        self._wait(lambda: not self._waits_for, _TO_END)

    def blame(self, name: str) -> Blame | None:
        task = self._remote.get(name)
        return self.local.blame(name) if task is None else task.blame

    def raised(self, name: str) -> str:
        task = self._remote.get(name)
        return self.local.raised(name) if task is None else task.raised

    def last_lines(self, name: str) -> tuple[str, ...]:
        task = self._remote.get(name)
        return self.local.last_lines(name) if task is None else task.last_lines

    def log_errors(self) -> dict[str, OSError]:
        return self.local.log_errors()  # each machine tells of its own
