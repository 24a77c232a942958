"""Which tasks have died, are frozen (stopped, swapped out, machine paused), or are done.

TensorFlow waits for the answers of a frozen task without a limit. But a gRPC server answers from
its own threads, however busy its process is. So a started task that stops answering is frozen. A
task is gone if its port refuses connections.

A separate process watches the servers for the coordinator. TensorFlow holds Python's lock while it
waits for a frozen worker, so no Python thread of the coordinator runs (measured in `fit` with a
stopped worker).

TensorFlow's servers never end by themselves. The coordinator opens a gRPC session with each of them
while they still listen for it, and keeps the session while it trains. At its end it sends its
result. A session that breaks without a result means that the coordinator has crashed. A server that
is started again gets a new session.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping

from tfdist_ext import failures
from tfdist_ext.cluster.jobs import ClusterDescription, addresses_of
from tfdist_ext.cluster.liveness import WaitReports, log_line, show_stacks
from tfdist_ext.cluster.liveness.wire import READY, SILENT, STARTED, Connection, Endpoint, Message

# The states of a task.
EXPECTED, ALIVE, GONE, FROZEN = "expected", "alive", "gone", "frozen"

# The results of a coordinator. STALLED: the servers show their stacks, too.
DONE, FAILED, STALLED = "done", "failed", "stalled"
# Seconds without an answer after which a server, or the coordinator, is frozen. The coordinator has
# less time, to name a frozen server first.
SERVER_SILENT, COORDINATOR_SILENT = 45.0, 55.0

_ANSWER = 5.0  # seconds for an answer
_ANSWERS = 5  # consecutive missed answers before a task counts as frozen
_REFUSED = 4  # consecutive refused connections before a task counts as gone
_TO_END = 10.0  # seconds between SIGTERM and SIGKILL
_OPEN = 5.0  # seconds for the sessions to open; later ones are tried again in the threads
_AGAIN = 1.0  # seconds between two tries to open a session
# Time limit, in seconds, for delivering the result to a server. A server that does not take a
# success in time, because it is busy with the end of a pipeline, ends as after a crash.
_TAKE = {DONE: 15.0, FAILED: 3.0, STALLED: 3.0}
_END = 10.0  # seconds for this process to end by itself before a timer ends it
_LOOK_EVERY = 0.5  # seconds between two looks of a server for its coordinator
_START = 120.0  # seconds for the coordinator, which was in the preflight, to start its server
_LEAVE = 5.0  # seconds for the coordinator to be gone after its result
_NOWHERE = os.open(os.devnull, os.O_WRONLY)  # as long as the process


class TaskWatch:
    """The state of one task, by its address.

    Missed answers are counted, not seconds: this process may have been frozen itself.

    Args:
        frozen_after: seconds without an answer.

    Attributes:
        task: the name of the task.
        state: EXPECTED until the first answer, ALIVE, GONE or FROZEN.
        silent: seconds without an answer.
    """

    def __init__(self, task: str, address: str, frozen_after: float) -> None:
        self.state = EXPECTED
        self.silent = 0.0
        self.task = task
        self._name = f"{task} ({address})"
        self._frozen_after = frozen_after
        self._answer = min(_ANSWER, frozen_after / _ANSWERS)
        self._connection = Connection(address)
        self._refused = 0
        self._reports = WaitReports()

    def __str__(self) -> str:
        return self._name

    def look(self) -> bool:
        """Whether the task answers now; sets `state`."""
        state, _ = self._connection.ask({}, self._answer)
        answers = state in (READY, STARTED)
        if answers:
            self.state, self.silent, self._refused = ALIVE, 0.0, 0
        elif self.state != EXPECTED:
            is_silent = state == SILENT
            self.silent = self.silent + self._answer if is_silent else 0.0
            self._refused = 0 if is_silent else self._refused + 1
            if self.silent >= self._frozen_after:
                self.state = FROZEN
            elif self._refused >= _REFUSED:
                self.state = GONE
        return answers

    def report_wait(self, me: str, source: str) -> None:
        """Report on stderr, now and then, that the task has not come yet."""
        if self.state == EXPECTED:
            self._reports.report(me, self._name, source)

    @property
    def failure(self) -> str:
        """A sentence about a task that is gone or frozen; "" in another state."""
        if self.state == GONE:
            return (
                f"{self._name} is gone: nothing listens there (it ended, crashed or was killed, or"
                " its machine is down: see its log)"
            )
        if self.state == FROZEN:
            return (
                f"{self._name} has not answered for {self.silent:.0f} s: its process is stopped,"
                " or its machine is paused, overloaded or cannot be reached"
            )
        return ""


class Watcher:
    """A process that ends this process, with a message, when one of the tasks is frozen.

    It sends SIGTERM, and then SIGKILL. It ends with this object or with this process.

    Args:
        me: this task, for the message.
        tasks: task -> "host:port". They were in the preflight, and may still start to listen.
        frozen_after: seconds without an answer; about twice as many until the first answer.
    """

    def __init__(self, me: str, tasks: Mapping[str, str], frozen_after: float):
        path = [str(entry) for entry in sys.path]  # the text of a Path is no expression
        program = (
            f"import sys; sys.path[:] = {path!r}; from {__name__} import run_watcher;"
            f" run_watcher({me!r}, {os.getpid()}, {dict(tasks)!r}, {frozen_after},"
            f" {failures.error_file()!r})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        # Not at the end of this process, which may hang there.
        weakref.finalize(self, _stop, process).atexit = False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # which closes its pipe, too


def run_watcher(
    me: str, parent: int, tasks: Mapping[str, str], frozen_after: float, error_file: str = ""
) -> None:
    """The program of the process of a `Watcher`, with a thread for each task.

    It writes why it ends the other process to `error_file`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training

    def watch(task: TaskWatch) -> None:
        task.state, has_answered, looks = ALIVE, False, 0
        while task.state != FROZEN and (has_answered or looks < 2 * frozen_after):
            answers = task.look()
            has_answered, looks = has_answered or answers, looks + 1
            # After a missed answer the next question follows at once: this one has waited already.
            time.sleep(0.0 if task.silent else frozen_after / 10 if answers else 1.0)
        log_line(f"{me}: {task.failure}. The job ends.")
        if error_file:
            failures.Failure("PeerError", task.failure, task.task).write(error_file)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if os.getppid() == parent:
                os.kill(parent, number)
            time.sleep(_TO_END)

    for task, address in tasks.items():
        watched = TaskWatch(task, address, frozen_after)
        threading.Thread(target=watch, args=(watched,), daemon=True).start()
    sys.stdin.read()  # to its end, which is that of the other process
    os._exit(0)  # its threads may wait for an answer


