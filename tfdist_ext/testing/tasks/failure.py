"""What is said of tasks that failed: the error of each, and what all wrote."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from tfdist_ext.errors import LaunchError

__all__ = ["TaskError", "failure", "words_for"]

_MOST = 8000  # characters of a task's output
# Frames of a stack that are below the function that the task runs.
_BELOW = re.compile(
    r'^  File "(.*/(_pytest|pluggy|multiprocessing|tfdist_ext/testing)/.*|<string>)", line .*\n?',
    re.M,
)


class TaskError(LaunchError):
    """A task failed, crashed, or did not end in time; the message has all that is known.

    Attributes:
        failed: names of the tasks, the root cause first.
    """

    failed: tuple[str, ...] = ()


def failure(errors: Mapping[str, str], outputs: Mapping[str, str]) -> TaskError:
    """The error of a run.

    Args:
        errors: of each task that failed, the root cause first.
        outputs: of all tasks.
    """
    lines = [f"{name}: {error}" for name, error in errors.items()]
    for name, text in outputs.items():
        if shown := _BELOW.sub("", text).strip():
            cut = "" if len(shown) <= _MOST else f", the last {_MOST} characters"
            lines.append(f"---- output of {name}{cut}\n{shown[-_MOST:]}")
    error = TaskError("\n".join(lines))
    error.failed = tuple(errors)
    return error


def words_for(status: int | None) -> str:
    """How a process ended."""
    if status is None or status >= 0:
        return f"status {status}"
    return signal.Signals(-status).name
