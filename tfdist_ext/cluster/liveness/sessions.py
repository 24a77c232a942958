"""Who is done: the coordinator's sessions with its parameter servers and workers.

TensorFlow's servers never end by themselves. The coordinator opens a gRPC session with each of them
while they still listen for it, and keeps the session while it trains. At its end it sends its
result. A session that breaks without a result means that the coordinator has crashed. A server that
is started again gets a new session.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping

from tfdist_ext.cluster.liveness.wire import Connection, Message

# The results of a coordinator. STALLED: the servers show their stacks, too.
DONE, FAILED, STALLED = "done", "failed", "stalled"
_AGAIN = 1.0  # seconds between two tries to open a session


class Sessions:
    """The sessions of this process, the coordinator; one daemon thread for each.

    Args:
        servers: task -> "host:port".
        wait: seconds for the sessions to open. Sessions that do not are tried again in the threads.
    """

    def __init__(self, servers: Mapping[str, str], *, wait: float = 5.0) -> None:
        self._ended = threading.Event()
        self._tried = {task: threading.Event() for task in servers}
        self._queues: dict[str, queue.SimpleQueue[Message | None]] = {}
        self._threads: dict[str, threading.Thread] = {}
        for task, address in servers.items():
            self._queues[task] = queue.SimpleQueue()
            self._threads[task] = threading.Thread(
                target=self._keep, args=(Connection(address), task), daemon=True, name=task
            )
            self._threads[task].start()
        deadline = time.monotonic() + wait
        for tried in self._tried.values():
            tried.wait(max(0.0, deadline - time.monotonic()))

    def _keep(self, connection: Connection, task: str) -> None:
        while not self._ended.is_set():
            # A session that has broken leaves its queue to a thread of gRPC that still reads it.
            messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
            self._queues[task] = messages
            connection.session(messages, self._tried[task].set)
            self._tried[task].set()
            messages.put(None)
            self._ended.wait(_AGAIN)

    def end(self, result: str, seconds: float) -> list[str]:
        """Send the result; return the tasks that have not taken it in this time."""
        self._ended.set()
        for messages in self._queues.values():
            messages.put({"result": result, "last": True})
            messages.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [task for task, thread in self._threads.items() if thread.is_alive()]
