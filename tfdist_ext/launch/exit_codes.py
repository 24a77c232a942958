"""What an exit status says about a job, and which ones are worth another start.

The numbers are those that others use: from 128 on an end may be tried again, as Kubeflow has it;
143 is what TensorFlow's PreemptionCheckpointHandler exits with, and what SIGTERM leaves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist_ext.errors import LaunchError

__all__ = [
    "DONE",
    "FAILED",
    "GRACE",
    "PREEMPTED",
    "PREEMPTION_SIGNAL",
    "RESTART",
    "STALL_TIMEOUT",
    "USUAL_STALL_TIMEOUT",
    "RestartOn",
    "outcome_of",
    "stall_timeout",
]

DONE = 0
FAILED = 1  # and all others up to 127: the next start would fail again
RESTART = 138  # 128 + SIGUSR1: "start me again"
PREEMPTED = 143  # 128 + SIGTERM: "start me again, and do not count it"

# In the environment of tasks.
PREEMPTION_SIGNAL = "TFDIST_PREEMPTION_SIGNAL"  # one that says what SIGTERM says, as "SIGUSR1"
GRACE = "TFDIST_GRACE"  # seconds from the signal until the task is killed
STALL_TIMEOUT = "TFDIST_STALL_TIMEOUT"  # seconds without progress that end a task; 0: never
USUAL_STALL_TIMEOUT = 60.0


def stall_timeout(env: Mapping[str, str], usual: float = USUAL_STALL_TIMEOUT) -> float:
    """Seconds, as the launcher, or whoever started this task, has set it; 0: nothing is watched."""
    try:
        timeout = float(env.get(STALL_TIMEOUT, usual))
    except ValueError:
        timeout = usual
    return timeout if 0 < timeout < math.inf else 0.0


_EXCEPTION = "exception"
_CODES = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?")


def outcome_of(status: int) -> str:
    """ "done", "failed", "restart" or "preempted": what the contract says of a status."""
    named = {DONE: "done", PREEMPTED: "preempted"}
    return named.get(status, "restart" if status >= 128 else "failed")


@dataclass(frozen=True)
class RestartOn:
    """The ends of a task after which a run starts again.

    Attributes:
        codes: exit statuses; 128 + n is signal n.
        exceptions: a Python exception, too, where it comes from another place than those before.
    """

    codes: frozenset[int] = frozenset(range(128, 256))
    exceptions: bool = True

    @classmethod
    def parse(cls, text: str) -> RestartOn:
        """Of words with commas between: exit codes, ranges of them, "exception".

        Raises:
            LaunchError: anything else, or a code that is none.
        """
        words = [word.strip() for word in text.split(",") if word.strip()]
        codes: set[int] = set()
        for word in words:
            if word == _EXCEPTION:
                continue
            match = _CODES.fullmatch(word)
            low = int(match[1]) if match else 0
            high = int(match[2] or low) if match else 0
            if not 1 <= low <= high <= 255:
                raise LaunchError(
                    f"--restart-on must be exit codes from 1 to 255, ranges of them, and"
                    f" {_EXCEPTION!r}, got {word!r}; write, for example:"
                    f" --restart-on {_EXCEPTION},75,128-255"
                )
            codes.update(range(low, high + 1))
        return cls(frozenset(codes), _EXCEPTION in words)
