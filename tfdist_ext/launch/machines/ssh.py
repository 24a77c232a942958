"""A run on several machines from one terminal: a tfdist on each, started by ssh."""

from __future__ import annotations

import contextlib
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from tfdist_ext.launch.exit_codes import RESTART
from tfdist_ext.launch.machines.attached import BEAT_EVERY
from tfdist_ext.launch.machines.hosts_file import Host, remote_line
from tfdist_ext.launch.output import Printer
from tfdist_ext.launch.stop_signals import StopSignals

__all__ = ["run_over_ssh"]

_FAILED = 255  # ssh itself: no connection, or no more
_AGAIN_AFTER = 5.0  # seconds to another try to connect
_TO_END = 10.0  # seconds for the others to end after node 0, and for node 0 where one cannot start
# A connection is lost after 4 seconds; and nobody is asked for passwords, by several at once.
_OPTIONS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=1", "-oServerAliveCountMax=4")


class _Remote:
    """The ssh to one machine."""

    def __init__(self, node: int, host: Host, command: Sequence[str], token: str) -> None:
        self.node, self.host = node, host
        self.ended_at: float | None = None
        self._command, self._token = command, token
        self.start()

    def start(self) -> None:
        """Connect, also another time."""
        self.ended_at = None
        # A session of its own: a terminal's Ctrl-C is for this process, which passes it on.
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.tell(self._token)
        self.readers = [
            threading.Thread(target=_show, args=(stream, Printer(shown)), daemon=True)
            for stream, shown in (
                (self.process.stdout, sys.stdout),
                (self.process.stderr, sys.stderr),
            )
            if stream is not None
        ]
        for reader in self.readers:
            reader.start()

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{line}\n".encode())

    def leave(self) -> None:
        """Close its standard input, and wait until it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self.readers:
            reader.join(1.0)


def _show(stream: IO[bytes], printer: Printer) -> None:
    # Whole lines, so that those of several machines do not mix.
    for line in iter(stream.readline, b""):
        printer.write(line.decode(errors="replace"))


def run_over_ssh(
    hosts: Sequence[Host],
    port: int,
    words: Sequence[str],
    *,
    ssh: Sequence[str],
    restarts: bool,
    stop: StopSignals,
) -> int:
    """Run tfdist on all of these machines, and show what they show; the exit status of node 0.

    Args:
        hosts: node 0 first.
        words: of `tfdist run`, without those that say which node it is; the command behind `--`.
        ssh: the program, with options of the user's.
        restarts: whether a machine to which the connection breaks may come back.
        stop: the signals that are passed on.
    """
    token = secrets.token_urlsafe(24)
    at = hosts[0].address
    rendezvous = f"{f'[{at}]' if ':' in at else at}:{port}"
    remotes = []
    signals: queue.SimpleQueue[str] = queue.SimpleQueue()
    stop.tell = lambda number: signals.put(number.name)
    with stop.handled():
        for node, host in enumerate(hosts):
            own = ["--nodes", str(len(hosts)), "--node-rank", str(node)]
            own += ["--rendezvous", rendezvous, "--node-address", host.address, "--attached"]
            line = remote_line(host, ["run", *own, *words])
            command = [*ssh, *_OPTIONS, host.ssh, line]
            remotes.append(_Remote(node, host, command, token))
        try:
            return _until_node_0_ends(remotes, signals, restarts)
        finally:
            for remote in remotes:
                remote.leave()
            stop.tell = None


def _until_node_0_ends(
    remotes: Sequence[_Remote], signals: queue.SimpleQueue[str], restarts: bool
) -> int:
    first = remotes[0]
    beaten, ends_at = 0.0, float("inf")
    while (status := first.process.poll()) is None:
        with contextlib.suppress(queue.Empty):
            first.tell(signals.get(timeout=0.1))  # it tells the others
        now = time.monotonic()
        if now - beaten >= BEAT_EVERY:
            beaten = now
            for remote in remotes:
                remote.tell("")
        for remote in remotes[1:]:
            ended = remote.process.poll()
            if ended is None:
                continue
            if remote.ended_at is None:
                remote.ended_at = now
                if ended == _FAILED:
                    _say(f"node {remote.node} ({remote.host.ssh}): ssh has no connection")
            again = restarts and ended == _FAILED
            if again and now - remote.ended_at >= _AGAIN_AFTER:
                remote.start()
            elif not again and now - remote.ended_at >= _TO_END and ends_at == float("inf"):
                # Node 0 waits for one that does not come.
                _say(f"node {remote.node} ({remote.host.ssh}) has ended with {ended}")
                first.tell("SIGTERM")
                ends_at = now + _TO_END
        if now >= ends_at:
            return RESTART
    if status == _FAILED:
        _say(f"node 0 ({first.host.ssh}): ssh has no connection; all machines end their tasks")
        return RESTART
    return status


def _say(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr, flush=True)
