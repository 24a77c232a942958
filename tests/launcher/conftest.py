"""Fixtures of the tests of the launcher."""

from launcher_fixtures import mark, run_tasks, tfdist

__all__ = ["mark", "run_tasks", "tfdist"]
