"""Who is missing, said while TensorFlow waits in silence."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tfdist_ext.cluster import ClusterConfig

__all__ = ["absent", "reporting_absent_peers"]


@contextlib.contextmanager
def reporting_absent_peers(
    cluster: Any,
    *,
    first_after: float = 10.0,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Iterator[None]:
    """While the body runs, name the tasks that do not answer: after 10 s, then ever less often.

    TensorFlow connects inside one long call that neither returns nor prints while a peer is
    missing, so a thread looks at the peers meanwhile. Its connections are closed at once.
    """
    if not isinstance(cluster, ClusterConfig):
        yield  # a resolver may ask a cloud for its addresses: not from a second thread
        return
    done = threading.Event()
    started = time.monotonic()

    def watch() -> None:
        pause = first_after
        while not done.wait(pause):
            missing = absent(cluster)
            if missing and not done.is_set():
                say(
                    f"{cluster.task}: waiting for {', '.join(missing)} since"
                    f" {time.monotonic() - started:.0f} s. Is it started, is its address right in"
                    " TF_CONFIG on every task, can this host reach it?"
                )
            pause = min(pause * 2, 120.0)

    thread = threading.Thread(target=watch, name="tfdist-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=2.0)


def absent(cluster: ClusterConfig, *, timeout: float = 1.0) -> list[str]:
    """The other tasks, as 'worker:1 (host:port)', at whose address nobody listens."""
    missing = []
    for job, addresses in cluster.jobs.items():
        if job == "evaluator":
            continue  # takes no part in the training's connections
        for index, address in enumerate(addresses):
            if not address or (job, index) == (cluster.task.type, cluster.task.index):
                continue
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout).close()
            except OSError:
                missing.append(f"{job}:{index} ({address})")
    return missing
