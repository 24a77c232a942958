"""Before a cluster starts: is every task there, at its address, with the same cluster and versions?

TensorFlow waits silently for a task that never comes, and hangs later where two tasks were started
with different clusters or numbers of GPUs. So the tasks talk before its servers start:

1. Every task reports itself to the first one (the leader), again and again, until the leader
   answers "go" or what is wrong. So all tasks get the same result.
2. The leader asks at the address of each task whether the process that has reported answers there.

A task or leader where TensorFlow's server answers has started already.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata

from tfdist_ext.cluster.jobs import addresses_of
from tfdist_ext.cluster.liveness import WaitReports
from tfdist_ext.cluster.liveness.wire import (
    ABSENT,
    READY,
    STARTED,
    WHY,
    Connection,
    Endpoint,
    Message,
)

Addresses = Mapping[str, Sequence[str]]  # job -> addresses
Late = Mapping[str, str]  # task -> state, of the tasks that are not ready

WAIT = 300.0  # seconds for the other tasks to come, unless the caller sets them
_STEP = 0.25  # seconds between two tries
_ASK = 2.0  # seconds for an answer
_LINGER = 5.0  # seconds for the others to get the result
_AT_ONCE = 64  # addresses that the leader asks at the same time
_NAMED = 5  # tasks in a sentence
_PACKAGES = ("tensorflow", "keras", "tfdist_ext")  # of one version on all tasks


class PreflightError(Exception):
    """Why the cluster cannot start.

    Attributes:
        missing: the tasks that did not answer in time, for a message; "" if all did.
    """

    def __init__(self, *reasons: str, missing: str = "") -> None:
        super().__init__("; ".join(reasons) or f"no answer from {missing}")
        self.missing = missing


@dataclass(frozen=True)
class TaskInfo:
    """What a task reports of itself.

    Attributes:
        task: its name, as "worker:1".
        jobs: job -> addresses.
        versions: package -> version.
        gpus: must be equal on all tasks that train together.
        key: differs for each process.
    """

    task: str
    jobs: Addresses
    versions: Mapping[str, str]
    gpus: int
    key: str = field(default_factory=lambda: secrets.token_hex(16))


def info_of(task: str, jobs: Addresses, gpus: int) -> TaskInfo:
    """Returns the report of this process, as this task."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return TaskInfo(task, jobs, versions, gpus)


def preflight(info: TaskInfo, *, wait: float, source: str) -> Endpoint:
    """Return when all tasks of the cluster are there, and agree; every task calls this.

    Late tasks are named on stderr.

    Args:
        info: of this task.
        wait: seconds for the others to come.
        source: of the cluster, for messages.

    Returns:
        The endpoint of this task, which still listens.

    Raises:
        PreflightError: this task's port is in use, a task is missing or its name cannot be
            resolved, or they do not agree; the same on every task.
    """
    tasks = addresses_of(info.jobs)
    leader = _Leader(info, tasks) if info.task == next(iter(tasks)) else None
    try:
        # The leader asks which process is at the address of another task.
        answer = leader.answer if leader else lambda message: {"key": info.key}
        endpoint = Endpoint(tasks[info.task], answer)
    except OSError as error:
        raise PreflightError(
            f"the port of {info.task} ({tasks[info.task]}) is in use by another process: end that"
            " process, or give the task another port"
        ) from error
    try:
        deadline = time.monotonic() + wait
        if leader:
            leader.wait_for_all(deadline, source)
        else:
            _follow(info, tasks, deadline, source)
    except BaseException:
        endpoint.close()
        raise
    return endpoint


