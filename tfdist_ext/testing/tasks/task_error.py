"""The error for a run of `run_tasks`: the errors of the tasks that failed, the output of all."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist_ext.errors import TaskError

__all__ = ["task_error"]

_MAX_OUTPUT = 8000  # characters of each task
# Frames between the start of the process and the function that the task runs.
_OUTER_FRAMES = re.compile(
    r'^  File "(.*/(_pytest|pluggy|multiprocessing|tfdist_ext/testing)/.*|<string>)", line .*\n?',
    re.M,
)


def task_error(errors: Mapping[str, str], outputs: Mapping[str, str]) -> TaskError:
    """The error for a run.

    Args:
        errors: error of each task that failed, the root cause first.
        outputs: output of all tasks.
    """
    lines = [f"{name}: {error}" for name, error in errors.items()]
    for name, text in outputs.items():
        if shown := _OUTER_FRAMES.sub("", text).strip():
            cut = "" if len(shown) <= _MAX_OUTPUT else f", the last {_MAX_OUTPUT} characters"
            lines.append(f"---- output of {name}{cut}\n{shown[-_MAX_OUTPUT:]}")
    error = TaskError("\n".join(lines))
    error.failed = tuple(errors)
    return error
