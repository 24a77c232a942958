"""Barriers between the workers of a synchronous training, and who cannot reach the next one.

A collective waits for all workers, silently and without a limit. If a worker has left, died or
called something else, TensorFlow reports "Collective ops is aborted" after ten seconds, or nothing.
So each place where workers wait for each other is a barrier with a number and a name, the same on
all workers. A thread finds out within seconds that the barrier cannot be passed, and makes the
collective fail with a sentence that names the task. A slow worker is no error: the workers that
wait for it report so on stderr.

Workers talk through the key-value store of TensorFlow's coordination service, which the first task
(the leader) keeps:

    position/TASK  which barrier a task is in, or was in last, and its progress there
    end            why no barrier can be passed any more; the first task to know writes it
    left/TASK      the script of this task has ended: "left", or "failed"
    call/N/TASK    the call this task has made at barrier N, where calls differ
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
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.cluster.liveness import reports
from tfdist_ext.cluster.liveness.reports import say, show_stacks
from tfdist_ext.errors import PeerError, TrainingError
from tfdist_ext.strategies.serving import ended_as_failure
from tfdist_ext.training import _tf_private as tp
from tfdist_ext.training.agreement.stalls import (
    Phases,
    Progress,
    end_to_be_restarted,
    python_in_step,
    watched_process,
    who_stalls,
)
from tfdist_ext.training.agreement.termination import STATUS, Termination
from tfdist_ext.training.protocols import TaskStatus

__all__ = ["PeerMonitor", "Position", "SingleTask", "different_calls", "odd_one", "peers_of"]

PATIENCE = 2.0  # seconds in a barrier before a task looks where the others are
LEAVE_LIMIT = 30.0  # seconds for the others to end, too
_TICK = 0.25
_PUBLISHES = 1.0  # seconds after which a task publishes its position
_PROGRESS = 10.0  # seconds in one execution, at most, after which a task publishes its progress
_DEAF = 15.0  # seconds beyond its limit after which a task that publishes nothing has stalled
_LOOKS = 3  # in a row that must find the same: one may be lost, and values change meanwhile
_SILENT_LOOKS = 15  # of one or two seconds; a machine that swaps may be silent for a while
_PREFIX = "tfdist_ext/"


def peers_of(strategy: tf.distribute.Strategy) -> TaskStatus:
    """The monitor of the tasks that a strategy's workers wait for; or a null object."""
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
    return _of_process(me, tasks)


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
    """Where a task is.

    Attributes:
        number: of the barrier it is in, or was in last.
        call: the public calls that it is in, the outermost first: "fit", "fit > evaluate".
        detail: what the barrier is for.
        inside: it is in the barrier, and not between two.
        since: seconds since 1970; 0 where that is not known.
        phase: of the training, between two barriers.
        limit: seconds that the phase may take; 0 where nobody watches.
        abandoned: the thread that made the task's calls has ended, and the process has not.
        progress: in an execution that takes long.
    """

    number: int = 0
    call: str = ""
    detail: str = ""
    inside: bool = False
    since: float = 0.0
    phase: str = ""
    limit: float = 0.0
    abandoned: bool = False
    progress: Progress = field(default_factory=Progress)

    def is_at(self, other: Position) -> bool:
        """Whether the task is inside the same barrier."""
        return self.inside and self.number == other.number

    def __str__(self) -> str:
        call = " inside ".join(reversed(self.call.split(" > "))) if self.call else ""
        place = f"{call} ({self.detail})" if call and self.detail else call
        if self.inside or not place:
            return place or "its own code"
        own = {"callbacks": "its callbacks", "checkpoint": "a checkpoint"}
        return f"{own.get(self.phase, 'its own code')}, inside {place}"

    def since_when(self) -> str:
        """For a report on the task; "" where it has not published anything."""
        return f", since {_clock(self.since)} in {self}" if self.since else ""


@dataclass(frozen=True)
class _End:
    """Why no barrier after number `completed` can be passed.

    Attributes:
        kind: "left", "failed", "gone", "differs" or "stalled".
        task: the cause; "" where it is not one task.
    """

    kind: str
    task: str
    text: str
    completed: int


