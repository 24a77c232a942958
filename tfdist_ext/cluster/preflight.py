"""Before a cluster starts: is every task there, at its address, with the same cluster and versions?

TensorFlow waits without a word for a task that never comes, and hangs later where two tasks were
started with different clusters or numbers of GPUs. So the tasks talk before its servers start. The
first one (the leader) hears from all others, looks whether each answers at its address, and tells
all of them the same: go, or what is wrong. So each needs one connection, and a thousand tasks take
seconds.

Each message is a JSON object in a line:

    task -> leader     its card: name, digest of the cluster, versions, devices, a random key
    leader -> task     {"cluster": null}: send it, as the digest is another one; the task sends it
    leader -> address  {"who": null}; what listens there answers {"key": ...}, the key of its card
    leader -> task     {"late": [[task, state], ...], "tasks": n}, every second
    leader -> task     {"errors": [...], "missing": "..."}; neither of them: go

What greets as gRPC's servers do (SETTINGS of HTTP/2, at once) is TensorFlow's server: that task has
started already, as the others of a cluster have into which one comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist_ext.cluster.addresses import identity
from tfdist_ext.cluster.cards import Card, differences, tasks_of

__all__ = [
    "UNKNOWN",
    "Late",
    "PreflightError",
    "listening",
    "preflight",
]

RESOLVING, WAITING, SILENT = "resolving", "waiting", "silent"
OTHER, UNKNOWN, READY = "another program", "unknown", "ready"
# Task -> RESOLVING, WAITING, SILENT, OTHER that is at its address, UNKNOWN without a leader.
Late = Mapping[str, str]

_NAMED = 5  # tasks in a sentence
_LISTED = 20  # tasks of which the leader tells the others
_LONGEST_LINE = 2**22  # bytes; a cluster of 10,000 tasks has a fourth of it
_STEP = 0.25  # seconds between two tries
_TELLS = 1.0  # seconds between two words of the leader
_AT_ONCE = 64  # connections that the leader tries at a time
_ANSWER = 5.0  # seconds for an answer
# Seconds in which what accepts connections must answer one: a process that is frozen never does.
_SILENCE = 60.0
_LINGER = 2.0  # seconds in which those who come late still hear what is wrong


class PreflightError(Exception):
    """Why the cluster cannot start.

    Attributes:
        missing: the tasks that did not answer in time, for a message; "" where all did.
    """

    def __init__(self, *reasons: str, missing: str = "") -> None:
        super().__init__("; ".join(reasons) or f"no answer from {missing}")
        self.missing = missing


def preflight(
    card: Card,
    *,
    wait: float,
    show: Callable[[Late, int], None] = lambda late, tasks: None,
) -> None:
    """Return when all tasks of the cluster are there, and agree; every task calls this.

    No port is left bound.

    Args:
        card: of this task.
        wait: seconds for the others to come.
        show: called about every second with the tasks that are not ready yet (the first few of
            many), and the number of all.

    Raises:
        PreflightError: this task's port is in use, a task is missing or cannot be resolved, or
            they do not agree; the same on every task.
    """
    outcome: list[BaseException] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        await _preflight(card, wait, show)

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            outcome.append(error)

    # A thread of its own: there may be a loop in this one, as in a notebook.
    thread = threading.Thread(target=body, name="tfdist-preflight", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)  # Ctrl-C comes in between
    except BaseException:
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)
        thread.join(_ANSWER)  # the port is free then
        raise
    for error in outcome:
        raise error


async def _preflight(card: Card, wait: float, show: Callable[[Late, int], None]) -> None:
    tasks = tasks_of(card.jobs)
    leader = next(iter(tasks))
    key = secrets.token_hex(16)
    deadline = time.monotonic() + wait
    leading = _Leader(card, tasks, deadline, show) if card.task == leader else None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Where all is over, this is cancelled; what asyncio would write of that is no error.
        over = asyncio.CancelledError
        with contextlib.closing(writer), contextlib.suppress(*_BROKEN, over):
            message = await _receive(reader)
            if "who" in message:
                await _send(writer, {"key": key})
            elif leading is not None:
                await leading.hear(message, reader, writer)

    port = identity(tasks[card.task])[1]
    try:
        server = await asyncio.start_server(answer, sock=listening(port), limit=_LONGEST_LINE)
    except OSError as error:
        raise PreflightError(
            f"port {port} of {card.task} must be free, got {error.strerror or error}: end what uses"
            " it, or give the task another port"
        ) from error
    try:
        if leading is not None:
            await leading.lead()
        else:
            await _Follower(card, key, tasks, deadline, show).follow()
    finally:
        server.close()  # and nobody is waited for: a peer that is frozen never closes


class _StartedError(Exception):
    """TensorFlow's server has answered."""


# What a connection may come to, and what others may send.
_BROKEN = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
    asyncio.TimeoutError,
)


# Of these, what a program does that may still become the task: it is frozen, or a proxy closes.
_GONE = (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError)


