"""Tools for tests of distributed code, with or without pytest (docs/testing.md).

- Logical CPUs and strategies: `logical_cpus`, `strategy_matrix`.
- Processes: `run_tasks(fn, {"worker": 2})`.
- Assertions: `assert_same_on_all_replicas`, `assert_trains_like_one_device`.
- Tests of your own strategy: `StrategyConformance`.

The submodules are imported on first use, because pytest imports this module in every session.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.errors import TaskError as TaskError
    from tfdist_ext.testing.conformance import StrategyConformance as StrategyConformance
    from tfdist_ext.testing.conformance import (
        assert_same_on_all_replicas as assert_same_on_all_replicas,
    )
    from tfdist_ext.testing.conformance import (
        assert_trains_like_one_device as assert_trains_like_one_device,
    )
    from tfdist_ext.testing.matrix import logical_cpus as logical_cpus
    from tfdist_ext.testing.matrix import strategy_matrix as strategy_matrix
    from tfdist_ext.testing.tasks import run_tasks as run_tasks

_HOME = {
    "StrategyConformance": "testing.conformance",
    "TaskError": "errors",
    "assert_same_on_all_replicas": "testing.conformance",
    "assert_trains_like_one_device": "testing.conformance",
    "logical_cpus": "testing.matrix",
    "run_tasks": "testing.tasks",
    "strategy_matrix": "testing.matrix",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"tfdist_ext.{_HOME[name]}"), name)
    globals()[name] = value
    return value
