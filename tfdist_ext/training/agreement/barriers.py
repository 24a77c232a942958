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

from tfdist_ext.cluster.liveness.reports import WaitReports, say, show_stacks
from tfdist_ext.errors import PeerError
from tfdist_ext.training import _tf_private as tp
from tfdist_ext.training.agreement.stalls import Phases, end_to_be_restarted, watched_process
from tfdist_ext.training.agreement.termination import STATUS, Termination
from tfdist_ext.training.protocols import TaskStatus

PATIENCE = 2.0  # seconds in a barrier before a task looks where the others are
LEAVE_LIMIT = 30.0  # seconds for the others to end, too
_TICK = 0.25
_LOOK_EVERY = 1.0
_CAUSE = 6.0  # seconds to learn why a collective has failed
_SLOW = 10.0  # seconds in a phase, at most, after which a task publishes how much it has read
_DEAF = 15.0  # seconds beyond its limit after which a task that publishes nothing has stalled
# Looks in a row that must find the same: an answer may be lost, and values change meanwhile. A look
# at a silent task takes a second. TensorFlow gives a task up after 10 seconds.
_LOOKS = {"gone": 3, "silent": 10, "differs": 3}
_PREFIX = "tfdist_ext/"
_STATUS = {
    "gone": "is gone: nothing listens at its address {} (it ended, crashed or was killed, or its"
    " machine is down: see its log), or it was restarted and the others were not",
    "silent": "does not answer at its address {}: it is stopped (SIGSTOP), or its machine is down"
    " or cannot be reached",
}
SAME_CALLS = (
    "call fit, evaluate, predict, save and the like on every worker, not on one alone: all of them"
    " compute, and of save and export the chief writes the files."
)


def peers_of(strategy: tf.distribute.Strategy) -> TaskStatus:
    """Returns the monitor of the tasks that a strategy's workers wait for, or a null object."""
    resolver = strategy.cluster_resolver
    if resolver is None or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return SingleTask(watched_process())
    jobs = resolver.cluster_spec().as_dict()
    tasks = tuple(
        (f"{job}:{index}", address)
        for job in ("chief", "worker")
        for index, address in enumerate(jobs.get(job, ()))
    )
    me = f"{resolver.task_type}:{resolver.task_id}"
    if len(tasks) < 2 or me not in dict(tasks) or not tp.has_coordination_service():
        return SingleTask(watched_process())
    return _monitor_of_process(me, tasks)


class SingleTask(TaskStatus):
    """The one task of a training.

    Args:
        phases: watched by a thread; None: nothing is watched.
    """

    def __init__(self, phases: Phases | None = None):
        self._phases = phases

    @contextlib.contextmanager
    def ends_at_a_step(self) -> Iterator[None]:
        with contextlib.closing(Termination()) as termination, termination.noted():
            self._termination = termination
            try:
                yield
            finally:
                self._termination = None


@dataclass(frozen=True)
class Position:
    """The position of a task in its training.

    Attributes:
        number: of the barrier that the task is in, or was in last.
        place: the public calls and what the barrier is for, as "fit (epoch 1, its end)".
        inside: whether the task is in the barrier, and not between two barriers.
        since: seconds since 1970; 0 where the task has not published a position.
        phase: of the training, between two barriers.
        limit: seconds that the phase may take; 0 where nobody watches.
        batches: read by the current execution, once it takes long.
        abandoned: the thread that made the calls has ended long ago, and the process has not.
        left: the script has ended.
    """

    number: int = 0
    place: str = ""
    inside: bool = False
    since: float = 0.0
    phase: str = ""
    limit: float = 0.0
    batches: int | None = None
    abandoned: bool = False
    left: bool = False

    def is_at(self, other: Position) -> bool:
        """Whether the task is inside the same barrier."""
        return self.inside and self.number == other.number

    def __str__(self) -> str:
        if self.inside or not self.place:
            return self.place or "its own code"
        own = {"callbacks": "its callbacks", "checkpoint": "a checkpoint"}
        return f"{own.get(self.phase, 'its own code')}, inside {self.place}"

    def since_when(self) -> str:
        """The end of a report on the task; "" where it has not published anything."""
        return f", since {_clock(self.since)} in {self}" if self.since else ""


@dataclass(frozen=True)
class End:
    """Why no barrier after number `completed` can be passed.

    Attributes:
        kind: "left", "failed", "gone", "differs" or "stalled".
        task: the cause; "" where it is not one task.
        text: the sentence for all tasks.
    """

    kind: str
    task: str
    text: str
    completed: int


