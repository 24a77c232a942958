"""The contract of a strategy, as tests: subclass StrategyConformance, return a strategy.

    class TestMyStrategy(StrategyConformance):
        def strategy(self):
            return MyStrategy(devices=3)

Each check is a method that pytest collects; it can also be called directly. It raises
AssertionError with what it checked, the right value and the value it got. A module of checks
belongs to each part of the interface of a strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import nearest
from tfdist_ext.testing.conformance.dataset_checks import DatasetChecks
from tfdist_ext.testing.conformance.replica_checks import ReplicaChecks
from tfdist_ext.testing.conformance.training_checks import TrainingChecks
from tfdist_ext.testing.conformance.variable_checks import VariableChecks

__all__ = ["StrategyConformance", "check_names"]


class StrategyConformance(TrainingChecks, DatasetChecks, VariableChecks, ReplicaChecks):
    """The contract of a synchronous strategy on the devices of one machine.

    A subclass defines `strategy()`, and may leave checks out (`test_gather = None`) and set:

    Attributes:
        known_faults: name of a check -> why it fails. The check is then expected to fail; where it
            passes, the reason is out of date, and the test fails.
        tolerance: the largest difference of trained numbers from those of one device; 1e-6 by
            default.

    Raises:
        StrategyError: when the class is defined: `known_faults` is not a dict, or has a name that
            is not a check.
    """

    known_faults: Mapping[str, str] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not isinstance(cls.known_faults, Mapping):
            raise StrategyError(
                f"{cls.__name__}.known_faults must be a dict of checks and reasons, got"
                f' {cls.known_faults!r}: write {{"test_saved_model": "why it fails"}}.'
            )
        checks = check_names(cls)
        for name, reason in cls.known_faults.items():
            if name not in checks:
                raise StrategyError(
                    f"{cls.__name__}.known_faults must name checks, got {name!r}."
                    f" {nearest(name, checks)}"
                )
            setattr(cls, name, _expected_to_fail(getattr(cls, name), reason))


def check_names(cls: type) -> list[str]:
    """The methods that pytest collects, in the order in which they are defined."""
    defined = [name for base in reversed(cls.__mro__) for name in vars(base)]
    tests = [name for name in dict.fromkeys(defined) if name.startswith("test_")]
    return [name for name in tests if getattr(cls, name) is not None]


def _expected_to_fail(check: Any, reason: str) -> Any:
    # Here, so that the checks can be run without pytest where no fault is known.
    import pytest

    @functools.wraps(check)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return check(*args, **kwargs)

    return pytest.mark.xfail(strict=True, reason=reason)(marked)
