"""How a ps or worker task learns that the coordinator has ended, and how it went.

TensorFlow's servers never end by themselves. These watch for two signs:

- The coordinator's message: "here" when it has connected, "done" or "failed" when its process ends,
  "stalled" when it ends because its workers do not come to an end.
  It runs an operation on each server, which makes a file of that name in that server's memory
  ("ram://", TensorFlow's own). It takes the way of the training, so it works where that works.
- The coordinator's address. No answer there any more, and no last message, is a crash. A connection
  that is accepted, and not greeted for a minute, is a process that is frozen.

The coordinator looks at its servers in the same way, and ends the job when one of them is frozen.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.launch.exit_codes import RESTART
from tfdist_ext.strategies.heartbeat import Heartbeat, Watcher, exit_within
from tfdist_ext.strategies.liveness import Presence, driver_of, say
from tfdist_ext.strategies.meeting import meet
from tfdist_ext.strategies.resolvers import Cluster, Described, describe, resolver_of
from tfdist_ext.strategies.start_failures import start_failures_in_words
from tfdist_ext.strategies.waiting import show_stacks

__all__ = [
    "RoleEnded",
    "ended_as_failure",
    "ends_as_failure",
    "serve",
    "serves",
    "tell_servers",
    "watch_servers",
]

# A file for each word: in memory, what is written to a file is added to what it holds.
_HERE, _DONE, _FAILED, _STALLED = (
    f"ram://tfdist_ext/coordinator_{word}" for word in ("here", "done", "failed", "stalled")
)

_LOOK_EVERY = 0.5  # seconds
_LEAVE = 5.0  # seconds for the coordinator to be gone after its last word
# Seconds for a server to take the last word; it may be dead, or frozen. One that does not hear of a
# success in time, as it is busy with the end of a pipeline, ends as after a crash.
_TELL = {_DONE: 15.0, _FAILED: 3.0, _STALLED: 3.0}
# Seconds without an answer after which a task is frozen: a server, and the coordinator, which has
# to name a frozen server before the other servers give it up.
SERVER_SILENT, COORDINATOR_SILENT = 45.0, 60.0
_END = 10.0  # seconds for this process to end by itself when another one is frozen


class RoleEnded(SystemExit):
    """The end of a task that does not drive the training: status 0, or 138 after a crash."""


def serves(described: Described) -> bool:
    """Whether this task is a ps, or a worker beside one: it serves, and a coordinator drives."""
    task = described.task
    return task is not None and task.type in ("ps", "worker") and "ps" in described.jobs


def serve(cluster: Cluster, wait: float | None = None) -> NoReturn:
    """Serve as this task of a cluster with parameter servers until the coordinator has ended.

    It waits for the coordinator's first sign, and says so on stderr. Signals end it at once.

    Args:
        wait: seconds to wait for the coordinator's first sign; None: no limit.

    Raises:
        RoleEnded: always: with 0 when the coordinator said that it ended well, else with 138.
        StrategyError: this task cannot listen at its address, or no sign of the coordinator in
            time.
    """
    described = describe(cluster)
    assert described.task is not None
    resolver = resolver_of(cluster)
    meet(described, wait)
    with start_failures_in_words(described):
        # Not join(): it never returns, and it keeps Python from handling signals.
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=described.task.type,
            task_index=described.task.index,
            protocol=resolver.rpc_layer or "grpc",
        )
    word = _last_word(described, wait)
    del server  # it serves as long as there is a reference
    # Not a failure of this task: whoever starts tasks starts it again where the coordinator is.
    raise RoleEnded(0 if word == _DONE else RESTART)


def ends_as_failure() -> None:
    """This process will end with a status that Python does not show before: sys.exit(1)."""
    _failed.set()


def ended_as_failure() -> bool:
    """Whether that was said."""
    return _failed.is_set()


def watch_servers(described: Described) -> Watcher:
    """End this process, the coordinator, when one of its servers is frozen, and say which."""
    return Watcher(str(described.task or "coordinator"), _servers(described), SERVER_SILENT)


def _servers(described: Described) -> dict[str, str]:
    """The cluster's ps and worker tasks that have an address."""
    return {
        task: address
        for task, address in described.addresses.items()
        if address and task.startswith(("ps:", "worker:"))
    }


