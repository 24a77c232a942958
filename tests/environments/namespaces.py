"""Machines with addresses of their own: network namespaces on a bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Why there are none here; "" where there are.
WHY_NOT = (
    "network namespaces need root"
    if os.geteuid()
    else ""
    if shutil.which("ip")
    else "ip is not installed (apt-get install iproute2)"
)


@dataclass(frozen=True)
class Hosts:
    """A few hosts that reach each other.

    Attributes:
        names: of their namespaces.
        addresses: one of each.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def command(self, host: int, *words: str) -> list[str]:
        """The command that runs these words on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts, 10.97.N.1 and so on, which are gone afterwards."""
    tag = os.getpid() % 10_000
    bridge, net = f"tb{tag}", f"10.97.{tag % 250}"
    names = tuple(f"tn{tag}x{host}" for host in range(count))
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}v", "master", bridge, "up")
            address = f"{net}.{host + 1}/24"
            for words in (
                ("addr", "add", address, "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", name, *words)
        yield Hosts(names, tuple(f"{net}.{host + 1}" for host in range(count)))
    finally:
        for name in names:
            # A namespace lives as long as a process in it; its link would, too.
            _ip("link", "del", f"{name}v", check=False)
            _ip("netns", "del", name, check=False)
        _ip("link", "del", bridge, check=False)


def _ip(*words: str, check: bool = True) -> None:
    command: Sequence[str] = ("ip", *words)
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
