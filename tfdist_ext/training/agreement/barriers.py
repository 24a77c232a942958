"""Barriers between the workers of a synchronous training, and why one cannot be passed.

A collective waits for all workers, silently and without a limit. So each place where workers wait
for each other is a barrier with a number and a name, the same on all workers. A thread of each
worker finds out within seconds that a barrier cannot be passed, and makes the collective fail with
a sentence that names the task. A slow worker is no error: the workers that wait report it.

- Every worker publishes its position.
- The first worker (the leader) watches the addresses and the positions of all others, and decides
  that a barrier cannot be passed. The others watch the address of the leader.
- A worker that fails, or that has stalled outside of a barrier, decides this for itself.

Workers talk through the key-value store of TensorFlow's coordination service, in the leader's
process:

    position/TASK  the barrier that a task is in, or was in last, its phase, and whether it has left
    end            why no further barrier can be passed; the first value stays
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_ext import failures
from tfdist_ext.cluster.jobs import addresses_of
from tfdist_ext.cluster.liveness import WaitReports, log_line, show_stacks
from tfdist_ext.cluster.liveness.watching import ALIVE, TaskWatch
from tfdist_ext.errors import PeerError, address_of
from tfdist_ext.training._tf_private import (
    abort_collectives,
    get_value,
    has_coordination_service,
    insert_value,
    replace_value,
)
from tfdist_ext.training.agreement.task_status import (
    TaskStatus,
    end_to_be_restarted,
    single_task,
    watch_timeout,
)

PATIENCE = 2.0  # seconds between two looks at the positions
LEAVE_LIMIT = 30.0  # seconds to wait for a task after the end of its script, or of its thread
_LOOK_EVERY = 0.25  # seconds
_CAUSE = 6.0  # seconds to learn why a collective has failed
_FROZEN = 9.0  # seconds without an answer; TensorFlow gives a task up after 10 seconds
_PREFIX = "tfdist_ext/"
_THREAD_ENDED = "its training thread has ended"
_DOES = {"callbacks": "callbacks", "checkpoint": "writing a checkpoint"}
SAME_CALLS = (
    "Call fit, evaluate, predict, save and the like on every worker, not only on one. All workers"
    " compute, and the chief writes the files of save and export."
)


def peers_of(strategy: tf.distribute.Strategy) -> TaskStatus:
    """Returns the monitor of the workers of a strategy; a plain status where there is one task."""
    resolver = strategy.cluster_resolver
    if resolver is None or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return single_task()
    tasks = addresses_of(resolver.cluster_spec().as_dict())
    me = f"{resolver.task_type}:{resolver.task_id}"
    if len(tasks) < 2 or me not in tasks or not has_coordination_service():
        return single_task()
    return _monitor_of_process(me, tuple(tasks.items()))


@dataclass(frozen=True)
class Position:
    """The position of a task in its training.

    Attributes:
        number: the number of the barrier that the task is in, or was in last.
        place: the public calls and what the barrier is for, as "fit (epoch 1, end)"; between
            two barriers what the task does there, and the calls.
        inside: whether the task is in the barrier, and not between two barriers.
        since: seconds since 1970; 0 if the task has not published a position.
        batches: batches read by the current execution, inside a barrier.
        left: why the task makes no further calls; "" if it may.
    """

    number: int = 0
    place: str = ""
    inside: bool = False
    since: float = 0.0
    batches: int = 0
    left: str = ""


@dataclass(frozen=True)
class End:
    """Why no further barrier can be passed.

    Attributes:
        kind: "left", "failed", "lost", "differs" or "stalled".
        task: the cause; "" if it is not one task.
        text: the sentence for all tasks.
    """

    kind: str
    task: str
    text: str


class PeerMonitor(TaskStatus):
    """The other workers of the cluster, from the first distributed model until the exit.

    Args:
        me: this task, as "worker:0".
        tasks: (task, address) of all workers, the leader first.
    """

    def __init__(self, me: str, tasks: tuple[tuple[str, str], ...]):
        super().__init__(watch_timeout())
        self._me = me
        self._leader, self._store = tasks[0]
        self._others = [task for task, _ in tasks if task != me]
        self._watched = {
            task: TaskWatch(task, address, _FROZEN)
            for task, address in (tasks[1:] if me == self._leader else tasks[:1])
        }
        self._calls: list[str] = []
        self._position = Position(since=time.time())
        self._published = Position()
        self._end: End | None = None
        self._end_is_known = threading.Event()
        self._batches_read: Callable[[], int] = int
        self._thread = threading.current_thread()  # the one that makes the calls
        for body in (self._listen, self._watch):
            threading.Thread(target=body, daemon=True, name="tfdist-peers").start()
        failures.watch()
        atexit.register(self._leave, os.getpid())

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Scope of a public call, which every worker must make."""
        self._thread = threading.current_thread()
        self._calls.append(name)
        try:
            with super().call(name):
                yield
        finally:
            self._calls.pop()

    @contextlib.contextmanager
    def barrier(self, detail: str = "") -> Iterator[None]:
        """Scope in which all workers wait for each other; a barrier inside another is part of it.

        Raises:
            PeerError: the barrier cannot be passed, because of another worker.
        """
        if self._position.inside:
            yield
            return
        place = self._place(detail)
        self._raise_if_ended(place)
        number = self._position.number + 1
        self._position = Position(number, place, inside=True, since=time.time())
        try:
            yield
        except tf.errors.OpError as error:
            kinds = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
            if isinstance(error, kinds) or "ollective" in str(error):  # because of another worker
                self._end_is_known.wait(_CAUSE)
            self._raise_if_ended(place)
            raise
        finally:
            self._position = replace(self._position, inside=False, since=time.time())

    def reads_batches(self, count: Callable[[], int]) -> None:
        self._batches_read = count

    def _place(self, detail: str = "") -> str:
        call = " inside ".join(reversed(self._calls))
        return f"{call} ({detail})" if call and detail else call

    # The end of all barriers.

    def _raise_if_ended(self, place: str) -> None:
        """Raises the error of this worker if no further barrier can be passed."""
        if (end := self._end) is None:
            return
        text = end.text
        if end.kind != "differs":
            text += f"; {self._me} is in {place}, which needs every worker."
        if end.kind == "left":
            text += f" {SAME_CALLS}"
        failure = PeerError(text)
        failure.task = end.task
        failure.permanent = end.kind in ("left", "differs")
        raise failure from None

    def _decide(self, end: End) -> None:
        """Stores why no barrier can be passed any more, unless another worker was quicker."""
        if self._leader_answers():
            with contextlib.suppress(tf.errors.OpError):
                insert_value(f"{_PREFIX}end", json.dumps(asdict(end)))  # the first one stays
                end = _stored_end(1.0) or end
        self._learn(end)

    def _learn(self, end: End) -> None:
        self._end = self._end or end
        self._end_is_known.set()

    def _leader_answers(self) -> bool:
        """Whether the store can be written to: its leader is not frozen."""
        return self._me == self._leader or TaskWatch(self._leader, self._store, _FROZEN).look()

    def _listen(self) -> None:
        """Thread that receives the end from another worker at once."""
        while self._end is None:
            if end := _stored_end(60.0):
                self._learn(end)
            else:
                time.sleep(1.0)  # the leader is gone, or busy

    # Looking at the others.

    def _watch(self) -> None:
        """Thread that publishes the position of this task, and looks at other tasks."""
        looks, reports = 0, WaitReports()
        before: dict[str, Position] = {}
        unchanged = 0.0
        for watched in self._watched.values():
            watched.state = ALIVE  # all servers have started with the strategy
        while self._end is None:
            time.sleep(_LOOK_EVERY)
            position = self._current_position()
            if position.since != self._published.since:
                looks, reports = 0, WaitReports()
            # Looks are counted, because a process that was stopped has not waited.
            looks += 1
            waited, stalled = looks * _LOOK_EVERY, self.tick(_LOOK_EVERY)
            all_answer = all([watched.look() for watched in self._watched.values()])
            for task, watched in self._watched.items():
                if watched.failure:
                    self._decide(End("lost", task, watched.failure))
            if all_answer and position != self._published:
                self._publish(position)
            if stalled and not position.inside:
                self._decide(End("stalled", self._me, f"{self._me} has stalled: {stalled}"))
            if self._me == self._leader and waited % PATIENCE == 0 and all_answer:
                positions = {self._me: position} | _positions_of(self._others)
                unchanged = unchanged + PATIENCE if positions == before else 0.0
                before = positions
                if unchanged and (end := obstacle(positions, unchanged, stalled)):
                    self._decide(end)
            if position.inside and reports.due(waited):
                self._report_wait(position, waited)
        self._obey(self._end)

    def _current_position(self) -> Position:
        position = self._position
        if not position.left and not self._thread.is_alive():
            position = replace(position, left=_THREAD_ENDED)
        if position.inside:
            return replace(position, batches=int(self._batches_read()))
        doing, call = _DOES.get(self.phase, "user code"), self._place()
        return replace(position, place=f"{doing}, inside {call}" if call else doing)

    def _publish(self, position: Position) -> None:
        with contextlib.suppress(tf.errors.OpError):
            replace_value(f"{_PREFIX}position/{self._me}", json.dumps(asdict(position)))
            self._published = position

    def _report_wait(self, position: Position, waited: float) -> None:
        late = [
            f"{task}, since {_clock(other.since)} in {other.place}" if other.since else task
            for task, other in _positions_of(self._others).items()
            if not (other.inside and other.number == position.number)
        ]
        if late:
            more = f" and {len(late) - 5} more" if len(late) > 5 else ""
            names = f"{'; '.join(late[:5])}{more}"
            log_line(
                f"{self._me}: waiting in {position.place} for {waited:.0f} s for {names}. Help:"
                f" {address_of('docs/troubleshooting.md#the-job-hangs-during-training')}"
            )

    def _obey(self, end: End) -> None:
        """Shows stacks or ends this process, if it has stalled; else aborts its collectives."""
        if end.kind == "stalled":
            show_stacks()
            if end.task == self._me:
                time.sleep(PATIENCE)  # meanwhile the others receive the end, also from the leader
                end_to_be_restarted(end.text)
        while not self._position.inside:
            time.sleep(_LOOK_EVERY)
        abort_collectives(end.text)

    # The end of this process.

    def _leave(self, pid: int) -> None:
        """At exit: tells the others, and waits for them unless this task has failed.

        When a worker's process is gone, each collective of the others fails. Without the leader no
        worker can send a message to another.
        """
        if os.getpid() != pid:  # a child that was forked
            return
        when = _clock(time.time())
        error = getattr(sys, "last_value", None)
        if error is None:
            self._position = replace(self._position, left="its script ended", since=time.time())
            self._wait_for_others_to_leave()
            end = End("left", self._me, f"{self._me} left at {when}: {self._position.left}")
        else:
            cause = str(error).strip().split("\n")[0][:300]
            text = f"{self._me} failed at {when}: {type(error).__name__}: {cause}"
            end = End("failed", self._me, text)
        self._decide(end)  # ends the threads, too
        if self._me == self._leader:
            time.sleep(_LOOK_EVERY if error is None else PATIENCE)  # the others read the store

    def _wait_for_others_to_leave(self) -> None:
        if self._leader_answers():
            self._publish(self._current_position())
        deadline = time.monotonic() + LEAVE_LIMIT
        for task in self._others:
            while not _positions_of([task])[task].left:
                if self._end is not None or time.monotonic() > deadline:
                    return
                time.sleep(_LOOK_EVERY)


