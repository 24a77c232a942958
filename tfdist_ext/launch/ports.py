"""Ports that no other process takes between being chosen and being used.

The usual way, binding port 0 and closing the socket, gives back a port of the kernel's ephemeral
range. Until the task binds it, seconds later, the kernel may hand it to any `bind(0)` and to any
outgoing connection. Keeping the socket open is no way out: TensorFlow's gRPC server switches
SO_REUSEPORT off, and fails on a port that another socket holds (measured with 2.21: "Could not
start gRPC server"; TF_GRPC_REUSE_PORT=1 changes that, and then two servers that were given one
address by mistake would silently share it).

So the ports lie outside the ephemeral range, where the kernel hands out nothing by itself, and
were seen free by binding them. The UDP socket of the same number is a lock that keeps other
launchers away. TensorFlow uses TCP only, so the lock is not in its way. The kernel gives the lock
to one process on the machine, and takes it back when that process dies.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tfdist_ext.errors import LaunchError

__all__ = ["reserve_ports"]

_LOWEST = 10_000  # below it live most services that have a number of their own
# Without /proc: Linux's own range and that of IANA (macOS, BSD) together.
_USUAL_RANGE = (32_768, 65_535)
_LOOPBACK = "127.0.0.1"


@contextmanager
def reserve_ports(count: int) -> Iterator[tuple[int, ...]]:
    """Reserve free TCP ports: no other `reserve_ports` on this machine gets them meanwhile.

    Raises:
        LaunchError: fewer than `count` ports are free.
    """
    with ExitStack() as locks:
        ports: list[int] = []
        for port in _candidates():
            if len(ports) == count:
                break
            try:
                lock = locks.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            except OSError as error:  # more open files than a process may have
                raise LaunchError(
                    f"{count} ports must be free, got {len(ports)}: {error}; ask for fewer tasks,"
                    " or raise the limit of open files (ulimit -n)"
                ) from error
            if _binds(lock, _LOOPBACK, port) and _is_free(port):
                ports.append(port)
            else:
                lock.close()
        if len(ports) < count:
            raise LaunchError(
                f"{count} ports must be free, got {len(ports)}; end what uses them, or ask"
                " for fewer tasks"
            )
        yield tuple(ports)


def _candidates() -> list[int]:
    """The ports from 10000 up in random order; those of the ephemeral range come last."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        low, high = map(int, text.split())
    except (OSError, ValueError):
        low, high = _USUAL_RANGE
    ports = list(range(_LOWEST, 65_536))
    # Random, so that a port that was in use a moment ago is rarely the next; SystemRandom, so
    # that the caller's seed neither decides nor is disturbed.
    random.SystemRandom().shuffle(ports)
    # Inside only where a machine's range is so wide that nothing else is left.
    return sorted(ports, key=lambda port: low <= port <= high)


def _is_free(port: int) -> bool:
    # gRPC listens on every address, IPv4 and IPv6: a server on ::1 alone is in its way too.
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # a machine without IPv6
            continue
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if not _binds(probe, host, port):
                return False
    return True


def _binds(sock: socket.socket, host: str, port: int) -> bool:
    try:
        sock.bind((host, port))
    except OSError as error:
        # IPv6 compiled in and switched off: no address to bind is not a port in use.
        return sock.family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL
    return True
