"""Who is done: the coordinator's sessions with its parameter servers and workers.

TensorFlow's servers never end by themselves. The coordinator opens a gRPC session with each of them
while they still listen for it, and keeps the session while it trains. At its end it sends its
result. A session that breaks without a result means that the coordinator has crashed. A server that
is started again gets a new session.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
from collections.abc import Mapping

from tfdist_ext.cluster.liveness.reports import say
from tfdist_ext.cluster.liveness.watching import Watcher, exit_within
from tfdist_ext.cluster.liveness.wire import Connection, Message

# The results of a coordinator. STALLED: the servers show their stacks, too.
DONE, FAILED, STALLED = "done", "failed", "stalled"
SERVER_SILENT = 45.0  # seconds without an answer after which a server is frozen
_OPEN = 5.0  # seconds for the sessions to open; later ones are tried again in the threads
_AGAIN = 1.0  # seconds between two tries to open a session
# Seconds for a server to take the result: it may be dead or frozen. A server that does not take a
# success in time, because it is busy with the end of a pipeline, ends as after a crash.
_TAKE = {DONE: 15.0, FAILED: 3.0, STALLED: 3.0}
_END = 10.0  # seconds for this process to end by itself if a server did not take the result


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
        while not self._ended.is_set():
            # A session that has broken leaves its queue to a thread of gRPC that still reads it.
            messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
            self._queues[task] = messages
            connection.session(messages, self._tried[task].set)
            self._tried[task].set()
            messages.put(None)
            self._ended.wait(_AGAIN)

    def end(self, result: str) -> list[str]:
        """Sends the result; returns the tasks that have not taken it in time."""
        self._ended.set()
        for messages in self._queues.values():
            messages.put({"result": result, "last": True})
            messages.put(None)
        deadline = time.monotonic() + _TAKE[result]
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [task for task, thread in self._threads.items() if thread.is_alive()]

    def send_result_at_exit(self) -> None:
        """Makes this process send its result at the exit, before TensorFlow ends."""
        atexit.register(self._send_result)

    def _send_result(self) -> None:
        # Python keeps the exception that ended the program, if one did.
        result = FAILED if getattr(sys, "last_value", None) is not None else DONE
        if silent := self.end(result):
            say(
                f"{self._me}: {', '.join(silent)} did not answer within {_TAKE[result]:.0f} s at"
                " the end of this process, and may be left behind: frozen, or busy."
            )
            exit_within(_END)  # TensorFlow may wait for them without a limit
