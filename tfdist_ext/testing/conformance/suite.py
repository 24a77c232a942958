"""StrategyConformance: subclass it, return a strategy, run pytest.

    class TestMyStrategy(StrategyConformance):
        def strategy(self):
            return MyStrategy(devices=3)

Each check is a method that pytest collects; it can also be called directly. It raises
AssertionError with what it checked, the right value and the value it got.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

from tfdist_ext.errors import StrategyError
from tfdist_ext.testing.conformance.dataset_checks import DatasetChecks
from tfdist_ext.testing.conformance.replica_checks import ReplicaChecks
from tfdist_ext.testing.conformance.tensorflow_checks import TensorFlowChecks
from tfdist_ext.testing.conformance.training_checks import TrainingChecks
from tfdist_ext.testing.conformance.variable_checks import SavingChecks

__all__ = ["CheckResult", "StrategyConformance", "check_names", "markdown_table", "run_checks"]

PASSED, KNOWN, FAILED, SKIPPED = "passed", "known fault", "**failed**", "does not apply"


class StrategyConformance(
    TensorFlowChecks, TrainingChecks, DatasetChecks, SavingChecks, ReplicaChecks
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
        checks = check_names(cls)
        if not isinstance(cls.known_faults, Mapping):
            raise StrategyError(
                f"{cls.__name__}.known_faults must be a dict of checks and reasons, got"
                f' {cls.known_faults!r}: write {{"test_saved_model": "why it fails"}}.'
            )
        for name in _unknown_omissions(cls):
            near = difflib.get_close_matches(name, checks, 1, cutoff=0.8)
            raise StrategyError(
                f"{cls.__name__}: there is no check {name}"
                + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(checks)}.")
            )
        for name in cls.known_faults:
            if name not in checks:
                raise StrategyError(
                    f"{cls.__name__}.known_faults must name checks, got {name!r}; there are"
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


def check_names(cls: type) -> list[str]:
    """The methods that pytest collects, in the order in which they are defined."""
    defined = [name for base in reversed(cls.__mro__) for name in vars(base)]
    tests = [name for name in dict.fromkeys(defined) if name.startswith("test_")]
    return [name for name in tests if getattr(cls, name) is not None]


def _unknown_omissions(cls: type) -> list[str]:
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


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check.

    Attributes:
        verdict: "passed", "known fault", "**failed**" or "does not apply".
        reason: of a known fault, why; of a failure, its message; else "".
    """

    check: str
    verdict: str
    reason: str

    @property
    def failed(self) -> bool:
        """Whether the check fails unexpectedly, or passes although a fault is known."""
        return self.verdict == FAILED


def run_checks(
    tests: type[StrategyConformance], checks: Iterable[str] | None = None
) -> Iterator[CheckResult]:
    """Run the checks of a conformance test in this process.

    Args:
        checks: names of them; all by default.
    """
    subject = tests()
    for check in check_names(tests) if checks is None else checks:
        known = tests.known_faults.get(check)
        try:
            getattr(subject, check)()
        except SkipTest as skipped:
            verdict, reason = SKIPPED, str(skipped)
        except Exception as error:
            verdict = FAILED if known is None else KNOWN
            reason = known or f"{type(error).__name__}: {error}"
        else:
            verdict = PASSED if known is None else FAILED
            reason = "" if known is None else f"passes, though known_faults says: {known}"
        yield CheckResult(check=check, verdict=verdict, reason=reason)


def markdown_table(found: Mapping[str, Sequence[CheckResult]]) -> str:
    """A table of checks by strategies, and below it the faults that are known, and why.

    Args:
        found: title of a strategy -> its run_checks.
    """
    verdicts = {title: {o.check: o.verdict for o in column} for title, column in found.items()}
    checks = dict.fromkeys(outcome.check for column in found.values() for outcome in column)
    lines = ["| check | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for check in checks:
        cells = [column.get(check, "") for column in verdicts.values()]
        lines.append(f"| {_title(check)} | " + " | ".join(cells) + " |")
    known: dict[str, list[str]] = {}
    for title, column in found.items():
        for outcome in column:
            if outcome.verdict == KNOWN:
                known.setdefault(outcome.reason, []).append(f"{title}: {_title(outcome.check)}")
    lines += ["", *(f"- {'; '.join(where)}: {reason}" for reason, where in known.items())]
    return "\n".join(lines).rstrip() + "\n"


def _title(check: str) -> str:
    return check.removeprefix("test_").replace("_", " ")
