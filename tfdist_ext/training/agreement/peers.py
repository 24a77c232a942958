"""The other workers: what they do, whether they are there, and why they left.

A collective waits for all workers, silently and without a limit. Where one has left, died, or
called something else, TensorFlow says "Collective ops is aborted" after ten seconds, or nothing.
So each place where workers wait for each other is a `meeting` with a number and a name, the same
on all workers. A thread looks after the meeting that this worker is in: it finds out in a few
seconds that it cannot take place, and lets it fail with a sentence that names the task. A slow
worker is no error; those who wait for it say so on stderr.

Workers tell each other in the key-value store of TensorFlow's coordination service, which the
first task (the leader) keeps:

    place/TASK   in which meeting a task is; written by its thread, not in the way of the training
    progress/TASK  what a task knows of an execution that takes long: batches read, Python in it
    end          why the workers cannot meet any more; the first one to know writes it
    noted/TASK   this task has read `end`
    left/TASK    this task's script has ended: "left", or "failed"
    call/N/TASK  which call this task has made as meeting N; where calls differ
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
from dataclasses import asdict, dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import PeerError, TrainingError
from tfdist_ext.strategies.liveness import say
from tfdist_ext.strategies.serving import ended_as_failure
from tfdist_ext.strategies.waiting import FIRST_AFTER, LONGEST_PAUSE, show_stacks
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

__all__ = ["Alone", "Peers", "Place", "clock", "different_calls", "odd_one", "peers_of", "summary"]


PATIENCE = 2.0  # seconds of waiting before anybody looks where the others are


LEAVE_LIMIT = 30.0  # seconds for the others to end, too


_TICK = 0.25


_PUBLISHES = 1.0  # seconds after which a task tells where it is now


_TELLS_PROGRESS = 10.0  # seconds in one execution, at most, after which a task tells of it


_DEAF = 15.0  # seconds beyond its limit after which a task is taken for one that sees nothing


_LOOKS = 3  # in a row that must find the same: one may be lost, and values change meanwhile


_SILENT_LOOKS = 15  # of one or two seconds; a machine that swaps may be silent for a while


_ROOM = "tfdist_ext/"


def peers_of(strategy: tf.distribute.Strategy) -> TaskStatus:
    """The tasks that a strategy's workers wait for; a null object where this process is alone."""
    resolver = strategy.cluster_resolver
    if resolver is None or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return Alone(watched_process())
    jobs = resolver.cluster_spec().as_dict()
    tasks = tuple(
        (f"{job}:{index}", address)
        for job in ("chief", "worker")
        for index, address in enumerate(jobs.get(job, ()))
    )
    me = f"{resolver.task_type}:{resolver.task_id}"
    if len(tasks) < 2 or me not in dict(tasks) or not tp.has_coordination_service():
        return Alone(watched_process())
    return _of_process(me, tasks)