# (what was found, looks in a row that must find it, kind, task and text of the end it leads to)
_Finding: TypeAlias = tuple[Hashable, float, str, str, str]

_STATUS = {
    "gone": "is gone: nothing listens at its address {} (it ended, crashed or was killed, or its"
    " machine is down: see its log)",
    "restarted": "is another process than before (it was restarted, and the others were not)",
    "silent": "does not answer: it is stopped (SIGSTOP), or its machine is down or cannot be"
    " reached",
}


class PeerMonitor(TaskStatus):
    """The other workers of the cluster, from the first distributed model until the exit.

    Args:
        me: this task, as "worker:0".
        tasks: (task, address) of all workers, the one that keeps the store first.
    """

    _termination: Termination

    def __init__(self, me: str, tasks: tuple[tuple[str, str], ...]):
        self._me = me
        self._leader = tasks[0][0]
        self._addresses = {task: address for task, address in tasks if task != me}
        self._calls: list[str] = []
        self._position = Position(since=time.time())
        self._completed = 0  # the number of the last barrier that was passed
        self._reached = ""  # the last step that was done, for messages
        self._end: _End | None = None
        self._failure: PeerError | None = None
        self._aborted = self._stacks_shown = False
        self._looking = threading.Lock()
        self._looks = 0
        # Finding -> (looks in a row that found it, the last one).
        self._alarms: dict[Hashable, tuple[int, int]] = {}
        self._published: Position | None = None
        self._progress = Progress()
        self._batches_read: Callable[[], int] = lambda: 0
        self._termination = Termination()
        self._phases: Phases | None = Phases.of_environment()
        self._pid = os.getpid()
        self._thread = threading.current_thread()  # the one that makes the calls
        for body in (self._listen, self._watch):
            threading.Thread(target=body, daemon=True, name="tfdist-peers").start()
        atexit.register(self._leave)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Scope of a public call, which every worker must make. SIGTERM ends it."""
        self._calls.append(name)
        self._thread = threading.current_thread()
        outer = self._position
        self._position = self._between(outer)
        try:
            with self._termination.handled(), super().call(name):
                yield
        finally:
            self._calls.pop()
            self._position = replace(self._between(outer), number=self._position.number)

    @contextlib.contextmanager
    def barrier(self, detail: str = "") -> Iterator[None]:
        """Scope of something in which all workers wait for each other.

        Raises:
            PeerError: the barrier cannot be passed, because of another worker.
        """
        self._termination.check()
        outer = self._position
        detail = detail or (outer.detail if outer.inside else "")
        position = Position(outer.number + 1, " > ".join(self._calls), detail, True, time.time())
        if end := self._end_before(position):
            raise self._failed(end, position)
        self._position = position
        self._termination.deferred = True
        try:
            yield
            self._completed = self._position.number
        except tf.errors.OpError as error:
            self._termination.check(failed=True)
            if failure := self._cause_of(error):
                raise failure from None
            raise
        finally:
            # An outer barrier continues under a new number: what it waits for comes after.
            number = self._position.number
            if outer.inside:
                self._position = replace(outer, number=number + 1)
            else:
                self._position = replace(self._between(position), number=number)
            self._termination.deferred = outer.inside
        if not outer.inside:
            self._termination.check()

    def reached(self, place: str) -> None:
        """Note what this worker has done, as "step 120", for its last message."""
        self._reached = place

    def reads_batches(self, count: Callable[[], int]) -> None:
        self._batches_read = count

    def ends_at_a_step(self) -> contextlib.AbstractContextManager[None]:
        return self._termination.noted()

    def different_calls(self, name: str) -> TrainingError:
        """The error where workers have made different calls; all of them are in this barrier."""
        number = self._position.number
        tp.insert_value(f"{_PREFIX}call/{number}/{self._me}", name)
        calls = {self._me: name}
        for task in self._addresses:
            calls[task] = tp.get_value(f"{_PREFIX}call/{number}/{task}", seconds=5.0) or "?"
        return TrainingError(different_calls(calls))

    # The end of all barriers.

    def _between(self, position: Position) -> Position:
        call = " > ".join(self._calls)
        return replace(position, call=call, detail="", inside=False, since=time.time())

    def _end_before(self, position: Position) -> _End | None:
        """Why this barrier cannot be passed, where that is known."""
        end = self._end
        return end if end is not None and position.number > end.completed else None

    def _failed(self, end: _End, position: Position) -> PeerError:
        """The error for this worker, the same one each time."""
        if self._failure is None:
            text = end.text
            if end.kind != "differs":
                text += f"; {self._me} is in {position}, which needs every worker."
            if end.kind == "left":
                text += (
                    " Every worker must make the same calls, fit, evaluate, predict and save"
                    " among them; of save and export the chief writes the files."
                )
            self._failure = PeerError(text)
            self._failure.task = end.task
            self._failure.permanent = end.kind in ("left", "differs")
        return self._failure

    def _cause_of(self, error: tf.errors.OpError) -> PeerError | None:
        """The failure of another worker that made a collective fail here; None: it is ours."""
        position = self._position
        ours = not isinstance(
            error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.CancelledError
        )
        if ours and "ollective" not in str(error) and self._end is None:
            return None
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline:
            self._look(position, silent=_LOOKS)  # TensorFlow has missed its heartbeats already
            if end := self._end_before(position):
                return self._failed(end, position)
            time.sleep(_PUBLISHES / 2)  # the last of the looks finds positions that are up to date
        return None

    def _store_answers(self) -> bool:
        """Whether the leader does; a write to a store that does not answer waits forever."""
        return self._me == self._leader or _status_of(self._leader) == "there"

    def _decide(self, kind: str, task: str, text: str, completed: int) -> None:
        """Write why no barrier can be passed any more, unless another worker was quicker."""
        end = _End(kind, task, text, completed)
        with contextlib.suppress(tf.errors.OpError):
            written = json.dumps(asdict(end))
            if self._store_answers() and not tp.insert_value(f"{_PREFIX}end", written):
                end = _stored_end(1.0) or end
        self._end = self._end or end

    # The threads.

    def _listen(self) -> None:
        """Receive at once an end that another worker has noticed or caused."""
        while self._end is None:
            found = _stored_end(60.0)
            self._end = self._end or found
            if found is None:
                time.sleep(1.0)  # the leader is gone, or busy

    def _watch(self) -> None:
        """Look at the barrier that this worker is in, every now and then."""
        number, ticks, next_look, next_publish = 0, 0, 0.0, 0.0
        wait_reports = reports.WaitReports()
        while True:
            self._termination.wait(_TICK)
            self._end_if_terminated()
            if self._end is None and self._phases is not None and self._phases.tick(_TICK):
                self._look_who_stalls(self._phases)
            if self._end is not None:
                self._end_if_stalled(self._end)
            position = self._position
            if time.monotonic() >= next_publish:
                self._publish()
                next_publish = time.monotonic() + _PUBLISHES
            if not position.inside:
                continue
            if position.number != number:
                number, ticks, next_look = position.number, 0, PATIENCE
                wait_reports = reports.WaitReports()
                self._alarms.clear()
            ticks += 1
            # Ticks, and not the clock: a process that was stopped has not waited.
            waited = ticks * _TICK
            if end := self._end_before(position):
                self._end_if_stalled(end)
                self._abort(end.text)
            elif waited >= next_look:
                next_look = waited + 1.0
                self._look(position)
                if self._end is None and wait_reports.due(waited):
                    self._report_wait(position, waited)

    def _abort(self, text: str) -> None:
        if not self._aborted:
            self._aborted = True
            tp.abort_collectives(text)

    def _publish(self) -> None:
        thread = self._thread  # the end of the main one is that of the script: see `_leave`
        abandoned = thread is not threading.main_thread() and not thread.is_alive()
        position, phases = replace(self._position, abandoned=abandoned), self._phases
        if phases is not None:
            if phases.waited >= min(_PROGRESS, phases.limit / 2):
                batches = int(self._batches_read())
                self._progress = Progress(position.number, batches, python_in_step())
            position = replace(
                position, phase=phases.name, limit=phases.limit, progress=self._progress
            )
        if position == self._published or not self._store_answers():
            return
        with contextlib.suppress(tf.errors.OpError):
            tp.replace_value(f"{_PREFIX}position/{self._me}", json.dumps(asdict(position)))
            self._published = position

    def _others(self) -> dict[str, Position]:
        return {task: _position_of(task) for task in self._addresses}

    # A training that has stalled.

    def _look_who_stalls(self, phases: Phases) -> None:
        """This task is in its phase for too long; or all are in an execution that takes too long.

        Where another task is late, that one watches itself: see `_findings`.
        """
        position, others = self._position, self._others()
        if not position.inside:
            text = f"{self._me} has stalled: {phases}"
            self._decide("stalled", self._me, text, position.number)
            return
        known = {task: other.progress for task, other in others.items()}
        known[self._me] = self._progress
        if any(progress.number != position.number for progress in known.values()):
            return  # late, or not published yet
        task, text = who_stalls(known)
        for_how_long = f"no step is done for {phases.waited:.0f} s (see --stall-timeout)"
        self._decide("stalled", task, f"{text}: {for_how_long}", position.number - 1)

    def _end_if_stalled(self, end: _End) -> None:
        if end.kind != "stalled" or self._stacks_shown:
            return
        self._stacks_shown = True
        show_stacks()
        if end.task in ("", self._me):
            time.sleep(PATIENCE)  # the others receive it meanwhile, also where this is the leader
            end_to_be_restarted(end.text)

    # A barrier that cannot be passed.

    def _look(self, position: Position, silent: int = _SILENT_LOOKS) -> None:
        """Find out whether this barrier can be passed; sets `_end` where it cannot.

        Args:
            silent: looks in a row after which a task that does not answer counts as gone.
        """
        with self._looking:
            self._looks += 1
            self._publish()
            stored = _stored_end(0.1)
            self._end = self._end or stored
            for found, looks, kind, task, text in self._findings(position, silent):
                if self._end is None and self._alarm(found, position, looks):
                    self._decide(kind, task, text, position.number - 1)

    def _findings(self, position: Position, silent: int) -> Iterator[_Finding]:
        """Why this barrier may not be passed, the likely cause first."""
        # The leader is the first: where it is gone, others may have ended because of that.
        for task, at in self._addresses.items():
            status = _status_of(task)
            if status != "there":
                text = f"{task} {_STATUS[status].format(at)}"
                yield (task, status), silent if status == "silent" else _LOOKS, "gone", task, text
        others = self._others()
        waiting = {task: other for task, other in others.items() if other.inside}
        for task, other in waiting.items():
            mine = (position.call, position.detail)
            differs = other.is_at(position) and (other.call, other.detail) != mine
            # It has passed the barrier in which this worker still waits, without this one.
            if differs or other.number > position.number:
                calls = {t: str(p) for t, p in {self._me: position, **waiting}.items()}
                # One that is on its way to this barrier is named too, and is not the odd one.
                shown = {t: str(p) for t, p in others.items()} | calls
                yield (task, other), _LOOKS, "differs", odd_one(calls), different_calls(shown)
        for task, other in others.items():
            if other.abandoned and other.number < position.number:
                # Another thread may take over, so it has as long as others have at the exit.
                when = f"left at {_clock(other.since)}: the thread that trained there has ended"
                yield (task, "left"), LEAVE_LIMIT, "left", task, f"{task} {when}"
            elif other.limit and not other.is_at(position):
                # It watches itself, unless its threads do not run, as one holds Python's lock.
                text = f"{task} has stalled{other.since_when()}"
                yield ("stalled", task, other), other.limit + _DEAF, "stalled", task, text

    def _alarm(self, finding: Hashable, position: Position, looks: float) -> bool:
        """Whether several looks in a row found this, in a barrier that has not ended."""
        found, look = self._alarms.get(finding, (0, 0))
        found = found + 1 if look == self._looks - 1 else 1
        self._alarms[finding] = found, self._looks
        return found >= looks and self._position == position

    def _report_wait(self, position: Position, waited: float) -> None:
        late = []
        for task, other in self._others().items():
            if not other.is_at(position):
                silent = _status_of(task) != "there"
                why = ", which does not answer: is it stopped?" if silent else other.since_when()
                late.append(f"{task}{why}")
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
        if waited >= PATIENCE and self._position.inside and not self._aborted:
            self._decide(*self._parting())
            self._abort(f"{self._me} got SIGTERM")
        if waited >= 2 * PATIENCE and self._position.inside:  # it compiles, perhaps
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(STATUS)

    def _parting(self) -> tuple[str, str, str, int]:
        """kind, task, text and passed barriers of this task's own end."""
        kind, at = "failed", f"at {_clock(time.time())}"
        after = f" after {self._reached}" if self._reached else ""
        error = getattr(sys, "last_value", None)
        if self._termination.received is not None:
            text = f"{self._me} got SIGTERM {at} and ended{after}"
        elif error is not None:
            text = f"{self._me} failed {at}{after}: {summary(error)}"
        elif ended_as_failure():
            text = f"{self._me} failed {at}{after}: its script ended with a status other than 0"
        else:
            kind, text = "left", f"{self._me} left {at}{after}: its script ended"
        return kind, self._me, text, self._completed

    def _leave(self) -> None:
        """At exit: tell the others, and wait for them unless one has failed.

        Where a worker's process is gone, each collective of the others fails from then on; and
        without the leader no worker can send a message to another.
        """
        if os.getpid() != self._pid:  # a child that was forked
            return
        failed = self._failure is not None
        if not failed:
            parting = self._parting()
            failed = parting[0] != "left"
            self._decide(*parting)
        if not self._store_answers():
            return
        with contextlib.suppress(tf.errors.OpError):
            tp.insert_value(f"{_PREFIX}left/{self._me}", "failed" if failed else "left")
            if not failed:
                self._wait_for_others()
            elif self._me == self._leader:
                time.sleep(PATIENCE)  # the others receive the end meanwhile

    def _wait_for_others(self) -> None:
        started, reported = time.monotonic(), False
        for task in self._addresses:
            while tp.get_value(f"{_PREFIX}left/{task}", seconds=_TICK) is None:
                waited = time.monotonic() - started
                if waited > LEAVE_LIMIT or _status_of(task) == "gone":
                    break
                if self._end is not None and self._end.kind != "left":
                    break  # another one has failed
                if waited > LEAVE_LIMIT / 6 and not reported:
                    reported = True
                    where = _position_of(task).since_when()
                    say(
                        f"{self._me}: done; waiting for {task} to end{where}, for at most"
                        f" {LEAVE_LIMIT:g} s"
                    )


