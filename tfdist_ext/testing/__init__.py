"""Testing code that runs on strategies and clusters, with pytest or without.

- Logical CPUs, and the matrix of strategies: `logical_cpus`, `strategy_matrix`.
- Real processes: `run_tasks(fn, {"worker": 2})`.
- What tests ask: `assert_same_on_all_replicas`, `assert_trains_like_one_device`.
- A strategy of one's own: `StrategyConformance`.

The pytest plugin that comes with the package has markers and fixtures of the first two
(docs/testing.md). Names are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.testing.asserting import (
        assert_same_on_all_replicas,
        assert_trains_like_one_device,
    )
    from tfdist_ext.testing.conformance import StrategyConformance
    from tfdist_ext.testing.devices import logical_cpus
    from tfdist_ext.testing.matrix import strategy_matrix
    from tfdist_ext.testing.tasks import TaskError, run_tasks

_HOME = {
    "StrategyConformance": "tfdist_ext.testing.conformance",
    "TaskError": "tfdist_ext.testing.tasks",
    "assert_same_on_all_replicas": "tfdist_ext.testing.asserting",
    "assert_trains_like_one_device": "tfdist_ext.testing.asserting",
    "logical_cpus": "tfdist_ext.testing.devices",
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