class _Leader:
    """The task that hears of all others, and tells them the same.

    Args:
        deadline: when all must be there, in monotonic time.
    """

    def __init__(
        self, card: Card, tasks: dict[str, str], deadline: float, show: Callable[[Late, int], None]
    ) -> None:
        self._card = card
        self._tasks = tasks
        self._deadline = deadline
        self._show = show
        self._states = dict.fromkeys(tasks, WAITING) | {card.task: READY}
        self._silent: dict[str, float] = {}  # task -> since when
        self._connections: dict[asyncio.StreamWriter, tuple[str, str]] = {}  # (task, its key)
        self._errors: list[str] = []
        self._changed = asyncio.Event()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    @property
    def _late(self) -> dict[str, str]:
        return {task: state for task, state in self._states.items() if state != READY}

    async def hear(
        self, message: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One task, from its card until it goes."""
        jobs = self._card.jobs
        if message["digest"] != self._card.digest:
            await _send(writer, {"cluster": None})
            jobs = (await _receive(reader))["cluster"]
        other = Card(str(message["task"]), jobs, message["versions"], message["devices"])
        errors = differences(self._card, other)  # and so what is no card is none of ours
        key = str(message["key"])
        if any(task == other.task and its != key for task, its in self._connections.values()):
            errors = [f"two processes say that they are {other.task}"]
        self._connections[writer] = other.task, key
        try:
            self._note(errors)
            await _send(writer, self._status)
            await reader.read()  # until the task closes the connection
        finally:
            del self._connections[writer]
            if other.task not in self._keys and self._states.get(other.task) == READY:
                self._states[other.task] = WAITING

    @property
    def _keys(self) -> dict[str, str]:
        """Task -> key of its card, of those that have sent one."""
        return dict(self._connections.values())

    @property
    def _status(self) -> dict[str, Any]:
        return {"late": list(self._late.items())[:_LISTED], "tasks": len(self._tasks)}

    def _note(self, errors: list[str]) -> None:
        self._errors += [error for error in errors if error not in self._errors]
        self._changed.set()

    @property
    def _waits(self) -> bool:
        """Whether somebody is late who may still come."""
        now = time.monotonic()
        frozen = any(now - since >= _SILENCE for since in self._silent.values())
        return bool(self._late) and not self._errors and not frozen and now < self._deadline

    async def lead(self) -> None:
        """Return when all are ready, and have been told to go."""
        _allow_open_files(len(self._tasks))
        looking = [
            asyncio.create_task(self._look(task)) for task in self._tasks if task != self._card.task
        ]
        told = 0.0
        try:
            while self._waits:
                if time.monotonic() - told >= _TELLS:
                    told = time.monotonic()
                    self._show(self._late, len(self._tasks))
                    await self._tell(self._status)
                self._changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _STEP)
        finally:
            for task in looking:
                task.cancel()
        missing = _named(self._late, self._tasks) if not self._errors else ""
        if self._errors:
            await asyncio.sleep(_LINGER)
        await self._tell({"errors": self._errors, "missing": missing})
        if self._errors or missing:
            raise PreflightError(*self._errors, missing=missing)

    async def _look(self, task: str) -> None:
        """Try the address of a task whenever it is not ready."""
        while True:
            if self._states[task] != READY:
                async with self._turns:
                    asked = time.monotonic()
                    self._states[task] = await self._state_of(task)
                if self._states[task] == SILENT:
                    self._silent.setdefault(task, asked)
                else:
                    self._silent.pop(task, None)
                if self._states[task] == READY:
                    self._changed.set()
            await asyncio.sleep(_STEP)

    async def _state_of(self, task: str) -> str:
        host, port = identity(self._tasks[task])
        try:
            found = await asyncio.wait_for(
                asyncio.get_running_loop().getaddrinfo(
                    host.strip("[]"), port, type=socket.SOCK_STREAM
                ),
                _ANSWER,
            )
        except (TimeoutError, OSError, UnicodeError):
            return RESOLVING
        state = WAITING
        for address in dict.fromkeys(str(each[4][0]) for each in found):
            try:
                answer = await _asked(address, port, {"who": None})
            except _StartedError:
                return READY
            except _BROKEN as error:
                if not isinstance(error, _GONE):
                    state = OTHER
                elif isinstance(error, TimeoutError) and state == WAITING:
                    state = SILENT
                continue
            if answer is None:
                continue
            if task not in self._keys:
                return WAITING  # its card is on its way
            if answer.get("key") != self._keys[task]:
                at = self._tasks[task]
                self._note([f"another process than {task} answers at its address {at}"])
            return READY
        return state

    async def _tell(self, message: dict[str, Any]) -> None:
        for writer in list(self._connections):
            with contextlib.suppress(*_BROKEN):
                await _send(writer, message)


def _allow_open_files(tasks: int) -> None:
    """Each task has a connection, and those that are looked at another one."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = tasks + _AT_ONCE + 64
    if limit != resource.RLIM_INFINITY and needed > limit:
        allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
        if allowed < needed:
            raise PreflightError(
                f"the limit of open files must be about {needed} for {tasks} tasks, got {most}:"
                " raise the hard limit (ulimit -Hn)"
            )


class _Follower:
    """A task that tells the leader of itself, and waits for its word."""

    def __init__(
        self,
        card: Card,
        key: str,
        tasks: dict[str, str],
        deadline: float,
        show: Callable[[Late, int], None],
    ) -> None:
        self._me = card.task
        self._jobs = {job: list(addresses) for job, addresses in card.jobs.items()}
        self._card = {
            "task": card.task,
            "digest": card.digest,
            "key": key,
            "versions": dict(card.versions),
            "devices": dict(card.devices),
        }
        self._tasks = tasks
        self._leader = next(iter(tasks))
        self._late: dict[str, str] = {self._leader: WAITING}  # as far as this task knows
        self._deadline = deadline
        self._show = show
        self._unanswered = float("inf")  # since when, in monotonic time

    async def follow(self) -> None:
        """Return when the leader says go, or has started already."""
        host, port = identity(self._tasks[self._leader])
        while time.monotonic() < min(self._deadline, self._unanswered + _SILENCE):
            try:
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection(host.strip("[]"), port, limit=_LONGEST_LINE), _ANSWER
                )
            except (OSError, UnicodeError) as error:
                unknown = isinstance(error, socket.gaierror | UnicodeError)
                self._late = {self._leader: RESOLVING if unknown else WAITING}
                self._unanswered = float("inf")
            else:
                with contextlib.closing(writer):
                    if await self._goes(reader, writer):
                        return
            others = [task for task in self._tasks if task not in (self._leader, self._me)]
            self._show({**self._late, **dict.fromkeys(others, UNKNOWN)}, len(self._tasks))
            await asyncio.sleep(_STEP)
        raise PreflightError(missing=_named(self._late, self._tasks))

    async def _goes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the leader has said go, or has started; False where it has gone."""
        asked = time.monotonic()
        try:
            await _send(writer, self._card)
            seconds = _ANSWER
            while True:
                message = await _receive(reader, seconds=seconds)
                asked, self._unanswered = time.monotonic(), float("inf")
                left = max(0.0, self._deadline - asked) + _LINGER + _ANSWER
                seconds = min(left, _SILENCE)  # the leader tells each second who is late
                if "cluster" in message:
                    await _send(writer, {"cluster": self._jobs})
                elif "late" in message:
                    self._late = dict(message["late"])
                    self._show(self._late, int(message["tasks"]))
                elif message["errors"] or message["missing"]:
                    raise PreflightError(*message["errors"], missing=message["missing"])
                else:
                    return True
        except _StartedError:
            return True
        except TimeoutError:
            self._late = {self._leader: SILENT}
            self._unanswered = min(self._unanswered, asked)
            return False
        except _BROKEN as error:
            self._late = {self._leader: WAITING if isinstance(error, _GONE) else OTHER}
            self._unanswered = float("inf")
            return False


def _named(late: Late, tasks: Mapping[str, str]) -> str:
    """The first tasks that are late, with their addresses; "" where none is."""
    why = {
        RESOLVING: ", whose name is not known",
        OTHER: ", where another program answers",
        SILENT: ", which accepts connections and says nothing, as a frozen process does",
    }
    names = [
        f"{task} ({tasks[task]}{why.get(state, '')})" for task, state in list(late.items())[:_NAMED]
    ]
    more = f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
    return ", ".join(names) + more


def listening(port: int) -> socket.socket:
    """A socket that listens there on every interface, as TensorFlow's server does.

    Raises:
        OSError: the port is in use.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)


async def _asked(host: str, port: int, message: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of what listens there; None where nothing does.

    Raises:
        _StartedError: it is TensorFlow's server.
        _BROKEN: it is another program.
    """
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port, limit=_LONGEST_LINE), _ANSWER
        )
    except (TimeoutError, OSError):
        return None
    with contextlib.closing(writer):
        await _send(writer, message)
        return await _receive(reader)


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _receive(reader: asyncio.StreamReader, seconds: float = _ANSWER) -> dict[str, Any]:
    """
    Raises:
        ValueError: what came is no message.
        TimeoutError: nothing came in time.
        _StartedError: it is the greeting of TensorFlow's server.
    """
    first = await asyncio.wait_for(reader.readexactly(1), seconds)
    if first == b"\0" and (await asyncio.wait_for(reader.readexactly(3), _ANSWER))[2:] == b"\4":
        raise _StartedError
    if first != b"{":  # another program may send no line, and leave the connection open
        raise ValueError(f"a message must be a JSON object, got {first!r}")
    rest = await asyncio.wait_for(reader.readuntil(b"\n"), _ANSWER)
    message: dict[str, Any] = json.loads(first + rest)
    return message  # starts as an object, so it is one