# One for this process, as the store of its cluster is.
_of_process = functools.cache(PeerMonitor)


def _stored(key: str, seconds: float = 0.1) -> dict[str, Any]:
    """A JSON value of the store; empty where there is none, or the store does not answer."""
    with contextlib.suppress(tf.errors.OpError):
        return json.loads(tp.get_value(f"{_PREFIX}{key}", seconds=seconds) or "{}")
    return {}


def _stored_end(seconds: float) -> _End | None:
    found = _stored("end", seconds)
    return _End(**found) if found else None


def _position_of(task: str) -> Position:
    """Where another task is, as far as it has published."""
    found = _stored(f"position/{task}")
    return Position(**found | {"progress": Progress(**found.get("progress", {}))})


def _status_of(task: str) -> str:
    job, index = task.split(":")
    return tp.peer_status(job, int(index))


def summary(error: BaseException) -> str:
    """An exception in one line: of TensorFlow's reports of a graph, the line with the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Graph execution error"):
        causes = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
        lines = [*causes, *lines[1:], *lines]
    return f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _by_call(calls: dict[str, str]) -> dict[str, list[str]]:
    tasks = sorted(calls)
    return {calls[task]: [t for t in tasks if calls[t] == calls[task]] for task in tasks}


def odd_one(calls: dict[str, str]) -> str:
    """The one task whose call differs from that of all others; "" where that is not one alone."""
    groups = sorted(_by_call(calls).values(), key=len)
    return groups[0][0] if len(groups) == 2 and len(groups[0]) == 1 < len(groups[1]) else ""


def different_calls(calls: dict[str, str]) -> str:
    """The message where tasks have made different calls."""
    shown = [f"{', '.join(tasks)} in {call}" for call, tasks in _by_call(calls).items()]
    return (
        f"every worker must make the same calls in the same order, got {'; '.join(shown)}. Call"
        " fit, evaluate, predict, save and the like on every worker, not on one alone: all of them"
        " compute, and of save and export the chief writes the files."
    )