def exit_within(seconds: float) -> None:
    """End this process with status 1, unless it has ended by itself by then.

    Neither TensorFlow nor the end of the interpreter can hold up this timer.
    """
    # The one timer of Python's that needs neither its lock nor a thread of its own.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_NOWHERE)


class Servers:
    """The servers of this process, the coordinator: it watches them, and sends them its result.

    A process ends this one, and says why, when a server is frozen. One daemon thread keeps the
    session of each server.

    Args:
        me: this task, for messages.
        addresses: task -> "host:port".
    """

    def __init__(self, me: str, addresses: Mapping[str, str]) -> None:
        self._me = me
        self._ended = threading.Event()
        self._result: Message | None = None  # set at the end
        self._tried = {task: threading.Event() for task in addresses}
        self._queues: dict[str, queue.SimpleQueue[Message | None]] = {}
        self._threads: dict[str, threading.Thread] = {}
        for task, address in addresses.items():
            self._queues[task] = queue.SimpleQueue()
            self._threads[task] = threading.Thread(
                target=self._keep, args=(Connection(address), task), daemon=True, name=task
            )
            self._threads[task].start()
        deadline = time.monotonic() + _OPEN
        for tried in self._tried.values():
            tried.wait(max(0.0, deadline - time.monotonic()))
        self._watcher = Watcher(me, addresses, SERVER_SILENT)

    def _keep(self, connection: Connection, task: str) -> None:
        while True:
            # A session that has broken leaves its queue to a thread of gRPC that still reads it.
            messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
            self._queues[task] = messages
            if self._result is not None:  # the process ended between two sessions
                messages.put(self._result)
                messages.put(None)
            connection.session(messages, self._tried[task].set)
            self._tried[task].set()
            messages.put(None)
            if self._ended.is_set():
                return
            self._ended.wait(_AGAIN)

    def end(self, result: str) -> list[str]:
        """Sends the result; returns the tasks that have not taken it in time."""
        self._result = {"result": result, "last": True}
        self._ended.set()
        for messages in list(self._queues.values()):
            messages.put(self._result)
            messages.put(None)
        deadline = time.monotonic() + _TAKE[result]
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [task for task, thread in self._threads.items() if thread.is_alive()]

    def send_result_at_exit(self) -> None:
        """Makes this process send its result at the exit, before TensorFlow ends."""
        failures.watch()
        atexit.register(self._send_result)

    def _send_result(self) -> None:
        result = FAILED if failures.has_failed() else DONE
        if silent := self.end(result):
            log_line(
                f"{self._me}: {', '.join(silent)} did not answer within {_TAKE[result]:.0f} s at"
                " the end of this process, and may still be running (frozen or busy)."
            )
            exit_within(_END)  # TensorFlow may wait for them without a limit


def result_of_coordinator(cluster: ClusterDescription, endpoint: Endpoint) -> str:
    """Waits in a server for the end of its coordinator.

    Args:
        cluster: in which this task serves.
        endpoint: of this task, with the coordinator's session.

    Returns:
        DONE, FAILED or STALLED; "" if the coordinator has crashed or is frozen.
    """
    me, driver = str(cluster.task), cluster.driver
    address = addresses_of(cluster.jobs)[me]
    if driver is None:
        log_line(
            f"{me}: serving at {address}. {cluster.source} names no chief, so this server does not"
            " notice when the coordinator ends. End this server yourself."
        )
        while True:
            time.sleep(_LOOK_EVERY)
    coordinator = TaskWatch(*driver, COORDINATOR_SILENT)
    log_line(f"{me}: serving at {address}; the coordinator is {coordinator}")
    deadline = time.monotonic() + _START
    while not coordinator.failure:
        if coordinator.state == EXPECTED and time.monotonic() >= deadline:
            break
        result = str(endpoint.next_message(_LOOK_EVERY).get("result", ""))
        if result == STALLED:
            show_stacks()  # this task may know why
        if result:
            deadline = time.monotonic() + _LEAVE  # the coordinator may still use its servers
            while coordinator.look() and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY)
            how = "is done" if result == DONE else "has failed"
            log_line(f"{me}: the coordinator, {coordinator}, {how}")
            return result
        if endpoint.had_session and coordinator.state == EXPECTED:
            coordinator.state = ALIVE
        coordinator.look()
    if coordinator.state == FROZEN:
        log_line(f"{me}: {coordinator.failure}. It is the coordinator, so the job ends.")
        exit_within(_END)
    else:
        log_line(f"{me}: the coordinator, {coordinator}, is gone without a message: it crashed")
    return ""
