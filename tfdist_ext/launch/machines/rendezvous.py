"""Where the nodes of a run meet: node 0 listens, the others connect, and again after a break."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.machines.connection import (
    LOST_AFTER,
    Channel,
    ConnectionLostError,
    Link,
    Message,
    RefusedError,
    prove,
    welcome,
)

__all__ = ["Endpoint", "Rendezvous", "join"]

_EVERY = 0.25  # seconds between two tries
_FIRST_AFTER, _LONGEST_PAUSE = 10.0, 60.0  # seconds until it is said who is missing


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes meet, and what they share.

    Attributes:
        host: a name or address of node 0 by which the others reach it.
        port: its port there.
        token: of the run; "" where anybody who can connect may take part.
        wait: seconds for all to come.
    """

    host: str
    port: int
    token: str = field(default="", repr=False)
    wait: float = 300.0

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Rendezvous:
    """The end of node 0: listens for the others as long as the run takes.

    Args:
        nodes: how many there are, this one included.
        card: what must be the same on all.
        say: shows a sentence.

    Attributes:
        links: node -> the connection to it, of those that are there.
        heard: called with each message and its link, in a thread of the link.
        lost: called with each link that is lost, and why.

    Raises:
        LaunchError: it cannot listen there.
    """

    def __init__(
        self, endpoint: Endpoint, nodes: int, card: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self.links: dict[int, Link] = {}
        self.heard: Callable[[Link, Message], None] = lambda link, message: None
        self.lost: Callable[[Link, str], None] = lambda link, why: None
        self._endpoint, self._nodes, self._card, self._say = endpoint, nodes, card, say
        self._changed = threading.Condition()
        self._refused: set[str] = set()
        self._closed = False
        self._socket = _listening(endpoint)
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def missing(self, nodes: Collection[int]) -> list[int]:
        """Those of some nodes that are not there."""
        return sorted(node for node in nodes if node and node not in self.links)

    def wait_for(
        self, nodes: Collection[int], seconds: float, stopped: Callable[[], bool]
    ) -> list[int]:
        """Wait for nodes; those that have not come in time, or until `stopped`."""
        began, says = time.monotonic(), _FIRST_AFTER
        with self._changed:
            while missing := self.missing(nodes):
                waited = time.monotonic() - began
                if stopped() or waited >= seconds:
                    break
                if waited >= says:
                    names = ", ".join(map(str, missing))
                    self._say(f"waiting for node {names} at {self._endpoint} for {waited:.0f} s")
                    says = waited + min(waited, _LONGEST_PAUSE)
                self._changed.wait(_EVERY)
        return missing

    def wait_until_empty(self, seconds: float) -> None:
        """Wait until all others are gone."""
        with self._changed:
            self._changed.wait_for(lambda: not self.links, seconds)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to all nodes that are there."""
        for link in list(self.links.values()):
            link.send(message)

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for link in list(self.links.values()):
            link.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_EVERY)  # more open files than allowed, for example
                continue
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection)
        except OSError:
            return
        card: dict[str, Any] = {}

        def judge(shown: Any) -> None:
            card.update(self._judged(shown))

        try:
            welcome(channel, self._endpoint.token, judge)
        except (ConnectionLostError, RefusedError) as error:
            channel.close()
            known = isinstance(error, ConnectionLostError) or error.for_now
            if not known and str(error) not in self._refused:
                self._refused.add(str(error))
                self._say(f"a node at {channel.peer} is refused: {error}")
            return
        link = Link(channel, card["node"], card["host"] or channel.peer)
        link.received = lambda message: self.heard(link, message)
        link.lost = lambda why: self._lose(link, why)
        with self._changed:
            if link.node in self.links or self._closed:  # two at once
                channel.close()
                return
            self.links[link.node] = link
            self._changed.notify_all()
        link.start()

    def _judged(self, card: Any) -> dict[str, Any]:
        """The card of a node that may take part."""
        if not isinstance(card, dict) or not isinstance(card.get("same"), dict):
            raise RefusedError("it is no node")
        node, host = card.get("node"), card.get("host")
        if not isinstance(node, int) or not isinstance(host, str):
            raise RefusedError("it is no node")
        for name, value in self._card.items():
            if card["same"].get(name) != value:
                theirs = card["same"].get(name)
                raise RefusedError(
                    f"{name} must be the same on all machines, got {theirs!r} on node {node} and"
                    f" {value!r} on node 0"
                )
        if not 1 <= node < self._nodes:
            raise RefusedError(f"--node-rank must be from 0 to {self._nodes - 1}, got {node}")
        if node in self.links:
            there = self.links[node]
            why = f"{there} is there already: give each machine its own --node-rank"
            raise RefusedError(why, for_now=True)
        return card

    def _lose(self, link: Link, why: str) -> None:
        with self._changed:
            if self.links.get(link.node) is link:
                del self.links[link.node]
            self._changed.notify_all()
        self.lost(link, why)


def _listening(endpoint: Endpoint) -> socket.socket:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"--rendezvous must name a host that can be resolved, got {endpoint.host!r}: {error}"
        ) from error
    family, _, _, _, address = found[0]
    try:
        try:
            return _server(family, address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Behind a translation of addresses the machine does not have the one it is known by.
            everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
            return _server(family, (everywhere, endpoint.port))
    except OSError as error:
        raise LaunchError(
            f"node 0 must be able to listen at the rendezvous, {endpoint}, got"
            f" {error.strerror or error}; give another port on all machines"
        ) from error


def _server(family: int, address: Any) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(128)
    except OSError:
        server.close()
        raise
    return server


def join(
    endpoint: Endpoint,
    node: int,
    host: str,
    card: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> tuple[Link, str] | None:
    """Connect to node 0; the link, which is not read yet, and the address of this machine.

    Args:
        host: by which the others reach this machine; "": the address that it connects from.
        stopped: asked whether to give up.

    Returns:
        None where `stopped` said so.

    Raises:
        LaunchError: node 0 is not there in time, or will not have this node.
    """
    began, says, why = time.monotonic(), _FIRST_AFTER, ""
    while not stopped():
        waited = time.monotonic() - began
        if waited >= endpoint.wait:
            raise LaunchError(
                f"node 0 must be at {endpoint} within {endpoint.wait:g} s (--rendezvous-timeout),"
                f" got: {why}; start it there with --node-rank 0, or correct --rendezvous"
            )
        if waited >= says:
            say(f"waiting for node 0 at {endpoint} for {waited:.0f} s: {why}")
            says = waited + min(waited, _LONGEST_PAUSE)
        try:
            address = (endpoint.host, endpoint.port)
            channel = Channel(socket.create_connection(address, LOST_AFTER))
            try:
                prove(channel, endpoint.token, {"node": node, "host": host, "same": dict(card)})
            except BaseException:
                channel.close()
                raise
            return Link(channel, 0, endpoint.host), host or channel.here
        except RefusedError as error:
            if not error.for_now or waited > 2 * LOST_AFTER:
                raise LaunchError(f"node 0 at {endpoint} refuses this machine: {error}") from error
            why = str(error)
        except (OSError, UnicodeError) as error:
            why = "no answer" if isinstance(error, TimeoutError) else str(error)
        except ConnectionLostError as error:
            why = str(error)
        time.sleep(_EVERY)
    return None
