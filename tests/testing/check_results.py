"""Runs the conformance kit without pytest, and makes the table of docs/custom_strategy.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfdist_ext.testing import StrategyConformance

PASSED, KNOWN, FAILED = "passed", "known fault", "**failed**"


class CheckResult(NamedTuple):
    """The verdict, one of the three above, and the reason of a fault or a failure."""

    check: str
    verdict: str
    reason: str

    @property
    def failed(self) -> bool:
        return self.verdict == FAILED


def check_names(tests: type[StrategyConformance]) -> list[str]:
    """The checks that pytest collects, in the order in which they are defined."""
    defined = [name for base in reversed(tests.__mro__) for name in vars(base)]
    checks = [name for name in dict.fromkeys(defined) if name.startswith("test_")]
    return [name for name in checks if getattr(tests, name) is not None]


def known_fault(tests: type[StrategyConformance], check: str) -> str | None:
    """The reason why a check is marked as one that fails; None without a mark."""
    marks = getattr(getattr(tests, check), "pytestmark", ())
    return next((mark.kwargs["reason"] for mark in marks if mark.name == "xfail"), None)


def run_checks(
    tests: type[StrategyConformance], checks: Iterable[str] | None = None
) -> Iterator[CheckResult]:
    """Run the checks of a conformance test in this process.

    Args:
        checks: names of them; all by default.
    """
    subject = tests()
    for check in check_names(tests) if checks is None else checks:
        known = known_fault(tests, check)
        try:
            getattr(subject, check)()
        except Exception as error:
            verdict = FAILED if known is None else KNOWN
            reason = known or f"{type(error).__name__}: {error}"
        else:
            verdict = PASSED if known is None else FAILED
            reason = "" if known is None else f"passes, though its mark says: {known}"
        yield CheckResult(check, verdict, reason)


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