class Alone(TaskStatus):
    """The one task of a training.

    Args:
        phases: noted for who watches that they end; None: nobody does.
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


class Peers(TaskStatus):
    """The other workers of the cluster, from the first model that is distributed until the exit.

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
        self._here = Place(since=time.time())
        self._completed = 0  # the number of the last meeting that took place
        self._reached = ""  # what was done last, for messages
        self._end: dict[str, Any] | None = None  # why the workers cannot meet any more
        self._failure: PeerError | None = None
        self._aborted = False
        self._looking = threading.Lock()
        self._looks = 0
        # Looks in a row that found it; the last one.
        self._alarms: dict[Hashable, tuple[int, int]] = {}
        self._published: Place | None = None
        self._termination = Termination()
        self._phases: Phases | None = Phases.of_environment()
        self._batches_read: Callable[[], int] = lambda: 0
        self._told_progress = Progress()
        self._shown = False  # the stacks of this process
        self._unchanged: dict[str, tuple[Place, float]] = {}  # others: their place, seconds in it
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
        outer = self._here
        self._here = self._between(outer)
        try:
            with self._termination.handled(), super().call(name):
                yield
        finally:
            self._calls.pop()
            self._here = replace(self._between(outer), number=self._here.number)

    @contextlib.contextmanager
    def meeting(self, detail: str = "") -> Iterator[None]:
        """Scope of something in which all workers wait for each other.

        Raises:
            PeerError: it cannot take place, because of another worker.
        """
        self._termination.check()
        outer = self._here
        detail = detail or (outer.detail if outer.inside else "")
        here = Place(outer.number + 1, " > ".join(self._calls), detail, True, time.time())
        if end := self._end_before(here):
            raise self._failed(end, here)
        self._here = here
        self._termination.deferred = True
        try:
            yield
            self._completed = self._here.number
        except tf.errors.OpError as error:
            self._termination.check(failed=True)
            if failure := self._cause_of(error):
                raise failure from None
            raise
        finally:
            # An outer meeting continues under a new number: what it waits for comes after.
            number = self._here.number
            if outer.inside:
                self._here = replace(outer, number=number + 1)
            else:
                self._here = replace(self._between(here), number=number)
            self._termination.deferred = outer.inside
        if not outer.inside:
            self._termination.check()

    def reached(self, place: str) -> None:
        """Note what this worker has done, as "step 120", for what it says when it leaves."""
        self._reached = place

    def reads_batches(self, count: Callable[[], int]) -> None:
        self._batches_read = count

    def ends_at_a_step(self) -> contextlib.AbstractContextManager[None]:
        return self._termination.noted()

    def different_calls(self, name: str) -> TrainingError:
        """The error where workers have made different calls; all of them are in this meeting."""
        number = self._here.number
        tp.insert_value(f"{_ROOM}call/{number}/{self._me}", name)
        calls = {self._me: name}
        for task in self._addresses:
            calls[task] = tp.get_value(f"{_ROOM}call/{number}/{task}", seconds=5.0) or "?"
        return TrainingError(different_calls(calls))

    # What ends a meeting.

    def _between(self, place: Place) -> Place:
        return replace(
            place, call=" > ".join(self._calls), detail="", inside=False, since=time.time()
        )

    def _end_before(self, here: Place) -> dict[str, Any] | None:
        """Why this meeting cannot take place, where that is known."""
        end = self._end
        return end if end is not None and here.number > end["completed"] else None

    def _failed(self, end: dict[str, Any], here: Place) -> PeerError:
        """The error for this worker, the same one each time."""
        if self._failure is None:
            task, text = end["task"], end["text"]
            if end["kind"] == "left" and (others := self._all_have_left()):
                # Not they are odd, but this one.
                task = self._me
                text = f"{self._me} continues alone: the scripts of {others} have ended"
            if end["kind"] != "differs":
                text += f"; {self._me} is in {here}, which needs every worker."
            if end["kind"] == "left":
                text += (
                    " Every worker must make the same calls, fit, evaluate, predict and save"
                    " among them; of save and export the chief writes the files."
                )
            self._failure = PeerError(text)
            self._failure.task = task
            self._failure.permanent = end["kind"] in ("left", "differs")
        return self._failure

    def _all_have_left(self) -> str:
        """The others, where they are several and all have left; else ""."""
        tasks = list(self._addresses)
        with contextlib.suppress(tf.errors.OpError):
            values = (tp.get_value(f"{_ROOM}left/{task}", seconds=0.5) for task in tasks)
            if len(tasks) > 1 and all(value == "left" for value in values):
                return " and ".join(tasks)
        return ""

    def _cause_of(self, error: tf.errors.OpError) -> PeerError | None:
        """The failure of another worker that made a collective fail here; None: it is ours."""
        here = self._here
        ours = not isinstance(
            error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.CancelledError
        )
        if ours and "ollective" not in str(error) and self._end is None:
            return None
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline:
            self._look(here, silent=_LOOKS)  # TensorFlow has waited for its heartbeats already
            if end := self._end_before(here):
                return self._failed(end, here)
            time.sleep(_PUBLISHES / 2)  # the last of the looks finds places that are up to date
        return None

    def _store_answers(self) -> bool:
        """Whether the leader does; what is written to a store that does not waits without limit."""
        return self._me == self._leader or _status_of(self._leader) == "there"

    def _decide(self, kind: str, task: str, text: str, completed: int) -> None:
        """Write why the workers cannot meet any more, unless another one was quicker."""
        end = {"kind": kind, "task": task, "text": text, "completed": completed}
        with contextlib.suppress(tf.errors.OpError):
            if self._store_answers() and not tp.insert_value(f"{_ROOM}end", json.dumps(end)):
                end = _stored("end", seconds=1.0) or end
        self._end = self._end or end

    # The threads.

    def _listen(self) -> None:
        """Hear at once of an end that another worker has noticed or caused."""
        while self._end is None:
            found = _stored("end", seconds=60.0)
            self._end = self._end or found
            if found is None:
                time.sleep(1.0)  # the leader is gone, or busy
        with contextlib.suppress(tf.errors.OpError):
            if self._store_answers():
                tp.insert_value(f"{_ROOM}noted/{self._me}", "")

    def _watch(self) -> None:
        """Look at the meeting that this worker is in, every now and then."""
        number, ticks, next_look, next_say, last_publish = 0, 0, 0.0, FIRST_AFTER, 0.0
        while True:
            self._termination.wait(_TICK)
            self._end_if_terminated()
            if self._end is None and self._phases is not None and self._phases.tick(_TICK):
                self._look_who_stalls(self._phases)
            if self._end is not None:
                self._end_if_stalled(self._end)
            here = self._here
            if time.monotonic() - last_publish >= _PUBLISHES:
                self._publish()
                last_publish = time.monotonic()
                self._tell_progress()
            if not here.inside:
                continue
            if here.number != number:
                number, ticks, next_look, next_say = here.number, 0, PATIENCE, FIRST_AFTER
                self._alarms.clear()
            ticks += 1
            # Ticks, and not the clock: a process that was stopped has not waited.
            waited = ticks * _TICK
            if end := self._end_before(here):
                self._end_if_stalled(end)
                self._abort(end["text"])
            elif waited >= next_look:
                next_look = waited + 1.0
                self._look(here)
                if waited >= next_say and self._end is None:
                    next_say = waited + min(waited, LONGEST_PAUSE)
                    self._say_whom_it_waits_for(here, waited)

    def _abort(self, text: str) -> None:
        if not self._aborted:
            self._aborted = True
            tp.abort_collectives(text)

    def _publish(self) -> None:
        thread = self._thread  # the end of the main one is that of the script: see `_leave`
        abandoned = thread is not threading.main_thread() and not thread.is_alive()
        here = replace(self._here, abandoned=abandoned)
        if self._phases is not None:
            here = replace(here, phase=self._phases.name, limit=self._phases.limit)
        if here == self._published or not self._store_answers():
            return
        with contextlib.suppress(tf.errors.OpError):
            tp.replace_value(f"{_ROOM}place/{self._me}", json.dumps(asdict(here)))
            self._published = here

    # A training that stands still.

    def _tell_progress(self) -> None:
        """In an execution that takes long: what the others cannot know of this task."""
        phases = self._phases
        if phases is None or phases.waited < min(_TELLS_PROGRESS, phases.limit / 2):
            return
        progress = Progress(self._here.number, int(self._batches_read()), python_in_step())
        if progress != self._told_progress and self._store_answers():
            with contextlib.suppress(tf.errors.OpError):
                tp.replace_value(f"{_ROOM}progress/{self._me}", json.dumps(asdict(progress)))
                self._told_progress = progress

    def _look_who_stalls(self, phases: Phases) -> None:
        """This task is in its phase for too long; or in a meeting, which others keep."""
        here = self._here
        if not here.inside:
            self._decide("stalled", self._me, f"{self._me} has stalled: {phases}", here.number)
            return
        late = {}
        for task in self._addresses:
            place = _place_of(task)
            if not (place.inside and place.number == here.number):
                late[task] = place
        if late:  # each of them looks after itself, unless it cannot
            self._look_for_deaf(late, here)
            return
        known = {task: _progress_of(task) for task in self._addresses}
        known[self._me] = self._told_progress
        if any(progress.number != here.number for progress in known.values()):
            return  # has not told yet
        task, text = who_stalls(known)
        for_how_long = f"no step is done for {phases.waited:.0f} s (see --stall-timeout)"
        self._decide("stalled", task, f"{text}: {for_how_long}", here.number - 1)

    def _look_for_deaf(self, late: dict[str, Place], here: Place) -> None:
        """One whose threads do not run, as one holds Python's lock, tells nothing of itself."""
        for task, place in late.items():
            before, seconds = self._unchanged.get(task, (place, 0.0))
            seconds = seconds + _TICK if before == place else 0.0
            self._unchanged[task] = place, seconds
            if place.limit and seconds >= place.limit + _DEAF:
                text = f"{task} has stalled: {seconds:.0f} s{place.since_when()}"
                self._decide("stalled", task, text, here.number - 1)
                return

    def _end_if_stalled(self, end: dict[str, Any]) -> None:
        if end["kind"] != "stalled" or self._shown:
            return
        self._shown = True
        show_stacks()
        if end["task"] in ("", self._me):
            time.sleep(PATIENCE)  # the others hear of it meanwhile, also where this is the leader
            end_to_be_restarted(end["text"])

    def _look(self, here: Place, silent: int = _SILENT_LOOKS) -> None:
        """Find out whether this meeting can take place; sets `_end` where it cannot.

        Args:
            silent: looks in a row after which a task that does not answer is taken for gone.
        """
        with self._looking:
            self._looks += 1
            self._publish()
            stored = _stored("end")
            self._end = self._end or stored
            if self._end is None:
                self._look_for_dead(here, silent)
            if self._end is None:
                self._look_for_other_calls(here)
            if self._end is None:
                self._look_for_abandoned(here)

    def _look_for_dead(self, here: Place, silent: int) -> None:
        # The leader is the first: where it is gone, others may have ended because of that.
        for task, at in self._addresses.items():
            status = _status_of(task)
            looks = silent if status == "silent" else _LOOKS
            if status != "there" and self._alarm((task, status), here, looks):
                what = {
                    "gone": f"{task} is gone: nothing listens at its address {at}"
                    " (it ended, crashed or was killed, or its machine is down: see its log)",
                    "restarted": f"{task} is another process than before (it was restarted, and"
                    " the others were not)",
                    "silent": f"{task} does not answer: it is stopped (SIGSTOP), or its machine is"
                    " down or cannot be reached",
                }[status]
                self._decide("gone", task, what, here.number - 1)
                return

    def _look_for_other_calls(self, here: Place) -> None:
        places = {task: _place_of(task) for task in self._addresses}
        meeting = {task: place for task, place in places.items() if place.inside}
        for task, place in meeting.items():
            mine = (here.call, here.detail)
            differs = place.number == here.number and (place.call, place.detail) != mine
            # It has completed the meeting in which this worker still waits, without this one.
            differs |= place.number > here.number
            if differs and self._alarm((task, place), here):
                calls = {t: str(p) for t, p in {self._me: here, **meeting}.items()}
                # One that is on its way to this meeting is named too, and is not the odd one.
                shown = {t: str(p) for t, p in places.items()} | calls
                self._decide("differs", odd_one(calls), different_calls(shown), here.number - 1)
                return

    def _look_for_abandoned(self, here: Place) -> None:
        """A script that has ended in a process that lives on, as in a worker of Ray.

        Another thread may take over there, so that the others wait as long as they do at the exit.
        """
        for task in self._addresses:
            place = _place_of(task)
            since = max(here.since, place.since)
            if place.abandoned and place.number < here.number and time.time() - since > LEAVE_LIMIT:
                text = (
                    f"{task} left at {clock(place.since)}: the thread that trained there has ended"
                )
                self._decide("left", task, text, here.number - 1)
                return

    def _alarm(self, what: Hashable, here: Place, looks: int = _LOOKS) -> bool:
        """Whether this was found in several looks in a row, in a meeting that has not ended."""
        found, look = self._alarms.get(what, (0, 0))
        found = found + 1 if look == self._looks - 1 else 1
        self._alarms[what] = found, self._looks
        return found >= looks and self._here == here

    def _say_whom_it_waits_for(self, here: Place, waited: float) -> None:
        late = []
        for task in self._addresses:
            place = _place_of(task)
            if not (place.inside and place.number == here.number):
                silent = _status_of(task) != "there"
                why = ", which does not answer: is it stopped?" if silent else place.since_when()
                late.append(f"{task}{why}")
        if late:
            more = f" and {len(late) - 5} others" if len(late) > 5 else ""
            say(f"{self._me}: waiting in {here} for {waited:.0f} s for {'; '.join(late[:5])}{more}")

    def _end_if_terminated(self) -> None:
        """Where SIGTERM has come and the main thread cannot be told, as it waits in TensorFlow."""
        received = self._termination.received
        if received is None:
            return
        waited = time.monotonic() - received
        if self._termination.only_noted:  # the others may need as long to come to the step
            waited -= max(0.0, self._termination.grace - 3 * PATIENCE)
        if waited >= PATIENCE and self._here.inside and not self._aborted:
            self._decide(*self._parting())
            self._abort(f"{self._me} got SIGTERM")
        if waited >= 2 * PATIENCE and self._here.inside:  # it compiles, perhaps
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(STATUS)

    # The end of this process.

    def _parting(self) -> tuple[str, str, str, int]:
        """kind, task, text and completed meetings of this task's own end."""
        kind, at = "failed", f"at {clock(time.time())}"
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
            tp.insert_value(f"{_ROOM}left/{self._me}", "failed" if failed else "left")
            if not failed:
                self._wait_for("left", LEAVE_LIMIT)
            elif self._me == self._leader:
                self._wait_for("noted", PATIENCE)

    def _wait_for(self, key: str, limit: float) -> None:
        started, said = time.monotonic(), False
        for task in self._addresses:
            while tp.get_value(f"{_ROOM}{key}/{task}", seconds=_TICK) is None:
                waited = time.monotonic() - started
                if waited > limit or _status_of(task) == "gone":
                    break
                if key == "left" and self._end is not None and self._end["kind"] != "left":
                    break  # another one has failed
                if key == "left" and waited > limit / 6 and not said:
                    said = True
                    where = _place_of(task).since_when()
                    say(
                        f"{self._me}: done; waiting for {task} to end{where}, for at most"
                        f" {limit:g} s"
                    )


