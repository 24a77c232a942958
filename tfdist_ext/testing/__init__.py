"""Tests of distributed code, with pytest or without.

- Logical CPUs, and the matrix of strategies: `logical_cpus`, `strategy_matrix`.
- Real processes: `run_tasks(fn, {"worker": 2})`.
- Assertions: `assert_same_on_all_replicas`, `assert_trains_like_one_device`.
- The contract of your own strategy: `StrategyConformance`.

Here belongs what users' tests import, and the pytest plugin (docs/testing.md). Modules are imported
when one of their names is first used, because pytest imports this one in every session.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.errors import TaskError
    from tfdist_ext.testing.assertions import (
        assert_same_on_all_replicas,
        assert_trains_like_one_device,
    )
    from tfdist_ext.testing.conformance import StrategyConformance
    from tfdist_ext.testing.matrix import logical_cpus, strategy_matrix
    from tfdist_ext.testing.tasks import run_tasks

_HOME = {
    "StrategyConformance": "tfdist_ext.testing.conformance",
    "TaskError": "tfdist_ext.errors",
    "assert_same_on_all_replicas": "tfdist_ext.testing.assertions",
    "assert_trains_like_one_device": "tfdist_ext.testing.assertions",
    "logical_cpus": "tfdist_ext.testing.matrix",
    "run_tasks": "tfdist_ext.testing.tasks",
    "strategy_matrix": "tfdist_ext.testing.matrix",
}

__all__ = [
    "StrategyConformance",
    "TaskError",
    "assert_same_on_all_replicas",
    "assert_trains_like_one_device",
    "logical_cpus",
    "run_tasks",
    "strategy_matrix",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