# One for this process, because its cluster has one store.
_monitor_of_process = functools.cache(PeerMonitor)


def obstacle(positions: Mapping[str, Position], unchanged: float, stalled: str) -> End | None:
    """Returns why no task can pass the barrier that it is in; None if there may be none.

    Args:
        positions: of all tasks.
        unchanged: seconds since a position has changed.
        stalled: why the leader has stalled; "" if it has not.
    """
    inside = {task: position for task, position in positions.items() if position.inside}
    if len({(position.number, position.place) for position in inside.values()}) > 1:
        tasks: dict[str, list[str]] = {}
        for task, position in positions.items():
            tasks.setdefault(position.place, []).append(task)
        calls = "; ".join(f"{', '.join(names)} in {place}" for place, names in tasks.items())
        text = f"Workers have made different calls: {calls}. {SAME_CALLS}"
        return End("differs", "", text)
    number = max((position.number for position in inside.values()), default=0)
    for task, position in positions.items():
        patience = LEAVE_LIMIT if position.left == _THREAD_ENDED else PATIENCE
        if position.left and position.number < number and unchanged >= patience:
            return End("left", task, f"{task} left at {_clock(position.since)}: {position.left}")
    if stalled and len(inside) == len(positions):  # a late task watches itself
        least = min(position.batches for position in inside.values())
        behind = [task for task, position in inside.items() if position.batches == least]
        text = f"{' with '.join(behind)} has stalled reading its data"
        if len(behind) == len(inside):
            text = "all workers have stalled"
        return End("stalled", behind[0], f"{text}: {stalled}")
    return None


def _stored(key: str, seconds: float = 0.1) -> dict[str, Any]:
    """A JSON value of the store, waited for; empty if it does not come."""
    with contextlib.suppress(tf.errors.OpError):
        return json.loads(get_value(f"{_PREFIX}{key}", seconds=seconds))
    return {}


def _stored_end(seconds: float) -> End | None:
    end = _stored("end", seconds)
    return End(**end) if end else None


def _positions_of(tasks: Iterable[str]) -> dict[str, Position]:
    """The positions that other tasks have published."""
    return {task: Position(**_stored(f"position/{task}")) for task in tasks}


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