# One for this process, as the store of its cluster is.
_of_process = functools.cache(Peers)


def _stored(key: str, seconds: float = 0.1) -> Any:
    """A JSON value of the store; None where there is none, or the store does not answer."""
    with contextlib.suppress(tf.errors.OpError):
        if text := tp.get_value(f"{_ROOM}{key}", seconds=seconds):
            return json.loads(text)
    return None


def _place_of(task: str) -> Place:
    """Where another task is, as far as it has told."""
    return Place(**(_stored(f"place/{task}") or {}))


def _status_of(task: str) -> str:
    job, index = task.split(":")
    return tp.peer_status(job, int(index))


@dataclass(frozen=True)
class Place:
    """Where a task is.

    Attributes:
        number: of the meeting it is in, or was in last.
        call: the public calls that it is in, the outermost first: "fit", "fit > evaluate".
        detail: what the meeting is for.
        inside: it is in the meeting, and not between two.
        since: seconds since 1970; 0 where that is not known.
        phase: of the training, between two meetings.
        limit: seconds that the phase may take; 0 where nobody watches.
        abandoned: the thread that made the task's calls has ended, and the process has not.
    """

    number: int = 0
    call: str = ""
    detail: str = ""
    inside: bool = False
    since: float = 0.0
    phase: str = ""
    limit: float = 0.0
    abandoned: bool = False

    def __str__(self) -> str:
        call = " inside ".join(reversed(self.call.split(" > "))) if self.call else ""
        place = f"{call} ({self.detail})" if call and self.detail else call
        if self.inside or not place:
            return place or "its own code"
        own = {"callbacks": "its callbacks", "checkpoint": "a checkpoint"}
        return f"{own.get(self.phase, 'its own code')}, inside {place}"

    def since_when(self) -> str:
        """For what is said of the task; "" where it has not told."""
        return f", since {clock(self.since)} in {self}" if self.since else ""


def _progress_of(task: str) -> Progress:
    return Progress(**(_stored(f"progress/{task}") or {}))


def summary(error: BaseException) -> str:
    """An exception in one line: of TensorFlow's reports of a graph, the line with the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Graph execution error"):
        causes = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
        lines = [*causes, *lines[1:], *lines]
    return f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _by_call(calls: dict[str, str]) -> dict[str, list[str]]:
    tasks = sorted(calls)
    return {calls[task]: [t for t in tasks if calls[t] == calls[task]] for task in tasks}


def odd_one(calls: dict[str, str]) -> str:
    """The one task whose call differs from that of all others; "" where that is not one alone."""
    groups = sorted(_by_call(calls).values(), key=len)
    return groups[0][0] if len(groups) == 2 and len(groups[0]) == 1 < len(groups[1]) else ""


def different_calls(calls: dict[str, str]) -> str:
    shown = [f"{', '.join(tasks)} in {call}" for call, tasks in _by_call(calls).items()]
    return (
        f"every worker must make the same calls in the same order, got {'; '.join(shown)}. Call"
        " fit, evaluate, predict, save and the like on every worker, not on one alone: all of them"
        " compute, and of save and export the chief writes the files."
    )