class _Leader:
    """The first task: knows which tasks have reported, and gives all of them the result."""

    def __init__(self, info: TaskInfo, tasks: dict[str, str]):
        self._info = info
        self._tasks = tasks
        self._others = [task for task in tasks if task != info.task]
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}  # task -> key of the last process that has reported
        self._replaced: set[str] = set()  # keys of processes before these
        self._unknown: dict[str, float] = {}  # key without a report -> when it was first seen
        self._late = dict.fromkeys(self._others, ABSENT)
        self._errors: dict[str, None] = {}  # a set in order
        self._result: Message = {}
        self._uninformed: set[str] = set()  # tasks that have not got the result

    def answer(self, message: Message) -> Message:
        """Returns the answer to the report of a task."""
        other = TaskInfo(**message)
        errors = differences(self._info, other)
        with self._lock:
            if other.key in self._replaced:
                errors.append(f"two processes were started as {other.task}")
            elif self._keys.get(other.task, other.key) != other.key:  # it was started again
                self._replaced.add(self._keys[other.task])
            self._keys[other.task] = other.key
            self._errors |= dict.fromkeys(errors)
            if self._result:
                self._uninformed.discard(other.task)
            return self._result or {"late": self._late}

    def wait_for_all(self, deadline: float, source: str) -> None:
        """Return when all tasks are ready, and know it."""
        connections = {task: Connection(self._tasks[task]) for task in self._others}
        reports = WaitReports()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while self._late and not self._errors and time.monotonic() < deadline:
                # All of them again: one that was ready may have ended.
                states = pool.map(self._state_of, connections.items())
                pairs = zip(self._others, states, strict=True)
                self._late = {task: state for task, state in pairs if state != READY}
                if self._late:
                    names = _named(self._late, self._tasks)
                    reports.report(self._info.task, names, source)
                time.sleep(_STEP)
        for connection in connections.values():
            connection.close()
        self._give_result()

    def _state_of(self, task_and_connection: tuple[str, Connection]) -> str:
        """Returns what is at the address of a task."""
        task, connection = task_and_connection
        state, answer = connection.ask({"who": task}, _ASK)
        with self._lock:
            if state != READY or answer.get("key") == self._keys.get(task):
                return READY if state == STARTED else state
            # Its report is on its way, also after a restart.
            since = self._unknown.setdefault(str(answer.get("key")), time.monotonic())
            if task in self._keys and time.monotonic() - since > _LINGER:
                at = self._tasks[task]
                self._errors[f"a process other than {task} answers at its address {at}"] = None
        return ABSENT

    def _give_result(self) -> None:
        """Give all tasks that have reported the same result.

        Raises:
            PreflightError: the result is an error.
        """
        if self._errors:
            time.sleep(_STEP * 2)  # for others that differ, too
        with self._lock:
            errors = list(self._errors)
            missing = "" if errors else _named(self._late, self._tasks)
            self._result = {"errors": errors, "missing": missing, "go": not errors and not missing}
            self._uninformed = set(self._keys)
        deadline = time.monotonic() + _LINGER
        while self._uninformed and time.monotonic() < deadline:
            time.sleep(_STEP / 5)
        if errors or missing:
            raise PreflightError(*errors, missing=missing)


def _follow(info: TaskInfo, tasks: dict[str, str], deadline: float, source: str) -> None:
    """Report this task to the leader until the leader says "go", or has started already."""
    name, address = next(iter(tasks.items()))
    leader, report = Connection(address), {**vars(info), "jobs": dict(info.jobs)}
    late, state, reports = {name: ABSENT}, ABSENT, WaitReports()
    # A leader that answers decides itself when the wait is over.
    while time.monotonic() < deadline + (_LINGER if state == READY else 0.0):
        state, answer = leader.ask(report, _ASK)
        if state == STARTED or answer.get("go"):
            leader.close()
            return
        if answer.get("errors") or answer.get("missing"):
            raise PreflightError(*answer["errors"], missing=answer["missing"])
        late = answer.get("late", {name: state})
        if late:
            reports.report(info.task, _named(late, tasks), source)
        time.sleep(_STEP + len(tasks) / 1000)
    raise PreflightError(missing=_named(late, tasks))


def _named(late: Late, tasks: Mapping[str, str]) -> str:
    """The first late tasks, with their addresses; "" where none is late."""
    names = [
        f"{task} ({tasks.get(task, '?')}{WHY.get(state, '')})"
        for task, state in list(late.items())[:_NAMED]
    ]
    more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
    return ", ".join(names) + more


def differences(leader: TaskInfo, other: TaskInfo) -> list[str]:
    """Returns one sentence for each difference between a task and the leader."""
    sentences = []
    here, there = addresses_of(leader.jobs), addresses_of(other.jobs)
    for task in {**here, **there}:
        at, leader_at = there.get(task), here.get(task)
        if at != leader_at:
            only = (
                f"{task} at {at or leader_at} is only in that of {(other if at else leader).task}"
            )
            differs = f"{task} at {at}, not {leader_at}" if at and leader_at else only
            sentences.append(f"{other.task} was started with a different cluster ({differs})")
            break
    for name, version in leader.versions.items():
        other_version = other.versions.get(name, "none")
        if other_version != version:
            sentences.append(
                f"{other.task} has {name} {other_version}, and {leader.task} has {version}"
            )
    if "ps" not in leader.jobs and other.gpus != leader.gpus:
        sentences.append(
            f"{other.task} has {other.gpus} GPU devices, and {leader.task} has {leader.gpus}:"
            " collectives would hang"
        )
    return sentences
