"""What takes long without a sign of life says so on stderr."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tfdist_ext.strategies.liveness import say

__all__ = ["reporting_progress"]

FIRST_AFTER = 10.0  # seconds; then after ever longer ones
LONGEST_PAUSE = 120.0


@contextlib.contextmanager
def reporting_progress(what: str) -> Iterator[None]:
    """While the body runs, say what it does: after 10 s, and then ever less often.

    In a thread of its own: the body stays in the main one, where Ctrl-C reaches it.
    """
    done = threading.Event()

    def report() -> None:
        waited, pause = 0.0, FIRST_AFTER
        while not done.wait(pause):
            waited += pause
            say(f"{what}, for {waited:.0f} s ...")
            pause = min(waited, LONGEST_PAUSE)

    thread = threading.Thread(target=report, name="tfdist-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
