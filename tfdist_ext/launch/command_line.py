"""The command line that started this process, to be typed again."""

from __future__ import annotations

import os
import shlex
import sys

__all__ = ["COMMAND", "LAST_CHECKPOINT", "STARTS_AGAIN", "command_line", "is_started_again"]

# In the environment of tasks.
COMMAND = "TFDIST_COMMAND"  # the line that started the launcher
STARTS_AGAIN = "TFDIST_STARTS_AGAIN"  # "1": the launcher starts tasks again that fail

LAST_CHECKPOINT = "The last checkpoint is"  # what a task writes when its training stops


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