class PeerMonitor(TaskStatus):
    """The other workers of the cluster, from the first distributed model until the exit.

    Args:
        me: this task, as "worker:0".
        tasks: (task, address) of all workers, the leader first.
    """

    _termination: Termination

    def __init__(self, me: str, tasks: tuple[tuple[str, str], ...]):
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
        self._failure: PeerError | None = None
        self._collective_failed = self._aborted = self._stacks_shown = False
        self._suspicion: End | None = None
        self._looks = 0  # in a row that found it
        self._published: Position | None = None
        self._publishing = threading.Lock()
        self._left = False
        self._batches_read: Callable[[], int] = lambda: 0
        self._termination = Termination()
        self._phases: Phases | None = Phases.of_environment()
        self._pid = os.getpid()
        self._thread = threading.current_thread()  # the one that makes the calls
        self._without_thread = 0.0  # seconds since it has ended
        for body in (self._listen, self._watch):
            threading.Thread(target=body, daemon=True, name="tfdist-peers").start()
        atexit.register(self._leave)

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
        number = self._position.number + 1
        self._raise_if_ended(number, place := self._place(detail))
        self._position = Position(number, place, inside=True, since=time.time())
        self._termination.deferred = True
        try:
            yield
            self._completed = self._position.number
        except tf.errors.OpError as error:
            self._termination.check(failed=True)
            kinds = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
            by_another = isinstance(error, kinds) or "ollective" in str(error)
            if by_another or self._end is not None:
                self._collective_failed = True
                self._end_is_known.wait(_CAUSE)
                # Others may have passed this barrier before the task that caused the end was gone.
                self._raise_if_ended(sys.maxsize if by_another else number, place)
            raise
        finally:
            self._collective_failed = False
            self._leave_barrier()
            self._termination.deferred = False
        self._termination.check()

    def reached(self, place: str) -> None:
        """Note what this worker has done, as "step 120", for its last message."""
        self._reached = place

    def reads_batches(self, count: Callable[[], int]) -> None:
        self._batches_read = count

    def ends_at_a_step(self) -> contextlib.AbstractContextManager[None]:
        return self._termination.noted()

    def _place(self, detail: str = "") -> str:
        call = " inside ".join(reversed(self._calls))
        return f"{call} ({detail})" if call and detail else call

    def _leave_barrier(self) -> None:
        self._position = replace(
            self._position, place=self._place(), inside=False, since=time.time()
        )

    # The end of all barriers.

    def _raise_if_ended(self, number: int, place: str) -> None:
        """Raise the error of this worker if a barrier cannot be passed; the same one each time."""
        end = self._end
        if end is None or number <= end.completed:
            return
        if self._failure is None:
            text = end.text
            if end.kind != "differs":
                text += f"; {self._me} is in {place}, which needs every worker."
            if end.kind == "left":
                text += f" Every worker must make the same calls: {SAME_CALLS}"
            self._failure = PeerError(text)
            self._failure.task = end.task
            self._failure.permanent = end.kind in ("left", "differs")
        raise self._failure from None

    def _decide(self, kind: str, task: str, text: str) -> None:
        """Store why no barrier can be passed any more, unless another worker was quicker."""
        end = End(kind, task, text, self._completed)
        with contextlib.suppress(tf.errors.OpError):
            if self._store_answers() and not tp.insert_value(
                f"{_PREFIX}end", json.dumps(asdict(end))
            ):
                end = _stored_end(1.0) or end
        self._learn(end)

    def _learn(self, end: End) -> None:
        self._end = self._end or end
        self._end_is_known.set()

    def _store_answers(self) -> bool:
        """Whether the leader does; a write to a store that does not answer waits forever."""
        return self._me == self._leader or _status_of(self._leader) == "there"

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
        number, waited, until_look = 0, 0.0, 0.0
        wait_reports = WaitReports()
        while True:
            self._termination.wait(_TICK)
            self._end_if_terminated()
            position = self._position
            if position.number != number or not position.inside:
                number, waited, wait_reports = position.number, 0.0, WaitReports()
            # Ticks, and not the clock: a process that was stopped has not waited.
            waited += _TICK
            stalled = self._phases is not None and self._phases.tick(_TICK)
            lives = self._thread is threading.main_thread() or self._thread.is_alive()
            self._without_thread = 0.0 if lives else self._without_thread + _TICK
            if self._end is not None:
                self._obey(self._end)
                continue
            until_look -= _TICK
            if until_look > 0 and not self._collective_failed:
                continue
            self._publish()
            if stalled:
                self._look_who_stalls()
            self._look(position, waited)
            hurries = self._suspicion is not None and self._suspicion.kind == "gone"
            until_look = _TICK if hurries else _LOOK_EVERY
            if position.inside and wait_reports.due(waited):
                self._report_wait(position, waited)

    def _obey(self, end: End) -> None:
        """Do what an end asks for: show stacks, end this process, abort the collective."""
        if end.kind == "stalled" and not self._stacks_shown:
            self._stacks_shown = True
            show_stacks()
            if end.task in ("", self._me):
                time.sleep(PATIENCE)  # the others receive it meanwhile, also from the leader
                end_to_be_restarted(end.text)
        position = self._position
        if position.inside and position.number > end.completed and not self._aborted:
            self._aborted = True
            tp.abort_collectives(end.text)

    def _publish(self) -> None:
        with self._publishing, contextlib.suppress(tf.errors.OpError):
            abandoned = self._without_thread >= LEAVE_LIMIT
            position = replace(self._position, abandoned=abandoned, left=self._left)
            if (phases := self._phases) is not None:
                position = replace(position, phase=phases.name, limit=phases.limit)
                if position.inside and phases.waited >= min(_SLOW, phases.limit / 2):
                    position = replace(position, batches=int(self._batches_read()))
            if position != self._published and self._store_answers():
                tp.replace_value(f"{_PREFIX}position/{self._me}", json.dumps(asdict(position)))
                self._published = position

    def _look(self, position: Position, waited: float) -> None:
        """Decide that no barrier can be passed, when several looks in a row find the same.

        Args:
            waited: seconds in the barrier.
        """
        looks, end = next(self._findings(position, waited), (0.0, None))
        self._looks = self._looks + 1 if end == self._suspicion else 1
        self._suspicion = end
        if self._collective_failed:  # TensorFlow has missed heartbeats already
            looks = min(looks, _LOOKS["gone"])
        if end is not None and self._looks >= looks and self._position == position:
            self._decide(end.kind, end.task, end.text)

    def _findings(self, position: Position, waited: float) -> Iterator[tuple[float, End]]:
        """(looks in a row that must find it, why barriers cannot be passed), likely ones first."""

        def end(kind: str, task: str, text: str) -> End:
            return End(kind, task, text, self._completed)

        for task, address in self._watched.items():
            status = _status_of(task)
            if status != "there":
                text = f"{task} {_STATUS[status].format(address)}"
                yield _LOOKS[status], end("gone", task, text)
        if not position.inside or waited < PATIENCE:
            return
        others = _positions_of(self._watched)
        for other in others.values():
            # Passed the barrier in which this task still waits, or is there with another call.
            moved_on = other.inside and other.number > position.number
            if moved_on or (other.is_at(position) and other.place != position.place):
                everyone = {self._me: position} | _positions_of(self._others)
                yield _LOOKS["differs"], end("differs", "", different_calls(everyone))
        for task, other in others.items():
            if other.abandoned and other.number < position.number:
                when = f"left at {_clock(other.since)}: the thread that trained there has ended"
                yield 1, end("left", task, f"{task} {when}")
            elif other.limit and not other.is_at(position):
                # It watches itself, unless its threads do not run, as one holds Python's lock.
                looks = (other.limit + _DEAF) / _LOOK_EVERY
                yield looks, end("stalled", task, f"{task} has stalled{other.since_when()}")

    def _look_who_stalls(self) -> None:
        """Name the task that has stalled: this one, or in a barrier the one that reads no data."""
        phases, position = self._phases, self._position
        assert phases is not None
        if not position.inside:
            self._decide("stalled", self._me, f"{self._me} has stalled: {phases}")
        elif self._me == self._leader:
            everyone = {self._me: self._published or position} | _positions_of(self._others)
            batches = {
                task: each.batches
                for task, each in everyone.items()
                if each.is_at(position) and each.batches is not None
            }
            if len(batches) == len(everyone):  # a task that is late watches itself
                task, text = who_stalls(batches)
                seconds = f"no step is done for {phases.waited:.0f} s (see --stall-timeout)"
                self._decide("stalled", task, f"{text}: {seconds}")

    def _report_wait(self, position: Position, waited: float) -> None:
        late = []
        for task, other in _positions_of(self._others).items():
            if not other.is_at(position):
                late.append(f"{task}{other.since_when()}")
        if late:
            more = f" and {len(late) - 5} others" if len(late) > 5 else ""
            names = f"{'; '.join(late[:5])}{more}"
            say(f"{self._me}: waiting in {position} for {waited:.0f} s for {names}")

    # The end of this process.

    def _end_if_terminated(self) -> None:
        """End after SIGTERM if the main thread cannot, because it waits in TensorFlow."""
        received = self._termination.received
        if received is None:
            return
        waited = time.monotonic() - received
        if self._termination.only_noted:  # the others may need as long to come to the step
            waited -= max(0.0, self._termination.grace - 3 * PATIENCE)
        if waited >= PATIENCE and self._position.inside and self._end is None:
            self._decide(*self._parting())
        if waited >= 2 * PATIENCE and self._position.inside:  # it compiles, perhaps
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(STATUS)

    def _parting(self) -> tuple[str, str, str]:
        """Returns kind, task and text of this task's own end."""
        kind, at = "failed", f"at {_clock(time.time())}"
        after = f" after {self._reached}" if self._reached else ""
        error = getattr(sys, "last_value", None)
        if self._termination.received is not None:
            text = f"{self._me} got SIGTERM {at} and ended{after}"
        elif error is not None:
            text = f"{self._me} failed {at}{after}: {type(error).__name__}: {_cause(error)}"
        else:
            kind, text = "left", f"{self._me} left {at}{after}: its script ended"
        return kind, self._me, text

    def _leave(self) -> None:
        """At exit: tell the others, and wait for them unless one has failed.

        Where a worker's process is gone, each collective of the others fails from then on; and
        without the leader no worker can send a message to another.
        """
        if os.getpid() != self._pid:  # a child that was forked
            return
        kind, task, text = self._parting()
        failed = self._failure is not None or kind != "left"
        if self._failure is None:
            self._decide(kind, task, text)
        self._left = True
        self._publish()
        if not failed:
            self._wait_for_others()
        elif self._me == self._leader:
            time.sleep(PATIENCE)  # the others receive the end meanwhile

    def _wait_for_others(self) -> None:
        started, reported = time.monotonic(), False
        while (waited := time.monotonic() - started) < LEAVE_LIMIT:
            positions = _positions_of(self._others)
            others = {task: each for task, each in positions.items() if not each.left}
            failed = self._end is not None and self._end.kind != "left"
            if not others or failed or not self._store_answers():
                return
            if waited > LEAVE_LIMIT / 6 and not reported:
                reported = True
                task, position = next(iter(others.items()))
                say(
                    f"{self._me}: done; waiting for {task} to end{position.since_when()}, for at"
                    f" most {LEAVE_LIMIT:g} s"
                )
            time.sleep(_TICK)


