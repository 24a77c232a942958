"""The contract of a strategy, as tests: subclass StrategyConformance, return a strategy.

    class TestMyStrategy(StrategyConformance):
        def strategy(self):
            return MyStrategy(devices=3)

Each check is a method that pytest collects; it can also be called directly. It raises
AssertionError with what it checked, the right value and the value it got. A module of checks
belongs to each part of the interface of a strategy.
"""

from __future__ import annotations

from tfdist_ext.testing.conformance.replica_checks import ReplicaChecks
from tfdist_ext.testing.conformance.training_checks import TrainingChecks
from tfdist_ext.testing.conformance.variable_checks import VariableChecks

__all__ = ["StrategyConformance"]


class StrategyConformance(TrainingChecks, VariableChecks, ReplicaChecks):
    """The contract of a synchronous strategy on the devices of one machine.

    A subclass defines `strategy()`. It may leave checks out (`test_gather = None`), override a
    check with one that is marked `xfail`, and set:

    Attributes:
        tolerance: the largest difference of trained numbers from those of one device; 1e-6 by
            default.
    """
