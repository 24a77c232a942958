"""Testing code that runs on strategies: logical CPUs, and the conformance kit for a strategy.

    from tfdist_ext.testing import StrategyConformance, logical_cpus

    logical_cpus(4)

    class TestMyStrategy(StrategyConformance):
        def strategy(self):
            return MyStrategy(devices=3)

pytest runs the checks. Names are looked up when they are first used; pytest itself is needed where
a known fault is named, and TensorFlow for all but writing a new strategy's files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.testing.conformance import StrategyConformance
    from tfdist_ext.testing.devices import logical_cpus

_HOME = {
    "StrategyConformance": "tfdist_ext.testing.conformance",
    "logical_cpus": "tfdist_ext.testing.devices",
}

__all__ = ["StrategyConformance", "logical_cpus"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
