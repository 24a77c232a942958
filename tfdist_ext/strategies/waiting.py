"""Names the missing tasks while TensorFlow silently waits for them.

TensorFlow connects inside one long call that neither returns nor prints while a peer is missing.
For multi_worker_mirrored it holds Python's lock all the while, so that no thread of this process
runs either: a small process of its own looks at the peers. It runs this very file, which
therefore needs Python's standard library alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

__all__ = ["absent", "reporting_absent_peers", "say", "show_stacks", "watch"]

FIRST_AFTER = 10.0  # seconds; then after ever longer ones
LONGEST_PAUSE = 120.0
NAMED_AT_MOST = 5  # each that hangs costs a second; a report must not take minutes


@contextlib.contextmanager
def reporting_absent_peers(
    me: str, peers: Mapping[str, str], source: str, *, limit: float | None = None
) -> Iterator[None]:
    """While the body runs, name on stderr the tasks that do not answer, after 10 s and then on.

    Args:
        me: this task, for the message.
        peers: task -> "host:port" of those that are waited for.
        source: where the addresses came from, for the message.
        limit: seconds after which this process is killed, because nothing else ends a TensorFlow
            that waits for a peer; None: none.
    """
    if not peers:
        yield
        return
    order = json.dumps([me, dict(peers), source, FIRST_AFTER, limit])
    try:
        # Isolated and without site: it starts in some 20 ms, whatever is installed.
        command = [sys.executable, "-I", "-S", __file__]
        watcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
    except (OSError, TypeError):  # no Python to start: then TensorFlow waits in silence
        yield
        return
    assert watcher.stdin is not None
    try:
        with contextlib.suppress(OSError):
            print(order, file=watcher.stdin, flush=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            watcher.stdin.close()
        watcher.kill()
        watcher.wait()


def watch(
    me: str,
    peers: Mapping[str, str],
    source: str,
    *,
    first_after: float,
    done: threading.Event,
    say: Callable[[str], None],
    limit: float | None = None,
) -> bool:
    """Report until `done` is set: after `first_after` seconds, and then ever less often.

    Returns:
        Whether it was not set in `limit` seconds.
    """
    started = time.monotonic()
    end = float("inf") if limit is None else started + limit
    pause = first_after
    while not done.wait(max(0.0, min(pause, end - time.monotonic()))):
        missing = absent(peers)
        if done.is_set():
            return False
        waited = f"for {time.monotonic() - started:.0f} s"
        if missing:
            more = " and perhaps others" if len(missing) == NAMED_AT_MOST else ""
            say(
                f"{me}: waiting for {', '.join(missing)}{more} {waited}. Is it started, is its"
                f" address right in {source} on every task, can this host reach it?"
            )
        else:
            say(
                f"{me}: waiting {waited}, though every task answers at its address. Do all of them"
                f" have the same cluster in {source}, and make the same strategy?"
            )
        if time.monotonic() >= end:
            say(f"{me}: ends, because the wait for the others is limited to {limit:g} s")
            return True
        pause = min(pause * 2, LONGEST_PAUSE)
    return False


def say(line: str) -> None:
    """Write a line on what this task does to stderr, where no results go."""
    print(line, file=sys.stderr, flush=True)


def show_stacks() -> None:
    """Write what all Python threads of this process are at to stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback(file=2, all_threads=True)


def absent(peers: Mapping[str, str], *, timeout: float = 1.0) -> list[str]:
    """The first 5 tasks, as 'worker:1 (host:port)', at whose address no process listens.

    Its connections are closed at once.
    """
    missing: list[str] = []
    for task, address in peers.items():
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout).close()
        except (OSError, ValueError, OverflowError):
            missing.append(f"{task} ({address})")
        if len(missing) == NAMED_AT_MOST:
            break
    return missing


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that waits
    me, peers, source, first_after, limit = json.loads(sys.stdin.readline())
    parent = os.getppid()
    done = threading.Event()

    def until_closed() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=until_closed, daemon=True).start()
    late = watch(me, peers, source, first_after=first_after, done=done, say=say, limit=limit)
    if late and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    _main()
