"""Who is alive: one mechanism for all strategies and roles.

Each question has one module:

- Who is missing or different at the start? `preflight`
- Who has died or is frozen? `watching`
- Who is where? `barriers`
- Who is done, and did it fail? `watching` (parameter servers), `barriers` (workers)

`wire` has the gRPC calls. Between multi-worker tasks, `barriers` uses the key-value store of
TensorFlow's coordination service. What all of them write to stderr while they wait is here.
"""

from __future__ import annotations

import faulthandler
import sys
import time

from tfdist_ext.errors import address_of

FIRST_AFTER = 10.0  # seconds; each further report comes after twice the time
LONGEST_PAUSE = 120.0


def log_line(line: str) -> None:
    """Write a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def show_stacks() -> None:
    """Write the stacks of all Python threads of this process to stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback(file=2, all_threads=True)


class WaitReports:
    """Reports on a wait to stderr: after 10 seconds, and then ever less often."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST_AFTER

    def due(self, waited: float) -> bool:
        """Whether a report is due after this wait, in seconds; then the next one is later."""
        if waited < self._next:
            return False
        self._next = waited + min(waited, LONGEST_PAUSE)
        return True

    def report(self, me: str, names: str, source: str) -> None:
        """Report, if due, that a task waits for other tasks; `source` gave their addresses."""
        waited = time.monotonic() - self._began
        if self.due(waited):
            log_line(
                f"{me}: waiting for {names} for {waited:.0f} s. Check that it is started, that its"
                f" address in {source} is right on every task, and that this host can reach it."
                f" Help: {address_of('docs/troubleshooting.md#the-job-hangs-at-start')}"
            )
