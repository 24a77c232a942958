"""What the launcher and its tasks agree on: exit statuses, and variables of the environment.

The numbers are those that others use: from 128 on an end may be tried again, as Kubeflow has it;
143 is what TensorFlow's PreemptionCheckpointHandler exits with, and what SIGTERM leaves.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping

__all__ = [
    "COMMAND",
    "DONE",
    "FAILED",
    "GRACE",
    "PREEMPTED",
    "PREEMPTION_SIGNAL",
    "RESTART",
    "STALL_TIMEOUT",
    "STARTS_AGAIN",
    "USUAL_STALL_TIMEOUT",
    "command_line",
    "is_started_again",
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
COMMAND = "TFDIST_COMMAND"  # the line that started the launcher
STARTS_AGAIN = "TFDIST_STARTS_AGAIN"  # "1": the launcher starts tasks again that fail


def stall_timeout(env: Mapping[str, str], usual: float = USUAL_STALL_TIMEOUT) -> float:
    """Seconds, as the launcher, or whoever started this task, has set it; 0: nothing is watched."""
    try:
        timeout = float(env.get(STALL_TIMEOUT, usual))
    except ValueError:
        timeout = usual
    return timeout if 0 < timeout < math.inf else 0.0


def is_started_again() -> bool:
    """Whether the launcher starts this task again if it fails, and says so if it does not."""
    return bool(os.environ.get(STARTS_AGAIN))


def command_line() -> str | None:
    """The line for a shell: the launcher's, where one has started this process.

    None in an interactive session.
    """
    if line := os.environ.get(COMMAND):
        return line
    if hasattr(sys, "ps1") or not sys.argv[0]:
        return None
    return shlex.join(sys.orig_argv)
