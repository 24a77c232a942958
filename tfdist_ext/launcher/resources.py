"""What this machine has for tasks: ports that no other process takes, and GPUs.

A port that the kernel chooses (`bind` to port 0) is in its ephemeral range: until the task binds
the port, seconds later, the kernel may give it to another socket. The socket cannot stay open,
because TensorFlow's server fails on a port that another socket holds (measured with 2.21).

So the ports are outside of the ephemeral range, and were seen free by binding them. The UDP socket
of the same number is a lock that keeps other launchers away; TensorFlow uses TCP only. The kernel
releases the lock when the launcher dies.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tfdist_ext.cluster.liveness.wire import port_is_free
from tfdist_ext.errors import LaunchError

_LOWEST = 10_000  # most services with a registered port are below
# Without /proc: Linux's own range and that of IANA (macOS, BSD) together.
_USUAL_RANGE = (32_768, 65_535)
_LOOK_EVERY = 0.2  # seconds between two looks for a program that listens


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
            except OSError:  # more open files than a process may have
                break
            if _binds(lock, port) and port_is_free(port):
                ports.append(port)
            else:
                lock.close()
        if len(ports) < count:
            raise LaunchError(
                f"only {len(ports)} of {count} ports are free. End the programs that use them, ask"
                " for fewer tasks, or raise the limit of open files (ulimit -n)."
            )
        yield tuple(ports)


@contextmanager
def watch_ports(ports: Iterable[int], listens: threading.Event) -> Iterator[None]:
    """Scope that sets the event when a program listens at one of these ports."""
    ended = threading.Event()

    def look() -> None:
        while not listens.is_set() and not ended.wait(_LOOK_EVERY):
            for port in ports:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    listens.set()

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _candidates() -> list[int]:
    """The ports from 10000 in random order, with the ephemeral ports last."""
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


def _binds(lock: socket.socket, port: int) -> bool:
    try:
        lock.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def gpus_of(env: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        LaunchError: nvidia-smi is there, and fails.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",")]
        # CUDA uses the GPUs before the first name that is not a GPU.
        return named[: next((n for n, name in enumerate(named) if name in ("", "-1")), len(named))]
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    if program is None:
        return []
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    try:  # it is slow on machines with many GPUs
        result = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"nvidia-smi failed: {error}. Set CUDA_VISIBLE_DEVICES to the GPUs to use, or to -1 for"
            " none."
        ) from error
    return result.stdout.split()
