"""The command line that started this process, to be typed again."""

from __future__ import annotations

import os
import shlex
import sys

__all__ = ["COMMAND", "command_line"]

COMMAND = "TFDIST_COMMAND"  # in the environment of tasks: the line that started the launcher


def command_line() -> str | None:
    """The line for a shell: the launcher's, where one has started this process.

    None in an interactive session.
    """
    if line := os.environ.get(COMMAND):
        return line
    if hasattr(sys, "ps1") or not sys.argv[0]:
        return None
    return shlex.join(sys.orig_argv)
