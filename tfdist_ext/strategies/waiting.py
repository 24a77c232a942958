"""Who is missing, said while TensorFlow waits in silence.

TensorFlow connects inside one long call that neither returns nor prints while a peer is missing.
For multi_worker_mirrored it holds Python's lock all the while, so that no thread of this process
runs either: a small process of its own looks at the peers. It runs this very file, which
therefore needs Python's standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

__all__ = ["absent", "reporting_absent_peers", "watch"]

FIRST_AFTER = 10.0  # seconds; then after ever longer ones
LONGEST_PAUSE = 120.0
NAMED_AT_MOST = 5  # each that hangs costs a second; a report must not take minutes


@contextlib.contextmanager
def reporting_absent_peers(me: str, peers: Mapping[str, str], source: str) -> Iterator[None]:
    """While the body runs, name on stderr the tasks that do not answer, after 10 s and then on.

    Args:
        me: this task, for the message.
        peers: task -> "host:port" of those that are waited for.
        source: where the addresses came from, for the message.
    """
    with contextlib.ExitStack() as stack:
        if peers:
            stack.enter_context(_watching(me, peers, source))
        yield


def watch(
    me: str,
    peers: Mapping[str, str],
    source: str,
    *,
    first_after: float,
    done: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Report until `done` is set: after `first_after` seconds, and then ever less often."""
    started = time.monotonic()
    pause = first_after
    while not done.wait(pause):
        missing = absent(peers)
        if done.is_set():
            return
        waited = f"since {time.monotonic() - started:.0f} s"
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
        pause = min(pause * 2, LONGEST_PAUSE)


def absent(peers: Mapping[str, str], *, timeout: float = 1.0) -> list[str]:
    """The first 5 tasks, as 'worker:1 (host:port)', at whose address nobody listens.

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


@contextlib.contextmanager
def _watching(me: str, peers: Mapping[str, str], source: str) -> Iterator[None]:
    order = json.dumps([me, dict(peers), source, FIRST_AFTER])
    try:
        # Isolated and without site: it starts in some 20 ms, whatever is installed.
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
    except (OSError, TypeError):  # no Python to start: then TensorFlow waits in silence
        yield
        return
    assert watcher.stdin is not None
    try:
        with contextlib.suppress(OSError):
            watcher.stdin.write(order + "\n")
            watcher.stdin.flush()
        yield
    finally:
        with contextlib.suppress(OSError):
            watcher.stdin.close()  # which tells it to end, as the end of this process would
        try:
            watcher.wait(timeout=2.0)
        except subprocess.TimeoutExpired:  # it looks up a name, perhaps
            watcher.kill()
            watcher.wait()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that waits
    me, peers, source, first_after = json.loads(sys.stdin.readline())
    done = threading.Event()

    def until_closed() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=until_closed, daemon=True).start()
    watch(
        me,
        peers,
        source,
        first_after=first_after,
        done=done,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    _main()
