"""The gRPC calls between tasks, with JSON messages.

Before TensorFlow's server starts, an `Endpoint` answers at the address of a task. Afterwards
TensorFlow's server answers there that it does not know our method: the task has started, and lives.
A frozen process answers nothing, and where no process listens, the connection is refused.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist_ext.cluster.jobs import identity

Message = dict[str, Any]

# What is at an address.
READY = "ready"  # an Endpoint has answered
STARTED = "started"  # TensorFlow's server
ABSENT = "waiting"  # nothing listens
UNRESOLVED = "resolving"  # the name of the host is not known
SILENT = "silent"  # something accepts connections, or drops them, and does not answer
OTHER = "another program"

WHY = {
    UNRESOLVED: ", whose host is unknown",
    OTHER: ", where another program answers",
    SILENT: ", which does not answer: is its process frozen?",
}

_SERVICE = "tfdist_ext.Liveness"
# The question with which TensorFlow's coordinator connects to a server.
_TENSORFLOW, _GET_STATUS = "tensorflow.WorkerService", "GetStatus"
_CHANNEL = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Connection:
    """A connection to the address of another task, for one thread.

    It opens on first use, and again after each failure, because a failed gRPC channel reports its
    old error while it reconnects.
    """

    def __init__(self, address: str) -> None:
        host, port = identity(address)
        self._target = f"{host}:{port}"
        self._channel: Any = None
        self._is_tensorflow = False

    def _opened(self) -> Any:
        import grpc

        if self._channel is None:
            self._channel = grpc.insecure_channel(self._target, options=_CHANNEL)
        return self._channel

    def ask(self, message: Mapping[str, Any], seconds: float) -> tuple[str, Message]:
        """What is at the address, and the answer; without one the answer is empty."""
        import grpc

        call = self._opened().unary_unary(f"/{_SERVICE}/Ask")
        try:
            return READY, json.loads(call(json.dumps(message).encode(), timeout=seconds))
        except grpc.RpcError as error:
            state = _state_of(error)
        if state == STARTED and not self._is_tensorflow:
            state = self._state_of_server(seconds)
        if state != STARTED:
            self.close()
        return state, {}

    def _state_of_server(self, seconds: float) -> str:
        """STARTED, or OTHER: any gRPC server answers that it does not know our method."""
        import grpc

        call = self._opened().unary_unary(f"/{_TENSORFLOW}/{_GET_STATUS}")
        try:
            call(b"", timeout=seconds)
        except grpc.RpcError as error:
            # TensorFlow answers late if all of its threads wait.
            return OTHER if error.code() == grpc.StatusCode.UNIMPLEMENTED else STARTED
        self._is_tensorflow = True
        return STARTED

    def session(
        self, messages: queue.SimpleQueue[Message | None], opened: Callable[[], object]
    ) -> None:
        """Send messages, up to a None, and return when the other side has ended the session.

        Args:
            opened: called when the other side has accepted the session.
        """
        import grpc

        call = self._opened().stream_stream(f"/{_SERVICE}/Session")
        with contextlib.suppress(grpc.RpcError):
            encoded = (json.dumps(message).encode() for message in iter(messages.get, None))
            for _ in call(encoded):
                opened()
        self.close()

    def close(self) -> None:
        """Close the connection; it may be used again."""
        if self._channel is not None:
            self._channel.close()
            self._channel, self._is_tensorflow = None, False


def _state_of(error: Any) -> str:
    import grpc

    code, details = error.code(), str(error.details())
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return STARTED
    if code == grpc.StatusCode.DEADLINE_EXCEEDED or "timed out" in details:
        return SILENT
    if "resolv" in details or "DNS" in details:
        return UNRESOLVED
    return OTHER if "HTTP/2" in details else ABSENT


class Endpoint:
    """A server at the address of this task, until TensorFlow's server starts.

    Args:
        address: its port is bound on every interface, as TensorFlow's server binds it.
        answer: called with each question, in a thread.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, address: str, answer: Callable[[Message], Message]) -> None:
        import grpc

        self._answer = answer
        self._port = identity(address)[1]
        self._messages: queue.Queue[Message] = queue.Queue()
        self._opened, self._freed = threading.Event(), threading.Event()
        self._is_early = threading.Event()
        if not port_is_free(self._port):
            raise OSError(f"port {self._port} is in use")
        handlers = {
            "Ask": grpc.unary_unary_rpc_method_handler(self._asked),
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
        }
        # Other calls of TensorFlow come later, or are tried again by TensorFlow: a worker may wait
        # in them for a process that waits for this one, with Python's lock.
        early = {_GET_STATUS: grpc.unary_unary_rpc_method_handler(self._forwarded)}
        self._server = grpc.server(
            ThreadPoolExecutor(16),
            handlers=[
                grpc.method_handlers_generic_handler(_SERVICE, handlers),
                grpc.method_handlers_generic_handler(_TENSORFLOW, early),
            ],
            options=[("grpc.so_reuseport", 0)],
        )
        try:
            self._server.add_insecure_port(f"[::]:{self._port}")
        except RuntimeError as error:
            raise OSError(f"port {self._port} is in use") from error
        self._server.start()

    def _asked(self, request: bytes, _: Any) -> bytes:
        try:
            return json.dumps(self._answer(json.loads(request))).encode()
        except (ValueError, TypeError, LookupError, AttributeError):  # not a message of ours
            return b"{}"

    def _session(self, requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        self._opened.set()
        yield b"{}"
        try:
            for request in requests:
                message = json.loads(request)
                self._messages.put(message)
                if message.get("last"):
                    return
        except Exception:  # the connection has broken
            return

    def _forwarded(self, request: bytes, context: Any) -> bytes:
        """Forward an early question of TensorFlow's coordinator to TensorFlow's server."""
        import grpc

        self._is_early.set()
        self._freed.wait()
        if not context.is_active():  # the endpoint was closed
            return b""
        with grpc.insecure_channel(f"127.0.0.1:{self._port}", options=_CHANNEL) as channel:
            call = channel.unary_unary(f"/{_TENSORFLOW}/{_GET_STATUS}")
            return call(request, timeout=_FORWARDED, wait_for_ready=True)

    def free_port(self, *, session_within: float = 0.0) -> None:
        """Stop listening; the session stays.

        Args:
            session_within: seconds to wait for the session to be opened.
        """
        self._opened.wait(session_within)
        # Running calls continue: the session, and early coordinator requests.
        ended = self._server.stop(_FOREVER)
        deadline = time.monotonic() + _QUESTION
        while not (self._opened.is_set() or self._is_early.is_set() or ended.wait(0.01)):
            if time.monotonic() > deadline:
                # To its end: a call that is still in Python would wait for TensorFlow's
                # constructor, which holds Python's lock while it waits for the caller.
                self._server.stop(0.0).wait(_STOPPED)
        for _ in range(100):
            if port_is_free(self._port):
                break
            threading.Event().wait(0.05)
        self._freed.set()

    @property
    def had_session(self) -> bool:
        """Whether there was a session."""
        return self._opened.is_set()

    def next_message(self, seconds: float) -> Message:
        """The next message of the session; empty where none comes in time."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get(timeout=seconds)
        return {}

    def close(self) -> None:
        """End the session, too."""
        self._server.stop(0.2).wait(_STOPPED)  # gRPC logs an abrupt end on the other side
        self._freed.set()  # Python's exit waits for the threads of calls


_FOREVER = 10.0**6
_QUESTION = 0.5  # seconds for the answer to a question
_STOPPED = 10.0  # seconds for calls to end
_FORWARDED = 60.0  # seconds for TensorFlow's server to start and to answer


def port_is_free(port: int) -> bool:
    """Whether a server could listen there on every interface, as TensorFlow's does."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError:
        return False
    return True
