"""What a task writes to stderr while it waits."""

from __future__ import annotations

import faulthandler
import sys
import time

__all__ = ["FIRST_AFTER", "LONGEST_PAUSE", "WaitReports", "say", "show_stacks", "where_is"]

FIRST_AFTER = 10.0  # seconds; each further report comes after twice the time
LONGEST_PAUSE = 120.0


def say(line: str) -> None:
    """Write a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def show_stacks() -> None:
    """Write the stacks of all Python threads of this process to stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback(file=2, all_threads=True)


def where_is(me: str, names: str, waited: float, source: str) -> str:
    """The report of a task that waits for others to start.

    Args:
        names: the others, with their addresses.
        source: where the addresses came from.
    """
    return (
        f"{me}: waiting for {names} for {waited:.0f} s. Is it started, is its address right in"
        f" {source} on every task, can this host reach it?"
    )


class WaitReports:
    """When to report a wait: after 10 seconds, and then ever less often."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST_AFTER

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def due(self, waited: float) -> bool:
        """Whether a report is due after this wait, in seconds; then the next one is later."""
        if waited < self._next:
            return False
        self._next = waited + min(waited, LONGEST_PAUSE)
        return True
