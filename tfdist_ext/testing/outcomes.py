"""What became of each check of a conformance test, without pytest; and a table of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest import SkipTest

from tfdist_ext.testing.conformance import StrategyConformance, names_of_checks

__all__ = ["Outcome", "markdown", "outcomes"]

PASSED, KNOWN, FAILED, SKIPPED = "passed", "known fault", "**failed**", "does not apply"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one check.

    Attributes:
        verdict: "passed", "known fault", "**failed**" or "does not apply".
        reason: of a known fault, why; of a failure, its message; else "".
    """

    check: str
    verdict: str
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether the check fails unexpectedly, or passes although a fault is known."""
        return self.verdict == FAILED


def outcomes(
    tests: type[StrategyConformance], checks: Iterable[str] | None = None
) -> Iterator[Outcome]:
    """Run the checks of a conformance test in this process.

    Args:
        checks: names of them; all by default.
    """
    subject = tests()
    for check in names_of_checks(tests) if checks is None else checks:
        reason = tests.known_faults.get(check)
        try:
            getattr(subject, check)()
        except SkipTest as skipped:
            yield Outcome(check=check, verdict=SKIPPED, reason=str(skipped))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            verdict = FAILED if reason is None else KNOWN
            yield Outcome(check=check, verdict=verdict, reason=reason or message)
        else:
            if reason is None:
                yield Outcome(check=check, verdict=PASSED)
            else:
                unexpected = f"passes, though known_faults says: {reason}"
                yield Outcome(check=check, verdict=FAILED, reason=unexpected)


def markdown(found: Mapping[str, Sequence[Outcome]]) -> str:
    """A table of checks by strategies, and below it the faults that are known, and why.

    Args:
        found: title of a strategy -> its outcomes.
    """
    verdicts = {title: {o.check: o.verdict for o in column} for title, column in found.items()}
    checks = dict.fromkeys(outcome.check for column in found.values() for outcome in column)
    lines = ["| check | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for check in checks:
        cells = [column.get(check, "") for column in verdicts.values()]
        title = check.removeprefix("test_").replace("_", " ")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    known: dict[str, list[str]] = {}
    for title, column in found.items():
        for outcome in column:
            if outcome.verdict == KNOWN:
                name = outcome.check.removeprefix("test_").replace("_", " ")
                known.setdefault(outcome.reason, []).append(f"{title}: {name}")
    lines += ["", *(f"- {'; '.join(where)}: {reason}" for reason, where in known.items())]
    return "\n".join(lines).rstrip() + "\n"
