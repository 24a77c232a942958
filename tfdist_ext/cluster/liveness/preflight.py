"""Before a cluster starts: is every task there, at its address, with the same cluster and versions?

TensorFlow waits silently for a task that never comes, and hangs later where two tasks were started
with different clusters or numbers of GPUs. So the tasks talk before its servers start:

1. Every task reports itself to the first one (the leader), again and again, until the leader
   answers "go" or what is wrong. So all tasks get the same result.
2. The leader asks at the address of each task, whether the process that has reported answers there.

A task or leader where TensorFlow's server answers has started already.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tfdist_ext.cluster.liveness.task_info import TaskInfo, differences, tasks_of
from tfdist_ext.cluster.liveness.wire import (
    ABSENT,
    READY,
    STARTED,
    WHY,
    Connection,
    Endpoint,
    Message,
)

__all__ = ["UNKNOWN", "Late", "PreflightError", "preflight"]

UNKNOWN = "unknown"  # the state of a task that the leader alone can know
Late = Mapping[str, str]  # task -> state, of the tasks that are not ready

_STEP = 0.25  # seconds between two tries
_ASK = 2.0  # seconds for an answer
_LINGER = 5.0  # seconds for the others to get the result
_AT_ONCE = 64  # addresses that the leader tries in one step
_NAMED = 5  # tasks in a sentence
_LISTED = 20  # late tasks in an answer of the leader


class PreflightError(Exception):
    """Why the cluster cannot start.

    Attributes:
        missing: the tasks that did not answer in time, for a message; "" if all did.
    """

    def __init__(self, *reasons: str, missing: str = "") -> None:
        super().__init__("; ".join(reasons) or f"no answer from {missing}")
        self.missing = missing


def preflight(
    info: TaskInfo,
    *,
    wait: float,
    show: Callable[[Late], None] = lambda late: None,
) -> Endpoint:
    """Return when all tasks of the cluster are there, and agree; every task calls this.

    Args:
        info: of this task.
        wait: seconds for the others to come.
        show: called about every second with the tasks that are not ready yet (the first few of
            many).

    Returns:
        The endpoint of this task, which still listens.

    Raises:
        PreflightError: this task's port is in use, a task is missing or its name cannot be
            resolved, or they do not agree; the same on every task.
    """
    tasks = tasks_of(info.jobs)
    leads = info.task == next(iter(tasks))
    deadline = time.monotonic() + wait
    party = _Leader(info, tasks, show) if leads else _Follower(info, tasks, show)
    try:
        endpoint = Endpoint(tasks[info.task], party.answer)
    except OSError as error:
        raise PreflightError(
            f"port of {info.task} ({tasks[info.task]}) must be free, got one in use: end what uses"
            " it, or give the task another port"
        ) from error
    try:
        party.wait_for_all(deadline)
    except BaseException:
        endpoint.close()
        raise
    return endpoint


class _Leader:
    """The first task: knows which tasks have reported, and tells all of them the result."""

    def __init__(self, info: TaskInfo, tasks: dict[str, str], show: Callable[[Late], None]) -> None:
        self._info = info
        self._tasks = tasks
        self._show = show
        self._lock = threading.Lock()
        self._states = dict.fromkeys(tasks, ABSENT) | {info.task: READY}
        self._reported: dict[str, tuple[str, float]] = {}  # task -> key of its process, when
        self._errors: list[str] = []
        self._result: Message = {}
        self._uninformed: set[str] = set()  # tasks that have not got the result

    def answer(self, message: Message) -> Message:
        """The answer to the report of a task."""
        task, key, now = str(message["task"]), str(message["key"]), time.monotonic()
        jobs, versions, devices = (dict(message[key]) for key in ("jobs", "versions", "devices"))
        other = TaskInfo(task, jobs, versions, devices)
        found = differences(self._info, other)
        with self._lock:
            before, when = self._reported.get(task, (key, now))
            if before != key and now - when < _ASK:
                found.append(f"two processes say that they are {task}")
            self._reported[task] = key, now
            self._errors += [error for error in found if error not in self._errors]
            if self._result:
                self._uninformed.discard(task)
                return self._result
        late = {each: state for each, state in self._states.items() if state != READY}
        return {"late": dict(list(late.items())[:_LISTED])}

    def wait_for_all(self, deadline: float) -> None:
        """Return when all tasks are ready, and know it."""
        shown = 0.0
        connections = {task: Connection(address) for task, address in self._tasks.items()}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while True:
                late = self._late()
                for task, state in pool.map(
                    lambda task: (task, self._state_of(task, connections[task])), late[:_AT_ONCE]
                ):
                    self._states[task] = state
                late = self._late()
                if self._errors or not late or time.monotonic() >= deadline:
                    break
                if time.monotonic() - shown >= 1.0:
                    shown = time.monotonic()
                    self._show({task: self._states[task] for task in late})
                time.sleep(_STEP)
        for connection in connections.values():
            connection.close()
        self._inform(_named({task: self._states[task] for task in late}, self._tasks))

    def _late(self) -> list[str]:
        """The tasks that are not ready; first those that have reported."""
        with self._lock:
            recent = time.monotonic() - _ASK - _LINGER
            for task, (_, when) in list(self._reported.items()):
                if when < recent:  # it has ended since
                    del self._reported[task]
                    self._states[task] = ABSENT
            late = [task for task, state in self._states.items() if state != READY]
            return sorted(late, key=lambda task: task not in self._reported)

    def _state_of(self, task: str, connection: Connection) -> str:
        """What is at the address of a task."""
        state, found = connection.ask({"who": task}, _ASK)
        if state == STARTED:
            return READY
        with self._lock:
            if state == READY and task not in self._reported:
                return ABSENT  # its report is on its way
            if state == READY and found.get("key") != self._reported[task][0]:
                at = self._tasks[task]
                error = f"another process than {task} answers at its address {at}"
                self._errors += [] if error in self._errors else [error]
        return state

    def _inform(self, missing: str) -> None:
        """Give all tasks that have reported the same result.

        Raises:
            PreflightError: the result is an error.
        """
        if self._errors:
            time.sleep(_STEP * 2)  # for others that differ, too
        with self._lock:
            errors = list(self._errors)
            missing = "" if errors else missing
            self._result = {"errors": errors, "missing": missing, "go": not errors and not missing}
            self._uninformed = set(self._reported)
        deadline = time.monotonic() + _LINGER
        while self._uninformed and time.monotonic() < deadline:
            time.sleep(_STEP / 5)
        if errors or missing:
            raise PreflightError(*errors, missing=missing)


class _Follower:
    """A task that reports itself to the leader until the leader answers with the result."""

    def __init__(self, info: TaskInfo, tasks: dict[str, str], show: Callable[[Late], None]) -> None:
        self._tasks = tasks
        self._show = show
        self._leader = next(iter(tasks))
        self._others = [task for task in tasks if task not in (self._leader, info.task)]
        self._report: Message = {
            "task": info.task,
            "key": secrets.token_hex(16),
            "jobs": dict(info.jobs),
            "versions": dict(info.versions),
            "devices": dict(info.devices),
        }

    def answer(self, message: Message) -> Message:
        """The answer to the leader, who asks which process is at this address."""
        return {"key": self._report["key"]} if "who" in message else {}

    def wait_for_all(self, deadline: float) -> None:
        """Return when the leader says so, or has started already."""
        leader = Connection(self._tasks[self._leader])
        late: dict[str, str] = {self._leader: ABSENT}
        shown, state = 0.0, ABSENT
        # A leader that answers decides itself when the wait is over.
        while time.monotonic() < deadline + (_LINGER if state == READY else 0.0):
            state, answer = leader.ask(self._report, _ASK)
            if state == STARTED or answer.get("go"):
                leader.close()
                return
            if answer.get("errors") or answer.get("missing"):
                raise PreflightError(*answer["errors"], missing=answer["missing"])
            late = answer.get("late", {self._leader: state})
            if time.monotonic() - shown >= 1.0:
                shown = time.monotonic()
                known = late if "late" in answer else late | dict.fromkeys(self._others, UNKNOWN)
                self._show(known)
            time.sleep(_STEP + len(self._tasks) / 1000)
        raise PreflightError(missing=_named(late, self._tasks))


def _named(late: Late, tasks: Mapping[str, str]) -> str:
    """The first late tasks, with their addresses; "" where none is late."""
    names = [
        f"{task} ({tasks[task]}{WHY.get(state, '')})" for task, state in list(late.items())[:_NAMED]
    ]
    more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
    return ", ".join(names) + more
