"""Whether the process that drives the training is there, seen from a task that waits for it."""

from __future__ import annotations

import time

from tfdist_ext.strategies import waiting
from tfdist_ext.strategies.resolvers import Described
from tfdist_ext.strategies.waiting import say

__all__ = ["Presence", "driver_of", "say"]

_SILENT_LOOKS = 4  # in a row; one may be lost on a busy network


class Presence:
    """Looks at the address of one task now and then.

    TensorFlow listens there from the moment the strategy is made until the process is gone,
    however it went. So a task that has not come yet is waited for without a limit, which is said
    on stderr; one that was there and is silent four times in a row is gone.

    Attributes:
        seen: whether it was ever there; may be set where that is known in another way.
        gone: whether it was seen, and is not there any more.
    """

    def __init__(self, me: str, task: str, address: str, source: str):
        self.seen, self.gone = False, False
        self._me, self._task, self._address, self._source = me, task, address, source
        self._started = time.monotonic()
        self._next_report = waiting.FIRST_AFTER
        self._silent = 0

    def __str__(self) -> str:
        return f"{self._task} ({self._address})"

    def look(self) -> bool:
        """Whether it answers now; takes a second at most."""
        answers = not waiting.absent({self._task: self._address})
        self._silent = self._silent + 1 if self.seen and not answers else 0
        self.seen |= answers
        self.gone = self._silent >= _SILENT_LOOKS
        waited = time.monotonic() - self._started
        if not self.seen and waited >= self._next_report:
            say(
                f"{self._me}: waiting for {self} for {waited:.0f} s. Is it started, is its"
                f" address right in {self._source} on every task, can this host reach it?"
            )
            self._next_report = waited + min(waited, waiting.LONGEST_PAUSE)
        return answers


def driver_of(described: Described) -> tuple[str, str] | None:
    """Name and address of the task that leads the training: the chief, or worker 0 without one.

    None where that is no task of the cluster: parameter servers may have a coordinator that is
    named nowhere.
    """
    for job in ("chief",) if "ps" in described.jobs else ("chief", "worker"):
        if described.jobs.get(job, ("",))[0]:
            return f"{job}:0", described.jobs[job][0]
    return None