def tell_servers(described: Described) -> Callable[[], None]:
    """Make this process, the coordinator, tell its servers that it is here, and how it ends.

    Returns:
        A function that tells them before it ends, so the training stands still.
    """
    # All is made now. At its end Python starts no threads any more, and a tensor that is made
    # while one of the servers is frozen may never be done. A thread for each server, because
    # one that is frozen keeps its thread.
    files = {word: tf.constant(word) for word in _TELL | {_HERE: 0}}
    nothing = tf.constant("")
    last_word: Future[str] = Future()

    def write(word: str, task: str) -> None:
        job, index = task.split(":")
        # Who cannot be told is gone, or will notice that this process is.
        cannot = contextlib.suppress(tf.errors.OpError, ValueError, RuntimeError)
        with cannot, tf.device(f"/job:{job}/replica:0/task:{index}/device:CPU:0"):
            tf.io.write_file(files[word], nothing)

    def tell(task: str) -> None:
        write(_HERE, task)
        write(last_word.result(), task)

    threads = [
        threading.Thread(target=tell, args=(task,), daemon=True, name=task)
        for task in _servers(described)
    ]
    for thread in threads:
        thread.start()

    def say_last(word: str) -> None:
        last_word.set_result(word)
        deadline = time.monotonic() + _TELL[word]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def at_exit() -> None:
        # Python keeps the exception that ended the program, if one did.
        ended_by_exception = getattr(sys, "last_value", None) is not None
        word = _FAILED if ended_by_exception or _failed.is_set() else _DONE
        say_last(word)
        if silent := [thread.name for thread in threads if thread.is_alive()]:
            say(
                f"{described.task or 'coordinator'}: {', '.join(silent)} did not answer within"
                f" {_TELL[word]:.0f} s at the end of this process, and may be left behind: frozen,"
                " or busy."
            )
            exit_within(_END)  # TensorFlow may wait for them without a limit

    atexit.register(at_exit)
    return functools.partial(say_last, _STALLED)


_failed = threading.Event()


def _last_word(described: Described, wait: float | None) -> str:
    """The coordinator's last message, once it has ended or is gone; this serves until then."""
    me, driver = str(described.task), driver_of(described)
    if driver is None:
        say(
            f"{me}: serving at {described.address}. {described.source} names no chief: this server"
            " detects that a coordinator ends by itself, but not that it is killed."
        )
        while (word := _heard()) in (_HERE, ""):
            time.sleep(_LOOK_EVERY)
        return _told(word)
    coordinator = Presence(me, *driver, described.source)
    heartbeat = Heartbeat(dict([driver]), COORDINATOR_SILENT, lambda failure: None)
    say(f"{me}: serving at {described.address}; the coordinator is {coordinator}")
    deadline = float("inf") if wait is None else time.monotonic() + wait
    while (word := _heard()) in (_HERE, "") and not coordinator.gone:
        if heartbeat.failure:
            say(f"{me}: {heartbeat.failure} It coordinates this job, which ends.")
            exit_within(_END)
            return ""
        coordinator.seen |= word == _HERE  # it may be gone again before anybody looks
        time.sleep(_LOOK_EVERY)
        coordinator.look()
        if not coordinator.seen and time.monotonic() >= deadline:
            failure = StrategyError(
                f"the coordinator must be there within {wait:g} s (wait), got no answer from"
                f" {coordinator}. Start it, correct its address on every task, or allow more"
                " seconds."
            )
            failure.missing = str(coordinator)
            raise failure
    if word in (_HERE, ""):
        say(f"{me}: the coordinator, {coordinator}, is gone without a message: it crashed")
        return word
    _told(word)
    # It has a few things left to do; none of them should find its servers gone.
    deadline = time.monotonic() + _LEAVE
    while coordinator.look() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
    say(f"{me}: the coordinator, {coordinator}, {'is done' if word == _DONE else 'has failed'}")
    return word


def _heard() -> str:
    """The coordinator's latest word."""
    return next(
        (word for word in (_STALLED, _FAILED, _DONE, _HERE) if tf.io.gfile.exists(word)), ""
    )


def _told(word: str) -> str:
    """The coordinator's last word; where the training stands still, this task may know why."""
    if word == _STALLED:
        show_stacks()
    return word
