"""The errors that this package raises on purpose.

    TfDistError
    ├── ClusterConfigError (also ValueError)   the description of a cluster is wrong
    ├── PlacementError     (also ValueError)   a placement of variables is impossible
    ├── StrategyError      (also ValueError)   a strategy does not exist or cannot run here
    ├── TrainingError      (also ValueError)   a model, data or call cannot be distributed
    │   └── PeerError                          another task left, died, or made another call
    ├── DataError          (also ValueError)   examples cannot be read, sharded or resumed
    └── LaunchError        (also RuntimeError) processes could not be planned or started
        └── TaskError                          a task that ran a function failed

A message says what is wrong, the value, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self


def address_of(section: str) -> str:
    """Returns the file of a page: a wheel holds docs/, and a checkout has it beside the package.

    Args:
        section: a page with or without a heading, such as "docs/data.md#custom-sources".
    """
    page, _, heading = section.partition("#")
    package = Path(__file__).parent
    folder = package if (package / "docs").is_dir() else package.parent
    return f"{folder / page}" + (f', section "{heading.replace("-", " ")}"' if heading else "")


class TfDistError(Exception):
    """Base class of all errors of this package.

    Attributes:
        help_page: the section of the documentation about the error. Tracebacks end with it.
    """

    help_page: ClassVar[str] = "docs/error_messages.md"

    # AutoGraph makes an error of a user's tf.function anew, with its type, only of such classes.
    __init__ = Exception.__init__

    def __new__(cls, *args: object) -> Self:
        error = super().__new__(cls, *args)
        error.add_note(f"Help: {address_of(cls.help_page)}")
        return error


class ClusterConfigError(TfDistError, ValueError):
    """The description of a cluster is invalid. The message names the key and the value."""

    help_page = "docs/error_messages.md#clusters-and-strategies"


class PlacementError(TfDistError, ValueError):
    """A rule, a budget, a variable or a plan is invalid, or variables do not fit."""

    help_page = "docs/error_messages.md#placement-and-launching"


class StrategyError(TfDistError, ValueError):
    """A strategy is unknown, cannot run on this machine, or does not take an option.

    Attributes:
        missing: the tasks that did not start in time; "" for other causes.
    """

    help_page = "docs/error_messages.md#clusters-and-strategies"
    missing: str = ""


class TrainingError(TfDistError, ValueError):
    """A model, a dataset or a call cannot be distributed."""


class PeerError(TrainingError):
    """A call failed because another task exited, died or made a different call.

    The processes can no longer train together. Start the job again.

    Attributes:
        task: the task that failed, such as "worker:1"; "" if there are several.
        permanent: whether a restart would fail in the same way, because the scripts of the tasks
            make different calls.
    """

    help_page = "docs/error_messages.md#failed-and-stalled-tasks"
    task: str = ""
    permanent: bool = False


class DataError(TfDistError, ValueError):
    """Data cannot be read, sharded or resumed. The message names the file or the field."""

    help_page = "docs/error_messages.md#data"


class LaunchError(TfDistError, RuntimeError):
    """The processes of a cluster cannot be planned or started."""

    help_page = "docs/error_messages.md#placement-and-launching"


class TaskError(LaunchError):
    """A task that ran a function raised an exception, crashed, or did not end in time.

    The message contains the traceback of the task.

    Attributes:
        failed: the names of the failed tasks, such as "worker:1". The root cause is first.
    """

    def __init__(self, message: str, failed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed
