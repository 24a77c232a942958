"""The cluster of a test, as one of its tasks sees it; it can end others, and start them again."""

from __future__ import annotations

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.testing.tasks.in_task import Supervisor

__all__ = ["Cluster"]


class Cluster:
    """Given to a test by the fixture `cluster`.

    Attributes:
        config: the `ClusterConfig` of this task.
        attempt: how often this task was started again, 0 at first.
    """

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        config = ClusterConfig.from_env()
        assert config is not None
        self.config = config
        self.attempt = supervisor.attempt

    @property
    def task(self) -> Task:
        """Type and index of this task."""
        assert self.config.task is not None
        return self.config.task

    def kill(self, type: str, index: int) -> None:
        """End a task at once, as a crash of its machine would; the test does not fail by that.

        Raises:
            LaunchError: there is no such task.
        """
        self._supervisor.ask("kill", f"{type}:{index}")

    def restart(self, type: str, index: int) -> None:
        """Start a task again, at its address: the test runs in it from the beginning.

        It is killed first if it has not ended.

        Raises:
            LaunchError: there is no such task.
        """
        self._supervisor.ask("restart", f"{type}:{index}")
