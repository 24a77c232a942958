"""Every error this package raises on purpose.

    TfDistError
    ├── ClusterConfigError (also ValueError)   a cluster description that cannot be right
    ├── PlacementError     (also ValueError)   a placement of variables that cannot be
    ├── StrategyError      (also ValueError)   a strategy that does not exist or cannot run here
    ├── TrainingError      (also ValueError)   a model, data or call that cannot be distributed
    │   └── PeerError                          another task left, died, or made another call
    ├── DataError          (also ValueError)   examples that cannot be read, shared out or resumed
    └── LaunchError        (also RuntimeError) processes that could not be planned or started
        └── TaskError                          a task that ran a function failed

A message says what must hold, what it got, and what to do, as "index must be below 2, got 3; ...".
"""

from __future__ import annotations

__all__ = [
    "ClusterConfigError",
    "DataError",
    "LaunchError",
    "PeerError",
    "PlacementError",
    "StrategyError",
    "TaskError",
    "TfDistError",
    "TrainingError",
]


class TfDistError(Exception):
    """Base of every error this package raises on purpose."""


class ClusterConfigError(TfDistError, ValueError):
    """A cluster description is wrong: names the key, what was got, and what to do."""


class PlacementError(TfDistError, ValueError):
    """A rule, a budget, a variable or a plan that cannot be right, or does not fit.

    Attributes:
        smallest_budget: where variables did not fit: the smallest budget of each task, in bytes,
            with which this number of tasks would do; None where no budget helps.
        smallest_tasks: the smallest number of tasks with which this budget would do; None where
            no number of tasks helps.
    """

    smallest_budget: int | None = None
    smallest_tasks: int | None = None


class StrategyError(TfDistError, ValueError):
    """A strategy is unknown, cannot run here, or was given an option it does not take.

    Attributes:
        missing: the tasks that did not come in time, because of which it failed; "" for none.
    """

    missing: str = ""


class TrainingError(TfDistError, ValueError):
    """A model, a data set or a call that cannot be distributed as it is."""


class PeerError(TrainingError):
    """A call failed here because of another task: it left, died, or made another call.

    After it the workers cannot train together any more in these processes: start the job again.

    Attributes:
        task: the task because of which it failed, as "worker:1"; "" where it is not one alone.
        permanent: whether the next start would fail in the same way, as the scripts of the tasks
            make different calls.
    """

    task: str = ""
    permanent: bool = False


class DataError(TfDistError, ValueError):
    """Examples cannot be read, sharded or resumed from: names the file, field or number."""


class LaunchError(TfDistError, RuntimeError):
    """The processes of a cluster could not be planned or started."""


class TaskError(LaunchError):
    """A task that ran a function failed, crashed, or did not end in time.

    The message has the task's own traceback.

    Attributes:
        failed: names of the tasks, the root cause first, as "worker:1".
    """

    def __init__(self, message: str, failed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed
