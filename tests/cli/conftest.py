"""Fixtures of the tests of the commands."""

from launcher_fixtures import mark, tfdist

__all__ = ["mark", "tfdist"]
