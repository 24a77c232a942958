"""Barriers between the workers of a synchronous training, and why one cannot be passed.

A collective waits for all workers, silently and without a limit. So each place where workers wait
for each other is a barrier with a number and a name, the same on all workers. A thread of each
worker finds out within seconds that a barrier cannot be passed, and makes the collective fail with
a sentence that names the task. A slow worker is no error: the workers that wait report it.

- Every worker publishes its position.
- The first worker (the leader) looks at the addresses and the positions of all others, and decides
  that a barrier cannot be passed. The others look at the leader.
- A worker that ends, or that has stalled outside of a barrier, decides this for itself.

Workers talk through the key-value store of TensorFlow's coordination service, in the leader's
process:

    position/TASK  the barrier that a task is in, or was in last, and its phase
    left/TASK      how a task has ended
    end            why no further barrier can be passed; the first value stays
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_ext.cluster.liveness import WaitReports, say, show_stacks
from tfdist_ext.errors import PeerError
from tfdist_ext.launch.exit_codes import PREEMPTED
from tfdist_ext.training import _tf_private as tp
from tfdist_ext.training.agreement.single_task import (
    Phases,
    TaskStatus,
    end_to_be_restarted,
    watched_phases,
)

PATIENCE = 2.0  # seconds in a barrier before a task looks where the others are
LEAVE_LIMIT = 30.0  # seconds to wait for the end of a task after the end of its script
_LOOK_EVERY = 0.25  # seconds
_CAUSE = 6.0  # seconds to learn why a collective has failed
# Looks in a row that must find the same: an answer may be lost, and values change meanwhile. A look
# at a silent task takes a second more. TensorFlow gives a task up after 10 seconds.
_LOOKS = {"gone": 3, "silent": 9, "differs": 8, "left": 1}
_PREFIX = "tfdist_ext/"
_STATUS = {
    "gone": "is gone: nothing listens at its address {} (it ended, crashed or was killed, or its"
    " machine is down: see its log), or it was restarted and the others were not",
    "silent": "does not answer at its address {}: it is stopped (SIGSTOP), or its machine is down"
    " or cannot be reached",
}
_PHASES = {"callbacks": "its callbacks", "checkpoint": "a checkpoint"}
SAME_CALLS = (
    "call fit, evaluate, predict, save and the like on every worker, not on one alone: all of them"
    " compute, and of save and export the chief writes the files."
)


def peers_of(strategy: tf.distribute.Strategy) -> TaskStatus:
    """Returns the monitor of the workers of a strategy; a plain status where there is one task."""
    resolver = strategy.cluster_resolver
    if resolver is None or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return TaskStatus(watched_phases())
    jobs = resolver.cluster_spec().as_dict()
    tasks = tuple(
        (f"{job}:{index}", address)
        for job in ("chief", "worker")
        for index, address in enumerate(jobs.get(job, ()))
    )
    me = f"{resolver.task_type}:{resolver.task_id}"
    if len(tasks) < 2 or me not in dict(tasks) or not tp.has_coordination_service():
        return TaskStatus(watched_phases())
    return _monitor_of_process(me, tasks)


@dataclass(frozen=True)
class Position:
    """The position of a task in its training.

    Attributes:
        number: the number of the barrier that the task is in, or was in last.
        place: the public calls and what the barrier is for, as "fit (epoch 1, its end)".
        inside: whether the task is in the barrier, and not between two barriers.
        since: seconds since 1970; 0 if the task has not published a position.
        phase: the phase of the training, between two barriers.
        batches: batches read by the current execution, inside a barrier.
        left: whether the thread that made the calls has ended.
    """

    number: int = 0
    place: str = ""
    inside: bool = False
    since: float = 0.0
    phase: str = ""
    batches: int = 0
    left: bool = False

    def is_at(self, other: Position) -> bool:
        """Whether the task is inside the same barrier."""
        return self.inside and self.number == other.number

    def __str__(self) -> str:
        if self.inside or not self.place:
            return self.place or "its own code"
        return f"{_PHASES.get(self.phase, 'its own code')}, inside {self.place}"


@dataclass(frozen=True)
class End:
    """Why no barrier after number `completed` can be passed.

    Attributes:
        kind: "left", "failed", "gone", "silent", "differs" or "stalled".
        task: the cause; "" if it is not one task.
        text: the sentence for all tasks.
    """

    kind: str
    task: str
    text: str
    completed: int = 0


class PeerMonitor(TaskStatus):
    """The other workers of the cluster, from the first distributed model until the exit.

    Args:
        me: this task, as "worker:0".
        tasks: (task, address) of all workers, the leader first.
    """

    def __init__(self, me: str, tasks: tuple[tuple[str, str], ...]):
        super().__init__(Phases.of_environment())
        self._me = me
        self._leader = tasks[0][0]
        self._others = [task for task, _ in tasks if task != me]
        self._watched = dict(tasks[1:] if me == self._leader else tasks[:1])
        self._calls: list[str] = []
        self._position = Position(since=time.time())
        self._completed = 0  # the number of the last barrier that was passed
        self._reached = ""  # the last step that was done, for messages
        self._end: End | None = None
        self._end_is_known = threading.Event()
        self._published: Position | None = None
        self._batches_read: Callable[[], int] = int
        self._thread = threading.current_thread()  # the one that makes the calls
        for body in (self._listen, self._watch):
            threading.Thread(target=body, daemon=True, name="tfdist-peers").start()
        atexit.register(self._leave, os.getpid())

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Scope of a public call, which every worker must make. SIGTERM ends it."""
        self._thread = threading.current_thread()
        self._calls.append(name)
        self._leave_barrier()
        try:
            with self._termination.handled(), super().call(name):
                yield
        finally:
            self._calls.pop()
            self._leave_barrier()

    @contextlib.contextmanager
    def barrier(self, detail: str = "") -> Iterator[None]:
        """Scope in which all workers wait for each other; a barrier inside another is part of it.

        Raises:
            PeerError: the barrier cannot be passed, because of another worker.
        """
        if self._position.inside:
            yield
            return
        self._termination.check()
        number, place = self._position.number + 1, self._place(detail)
        self._raise_if_ended(number, place)
        self._position = Position(number, place, inside=True, since=time.time())
        self._termination.deferred = True
        try:
            yield
            self._completed = number
        except tf.errors.OpError as error:
            self._termination.check(failed=True)
            kinds = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
            if isinstance(error, kinds) or "ollective" in str(error):  # because of another worker
                self._end_is_known.wait(_CAUSE)
                # Others may have passed this barrier before the task that caused the end was gone.
                number = sys.maxsize
            self._raise_if_ended(number, place)
            raise
        finally:
            self._leave_barrier()
            self._termination.deferred = False
        self._termination.check()

    def reached(self, place: str) -> None:
        self._reached = f" after {place}"

    def reads_batches(self, count: Callable[[], int]) -> None:
        self._batches_read = count

    def _place(self, detail: str = "") -> str:
        call = " inside ".join(reversed(self._calls))
        return f"{call} ({detail})" if call and detail else call

    def _leave_barrier(self) -> None:
        self._position = replace(
            self._position, place=self._place(), inside=False, since=time.time()
        )

    # The end of all barriers.

    def _raise_if_ended(self, number: int, place: str) -> None:
        """Raises the error of this worker if the barrier with this number cannot be passed."""
        end = self._end
        if end is None or number <= end.completed:
            return
        text = end.text
        if end.kind != "differs":
            text += f"; {self._me} is in {place}, which needs every worker."
        if end.kind == "left":
            text += f" Every worker must make the same calls: {SAME_CALLS}"
        failure = PeerError(text)
        failure.task = end.task
        failure.permanent = end.kind in ("left", "differs")
        raise failure from None

    def _decide(self, end: End) -> None:
        """Stores why no barrier can be passed any more, unless another worker was quicker."""
        end = replace(end, completed=self._completed)
        if self._leader_answers():
            with contextlib.suppress(tf.errors.OpError):
                tp.insert_value(f"{_PREFIX}end", json.dumps(asdict(end)))  # the first one stays
                end = _stored_end(1.0) or end
        self._learn(end)

    def _learn(self, end: End) -> None:
        self._end = self._end or end
        self._end_is_known.set()

    def _leader_answers(self) -> bool:
        """Whether the store can be written to; a write waits forever if the leader is frozen."""
        return self._me == self._leader or tp.peer_status(self._leader) == "there"

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
        before, waited, reports = self._position, 0.0, WaitReports()
        looks: dict[End, int] = {}  # in a row that found the same
        while self._end is None:
            self._wait_for_signal()
            if (position := self._position) is not before:
                before, waited, reports, looks = position, 0.0, WaitReports(), {}
            # Ticks, and not the clock: a process that was stopped has not waited.
            waited += _LOOK_EVERY
            stalled = self._phases.tick(_LOOK_EVERY)
            statuses = {task: tp.peer_status(task) for task in self._watched}
            if statuses.get(self._leader, "there") == "there":
                self._publish(position)
            if stalled:
                self._look_who_stalls(position)
            looks = {end: looks.get(end, 0) + 1 for end in self._found(position, waited, statuses)}
            for end, count in looks.items():
                if count >= _LOOKS[end.kind] and self._position is position:
                    self._decide(end)
            if position.inside and reports.due(waited):
                self._report_wait(position, waited)
        self._obey(self._end)

    def _obey(self, end: End) -> None:
        """Shows stacks or ends this process, if it has stalled; else aborts its collectives."""
        if end.kind == "stalled":
            show_stacks()
            if end.task == self._me:
                time.sleep(PATIENCE)  # the others receive it meanwhile, also from the leader
                end_to_be_restarted(end.text)
        while not (self._position.inside and self._position.number > end.completed):
            self._wait_for_signal()
        tp.abort_collectives(end.text)
        while True:
            self._wait_for_signal()

    def _publish(self, position: Position) -> None:
        batches = int(self._batches_read()) if position.inside else 0
        left, phase = not self._thread.is_alive(), self._phases.name
        position = replace(position, left=left, batches=batches, phase=phase)
        if position != self._published:
            with contextlib.suppress(tf.errors.OpError):
                tp.replace_value(f"{_PREFIX}position/{self._me}", json.dumps(asdict(position)))
                self._published = position

    def _found(
        self, position: Position, waited: float, statuses: Mapping[str, str]
    ) -> Iterator[End]:
        """Yields what lets no barrier be passed, if some looks in a row find the same.

        Args:
            waited: seconds in this position.
            statuses: task -> whether it answers.
        """
        for task, status in statuses.items():
            if status != "there":
                text = f"{task} {_STATUS[status].format(self._watched[task])}"
                yield End(status, task, text)
        if not position.inside or waited < PATIENCE:
            return
        for task, other in _positions_of(self._watched).items():
            if other.inside and other.number >= position.number:
                # It has passed the barrier in which this task waits, or is there with another call.
                if (other.number, other.place) != (position.number, position.place):
                    yield End("differs", "", self._different_calls(position))
            elif other.left and other.number < position.number and waited >= LEAVE_LIMIT:
                when = f"left at {_clock(other.since)}: the thread that trained there has ended"
                yield End("left", task, f"{task} {when}")

    def _different_calls(self, position: Position) -> str:
        tasks: dict[str, list[str]] = {}
        for task, each in sorted({self._me: position, **_positions_of(self._others)}.items()):
            tasks.setdefault(str(each), []).append(task)
        got = "; ".join(f"{', '.join(names)} in {place}" for place, names in tasks.items())
        return f"every worker must make the same calls in the same order, got {got}: {SAME_CALLS}"

    def _look_who_stalls(self, position: Position) -> None:
        """Names the task that has stalled: this one, or in a barrier the one that reads no data."""
        if not position.inside:
            self._decide(End("stalled", self._me, f"{self._me} has stalled: {self._phases}"))
        elif self._me == self._leader:
            everyone = {self._me: self._published or position} | _positions_of(self._others)
            if all(each.is_at(position) for each in everyone.values()):  # a late one watches itself
                least = min(each.batches for each in everyone.values())
                behind = [task for task, each in everyone.items() if each.batches == least]
                text = f"{' with '.join(behind)} has stalled reading its data"
                if len(behind) == len(everyone):
                    text = "all workers have stalled"
                seconds = f"no step is done for {self._phases.waited:.0f} s (see --stall-timeout)"
                self._decide(End("stalled", behind[0], f"{text}: {seconds}"))

    def _report_wait(self, position: Position, waited: float) -> None:
        late = [
            f"{task}, since {_clock(other.since)} in {other}" if other.since else task
            for task, other in _positions_of(self._others).items()
            if not other.is_at(position)
        ]
        if late:
            more = f" and {len(late) - 5} others" if len(late) > 5 else ""
            names = f"{'; '.join(late[:5])}{more}"
            say(f"{self._me}: waiting in {position} for {waited:.0f} s for {names}")

    # The end of this process.

    def _wait_for_signal(self) -> None:
        """Waits until the next look; ends this process if its main thread waits in TensorFlow."""
        self._termination.wait(_LOOK_EVERY)
        received = self._termination.received
        if received is None:
            return
        waited = time.monotonic() - received
        if self._termination.only_noted:  # the others may need as long to come to the step
            waited -= max(0.0, self._termination.grace - 3 * PATIENCE)
        if waited >= PATIENCE and self._position.inside and self._end is None:
            self._decide(self._own_end())
        if waited >= 2 * PATIENCE and self._position.inside:  # it compiles, perhaps
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(PREEMPTED)

    def _own_end(self) -> End:
        """Why this task ends."""
        at = f"at {_clock(time.time())}"
        error = getattr(sys, "last_value", None)
        if self._termination.received is not None:
            text = f"{self._me} got SIGTERM {at} and ended{self._reached}"
        elif error is not None:
            text = f"{self._me} failed {at}{self._reached}: {type(error).__name__}: {_cause(error)}"
        else:
            return End("left", self._me, f"{self._me} left {at}{self._reached}: its script ended")
        return End("failed", self._me, text)

    def _leave(self, pid: int) -> None:
        """At exit: tells the others, and waits for them unless this task has failed.

        When a worker's process is gone, each collective of the others fails. Without the leader no
        worker can send a message to another.
        """
        if os.getpid() != pid:  # a child that was forked
            return
        end = self._own_end()
        self._decide(end)
        if self._leader_answers():
            with contextlib.suppress(tf.errors.OpError):
                tp.insert_value(f"{_PREFIX}left/{self._me}", json.dumps(asdict(end)))
        if end.kind != "left":
            time.sleep(PATIENCE if self._me == self._leader else 0.0)  # the others receive the end
            return
        deadline, waits_for = time.monotonic() + LEAVE_LIMIT, list(self._others)
        while waits_for and time.monotonic() < deadline and self._leader_answers():
            if self._end is not None and self._end.kind != "left":
                return
            waits_for = [task for task in waits_for if not _stored(f"left/{task}")]


# One for this process, because its cluster has one store.
_monitor_of_process = functools.cache(PeerMonitor)


def _stored(key: str, seconds: float = 0.1) -> dict[str, Any]:
    """A JSON value of the store, waited for; empty if it does not come."""
    with contextlib.suppress(tf.errors.OpError):
        return json.loads(tp.get_value(f"{_PREFIX}{key}", seconds=seconds) or "{}")
    return {}


def _stored_end(seconds: float) -> End | None:
    found = _stored("end", seconds)
    return End(**found) if found else None


def _positions_of(tasks: Iterable[str]) -> dict[str, Position]:
    """The positions that other tasks have published."""
    return {task: Position(**_stored(f"position/{task}")) for task in tasks}


def _cause(error: BaseException) -> str:
    """The line of a message that names the cause; TensorFlow's messages start with a report."""
    text = str(error).strip()
    found = re.search(r"^[\w.]+(Error|Exception)\b.*: .*", text, re.MULTILINE)
    return (found[0] if found else text.partition("\n")[0])[:300]


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
