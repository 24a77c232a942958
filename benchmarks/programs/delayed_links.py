"""Connects network namespaces, and delays each packet between them. Needs root.

    python delayed_links.py NAMESPACE=ADDRESS ...

Each namespace gets the interface eth0 with its address. The program reads the delay in seconds
from lines of its input, and ends at the end of the input. Linux can delay packets by itself
(netem), but many kernels of containers and small virtual machines lack that module.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
LARGEST = 60_000  # bytes of a packet, at most


def main() -> None:
    links: dict[bytes, int] = {}  # address -> the file of its interface
    for number, host in enumerate(sys.argv[1:]):
        namespace, _, address = host.partition("=")
        links[socket.inet_aton(address)] = created(namespace, address, f"delayed{number}")
    print("ready", flush=True)
    pass_packets(links)


def created(namespace: str, address: str, name: str) -> int:
    """A new interface of a namespace."""
    link = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(link, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        ["link", "set", name, "netns", namespace, "name", "eth0"],
        ["-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0"],
        ["-n", namespace, "link", "set", "eth0", "mtu", str(LARGEST), "up"],
        ["-n", namespace, "link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *words], check=True, timeout=20)
    return link


def pass_packets(links: dict[bytes, int]) -> None:
    delay = 0.0
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([sys.stdin, *links.values()], [], [], timeout)
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            delay = float(line)
        for link in links.values():
            with contextlib.suppress(BlockingIOError):
                while link in readable:
                    waiting.append((time.monotonic() + delay, os.read(link, LARGEST)))
        while waiting and waiting[0][0] <= time.monotonic():
            packet = waiting.popleft()[1]
            target = links.get(packet[16:20])  # in the header of IPv4
            if target is not None:
                with contextlib.suppress(OSError):  # a full queue drops packets
                    os.write(target, packet)


if __name__ == "__main__":
    main()