# One for this process, as the store of its cluster is.
_monitor_of_process = functools.cache(PeerMonitor)


def _stored(key: str, seconds: float = 0.1) -> dict[str, Any]:
    """A JSON value of the store; empty where there is none, or the store does not answer."""
    with contextlib.suppress(tf.errors.OpError):
        return json.loads(tp.get_value(f"{_PREFIX}{key}", seconds=seconds) or "{}")
    return {}


def _stored_end(seconds: float) -> End | None:
    found = _stored("end", seconds)
    return End(**found) if found else None


def _positions_of(tasks: Iterable[str]) -> dict[str, Position]:
    """The positions of other tasks, as far as they have published them."""
    return {task: Position(**_stored(f"position/{task}")) for task in tasks}


def _status_of(task: str) -> str:
    job, index = task.split(":")
    return tp.peer_status(job, int(index))


def _cause(error: BaseException) -> str:
    """Returns the line of a message that names the cause; TensorFlow's start with a report."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Graph execution error"):
        causes = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
        lines = [*causes, *lines]
    return lines[0][:300]


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def who_stalls(batches: Mapping[str, int]) -> tuple[str, str]:
    """Returns (task, description) of the tasks that have read less than others.

    The task is "" where all have read as much.
    """
    least = min(batches.values())
    behind = [task for task, count in batches.items() if count == least]
    if len(behind) == len(batches):
        return "", "all workers have stalled"
    others = f" with {', '.join(behind[1:])}" if behind[1:] else ""
    return behind[0], f"{behind[0]}{others} has stalled reading its data"


def different_calls(positions: Mapping[str, Position]) -> str:
    """The message where tasks have made different calls."""
    tasks: dict[str, list[str]] = {}
    for task, position in sorted(positions.items()):
        tasks.setdefault(str(position), []).append(task)
    shown = "; ".join(f"{', '.join(names)} in {place}" for place, names in tasks.items())
    return f"every worker must make the same calls in the same order, got {shown}: {SAME_CALLS}"
