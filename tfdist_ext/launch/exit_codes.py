"""The exit statuses and environment variables that the launcher and its tasks agree on.

The statuses are conventions of others. As in Kubeflow, a task with a status from 128 may be started
again. TensorFlow's PreemptionCheckpointHandler exits with 143, the status after SIGTERM.
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
FAILED = 1  # as all others up to 127: the next start would fail again
RESTART = 138  # 128 + SIGUSR1: "start me again"
PREEMPTED = 143  # 128 + SIGTERM: "start me again, and do not count it"

# In the environment of tasks.
PREEMPTION_SIGNAL = "TFDIST_PREEMPTION_SIGNAL"  # the name of a signal like SIGTERM
STALL_TIMEOUT = "TFDIST_STALL_TIMEOUT"  # seconds without progress that end a task; 0: never
USUAL_STALL_TIMEOUT = 60.0
COMMAND = "TFDIST_COMMAND"  # the line that started the launcher
STARTS_AGAIN = "TFDIST_STARTS_AGAIN"  # "1": the launcher starts tasks again that fail


def stall_timeout(env: Mapping[str, str], usual: float = USUAL_STALL_TIMEOUT) -> float:
    """The stall timeout in this environment, in seconds; 0: nothing is watched."""
    try:
        timeout = float(env.get(STALL_TIMEOUT, usual))
    except ValueError:
        timeout = usual
    return timeout if 0 < timeout < math.inf else 0.0


def is_started_again() -> bool:
    """Whether the launcher restarts this task after a failure, or says why it does not."""
    return bool(os.environ.get(STARTS_AGAIN))


def command_line() -> str | None:
    """The command line of the launcher, or of this process where no launcher started it.

    None in an interactive session.
    """
    if line := os.environ.get(COMMAND):
        return line
    if hasattr(sys, "ps1") or not sys.argv[0]:
        return None
    return shlex.join(sys.orig_argv)
