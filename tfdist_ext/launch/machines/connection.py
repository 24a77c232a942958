"""Messages between two nodes of a run: JSON, a line each, and a beat every second.

Who connects proves that it has the token of the run, and so does who is connected to: each makes a
keyed hash (HMAC-SHA256) of the other's random number. The token itself is not sent. What follows is
neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = [
    "LOST_AFTER",
    "Channel",
    "ConnectionLostError",
    "Link",
    "Message",
    "RefusedError",
    "prove",
    "welcome",
]

LOST_AFTER = 4.0  # seconds without a word from a node
_BEAT_EVERY = 1.0
_LONGEST_LINE = 2**22  # bytes

Message: TypeAlias = dict[str, Any]


class ConnectionLostError(Exception):
    """The other node has closed the connection, is silent, or says what no node says."""


class RefusedError(Exception):
    """The other node has another token, or will not have this one.

    Attributes:
        for_now: it may have this one in a moment.
    """

    def __init__(self, why: str, *, for_now: bool = False) -> None:
        super().__init__(why)
        self.for_now = for_now


class Channel:
    """Messages over a socket. A wait is limited to `LOST_AFTER` seconds."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(LOST_AFTER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._file = sock.makefile("rb")
        self._sending = threading.Lock()
        self.here = str(sock.getsockname()[0])  # by which the other machine reaches this one
        self.peer = str(sock.getpeername()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one.

        Raises:
            ConnectionLostError: it cannot be sent.
        """
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError as error:
            raise ConnectionLostError(_why(error)) from error

    def receive(self) -> Message:
        """The next one.

        Raises:
            ConnectionLostError: there is none.
        """
        try:
            line = self._file.readline(_LONGEST_LINE)
        except (OSError, ValueError) as error:
            raise ConnectionLostError(_why(error)) from error
        if not line.endswith(b"\n"):
            raise ConnectionLostError("it has closed the connection")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConnectionLostError("it says what no tfdist says") from error
        if not isinstance(message, dict):
            raise ConnectionLostError("it says what no tfdist says")
        return message

    def close(self) -> None:
        """Close it; who waits for a message gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no word from it for {LOST_AFTER:.0f} s"
    return str(getattr(error, "strerror", None) or error)


def prove(channel: Channel, token: str, card: Mapping[str, Any]) -> None:
    """Connect to node 0: prove that this node has the token, show its card, and be taken.

    Raises:
        RefusedError: node 0 has another token, or will not have this node.
        ConnectionLostError: what answers is no node 0.
    """
    theirs, ours = channel.receive().get("nonce"), secrets.token_hex(16)
    if not isinstance(theirs, str):
        raise ConnectionLostError("it is no tfdist")
    proof = _proof(token, "node", theirs, ours)
    channel.send({"nonce": ours, "proof": proof, "card": card})
    answer = channel.receive()
    if "refused" in answer:
        raise RefusedError(str(answer["refused"]), for_now=bool(answer.get("for_now")))
    if not _is_equal(answer.get("proof"), _proof(token, "leader", theirs, ours)):
        raise RefusedError("the token of the rendezvous must be the same on all machines")


def welcome(channel: Channel, token: str, judge: Callable[[Any], None]) -> None:
    """Take a node that connects, once it has proved that it has the token.

    Args:
        judge: gets its card; raises RefusedError where it is not to be taken.

    Raises:
        RefusedError: it was not taken, and was told why.
        ConnectionLostError: it is no node.
    """
    ours = secrets.token_hex(16)
    channel.send({"nonce": ours})
    answer = channel.receive()
    theirs = str(answer.get("nonce"))
    try:
        if not _is_equal(answer.get("proof"), _proof(token, "node", ours, theirs)):
            raise RefusedError("the token of the rendezvous must be the same on all machines")
        judge(answer.get("card"))
    except RefusedError as error:
        channel.send({"refused": str(error), "for_now": error.for_now})
        raise
    channel.send({"proof": _proof(token, "leader", ours, theirs)})


def _proof(token: str, who: str, *nonces: str) -> str:
    text = "\0".join((who, *nonces))
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def _is_equal(theirs: Any, ours: str) -> bool:
    return hmac.compare_digest(str(theirs).encode(errors="replace"), ours.encode())


class Link:
    """A channel that is read by a thread, and kept alive by another one.

    Attributes:
        node: the number of the node at the other end.
        host: by which the other machines reach it.
        received: called with each message, in the reading thread.
        lost: called once, with the reason, where the other node is lost before `close`.
        is_lost: whether it is.
    """

    def __init__(self, channel: Channel, node: int, host: str) -> None:
        self.node, self.host = node, host
        self.received: Callable[[Message], None] = lambda message: None
        self.lost: Callable[[str], None] = lambda why: None
        self.is_lost = False
        self._channel = channel
        self._closed = threading.Event()
        self._once = threading.Lock()

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    def start(self) -> None:
        """Begin to read."""
        for target in (self._read, self._beat):
            threading.Thread(target=target, name=f"{self}", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; where it cannot be sent, the other node is lost."""
        try:
            self._channel.send(message)
        except ConnectionLostError as error:
            self._lose(str(error))

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._channel.close()

    def _read(self) -> None:
        while not self._closed.is_set():
            try:
                message = self._channel.receive()
            except ConnectionLostError as error:
                self._lose(str(error))
                return
            if message:  # a beat is empty
                self.received(message)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_EVERY):
            self.send({})

    def _lose(self, why: str) -> None:
        with self._once:
            if self.is_lost or self._closed.is_set():
                return
            self.is_lost = True
        self.close()
        self.lost(why)
