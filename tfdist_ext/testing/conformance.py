"""StrategyConformance: subclass it, return a strategy, run pytest.

    class TestMyStrategy(StrategyConformance):
        def strategy(self):
            return MyStrategy(devices=3)

Each check is a method that pytest collects, and that can be called directly, too. It raises
AssertionError with what was asked, what is right and what arrived.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from tfdist_ext.errors import StrategyError
from tfdist_ext.testing.contract_checks import ContractChecks
from tfdist_ext.testing.dataset_checks import DatasetChecks
from tfdist_ext.testing.replica_checks import ReplicaChecks
from tfdist_ext.testing.saving_checks import SavingChecks
from tfdist_ext.testing.training_checks import TrainingChecks

__all__ = ["StrategyConformance", "names_of_checks"]


class StrategyConformance(
    ContractChecks, TrainingChecks, DatasetChecks, SavingChecks, ReplicaChecks
):
    """The contract of a synchronous strategy on the devices of one machine.

    A subclass defines `strategy()`, and may leave checks out (`test_gather = None`) and set:

    Attributes:
        known_faults: name of a check -> why it fails. It is expected to fail then, and is a
            failure where it passes: the reason is out of date.
        tolerance: how far trained numbers may be from those of one device, 1e-6 by default.

    Raises:
        StrategyError: when the class is defined: `known_faults` is no dict, or it or a
            `test_... = None` names what is no check.
    """

    known_faults: Mapping[str, str] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        checks = names_of_checks(cls)
        if not isinstance(cls.known_faults, Mapping):
            raise StrategyError(
                f"{cls.__name__}.known_faults must be a dict of checks and reasons; it is"
                f' {cls.known_faults!r}. Write {{"test_saved_model": "why it fails"}}.'
            )
        for name in _left_out_for_nothing(cls):
            near = difflib.get_close_matches(name, checks, 1, cutoff=0.8)
            raise StrategyError(
                f"{cls.__name__}: there is no check {name}"
                + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(checks)}.")
            )
        for name in cls.known_faults:
            if name not in checks:
                raise StrategyError(
                    f"{cls.__name__}.known_faults names {name!r}, which is no check; there are"
                    f" {', '.join(checks)}."
                )
        for name in checks:
            check = getattr(cls, name)
            # The mark of a base class holds for what that one says of its faults.
            unmarked = getattr(check, "_unmarked", check)
            if name in cls.known_faults:
                setattr(cls, name, _expected_to_fail(unmarked, cls.known_faults[name]))
            elif unmarked is not check:
                setattr(cls, name, unmarked)


def names_of_checks(cls: type) -> list[str]:
    """The methods that pytest collects, in the order in which they are defined."""
    defined = [name for base in reversed(cls.__mro__) for name in vars(base)]
    tests = [name for name in dict.fromkeys(defined) if name.startswith("test_")]
    return [name for name in tests if getattr(cls, name) is not None]


def _left_out_for_nothing(cls: type) -> list[str]:
    """Names that are None in all classes that have them: what they leave out is not there."""
    has: dict[str, bool] = {}
    for base in cls.__mro__:
        for name, value in vars(base).items():
            has[name] = has.get(name, False) or value is not None
    return [name for name in has if name.startswith("test_") and not has[name]]


def _expected_to_fail(check: Any, reason: str) -> Any:
    # Here, so that the checks can be run without pytest where no fault is known.
    import pytest

    @functools.wraps(check)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return check(*args, **kwargs)

    marked._unmarked = check  # type: ignore[attr-defined]
    return pytest.mark.xfail(strict=True, reason=reason)(marked)
