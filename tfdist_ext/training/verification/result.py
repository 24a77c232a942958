"""The result of `tfd.verify`: how far two trainings are apart, and a table that says so.

This module only compares arrays. It knows neither models nor strategies.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Cause", "Results", "Verification", "relative_differences"]

Results = Mapping[str, np.ndarray]  # "weight dense/kernel", "log loss": kind and name

SMALLEST_SCALE = 1e-3  # differences of numbers that are all smaller are relative to this
ROUNDING_FACTOR = 10.0
# The first word of a name -> what the table calls all names of this kind.
_KINDS = {
    "weight": "weights",
    "variable": "other variables",
    "optimizer": "optimizer state",
    "log": "logs",
    "prediction": "predictions",
    "data": "data",
}
_SHOWN = 3  # names that differ
_WIDTH = 100  # columns of the text


@dataclass(frozen=True)
class Cause:
    """A probable cause of a difference.

    Attributes:
        what: what the model or the data does.
        rule: the rule of docs/exactness.md that does not cover this; 0 if none is concerned.
        remedy: what to change.
    """

    what: str
    rule: int
    remedy: str

    def __str__(self) -> str:
        rule = f" (Rule {self.rule} of docs/exactness.md.)" if self.rule else ""
        return f"{self.what}{rule} {self.remedy}"


@dataclass(frozen=True)
class Verification:
    """Whether a model trains on a strategy as it does in plain Keras on one device.

    `str` gives a table to read.

    Attributes:
        title: what was compared.
        differences: name of a variable, log or prediction -> its largest difference, relative to
            the largest number in it. `inf` for NaN on one side, or for other shapes.
        rounding: the same for plain Keras compared with itself, after the last bit of the inputs
            was changed.
        tolerance: the largest relative difference that counts as equal.
        causes: probable causes of differences, the most probable one first.
        error: the message of the error that ended the training on the strategy; "" without one.
        warnings: what `fit` warned of on the strategy.
    """

    title: str
    differences: Mapping[str, float]
    rounding: Mapping[str, float]
    tolerance: float
    causes: Sequence[Cause] = ()
    error: str = ""
    warnings: Sequence[str] = ()

    @property
    def equal(self) -> bool:
        """Whether no difference is larger than rounding explains."""
        return not self.error and not self.unequal

    @property
    def unequal(self) -> list[str]:
        """The names that differ by more than rounding explains, the largest difference first."""
        found = [name for name, value in self.differences.items() if value > self.allowed(name)]
        return sorted(found, key=lambda name: -self.differences[name])

    def allowed(self, name: str) -> float:
        """The largest difference of a variable or log that counts as rounding."""
        return max(self.tolerance, ROUNDING_FACTOR * self.rounding.get(name, 0.0))

    def __str__(self) -> str:
        verdict = f"NOT EQUAL: {self.error or self._names()}"
        if self.equal:
            verdict = "EQUAL: the model trains as it does on one device."
        causes = "\n".join(["Probable cause:", *(_wrapped(str(cause)) for cause in self.causes)])
        parts = [_wrapped(self.title)]
        parts += [self._table()] if self.differences else []
        parts.append(_wrapped(verdict))
        parts += [causes] if self.causes else []
        parts += [_wrapped(f"fit warned: {text}") for text in self.warnings]
        return "\n\n".join(parts)

    def _table(self) -> str:
        rows = [_HEADER, *filter(None, map(self._row, _KINDS))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _row(self, kind: str) -> tuple[str, ...] | None:
        of_kind = {n: d for n, d in self.differences.items() if n.split()[0] == kind}
        if not of_kind:
            return None
        worst = max(of_kind, key=lambda name: of_kind[name] / self.allowed(name))
        verdict = "equal" if of_kind[worst] <= self.allowed(worst) else "DIFFERENT"
        numbers = f"{of_kind[worst]:.1e}", f"{self.rounding.get(worst, 0.0):.1e}"
        return _KINDS[kind], *numbers, verdict, worst.removeprefix(f"{kind} ")

    def _names(self) -> str:
        names = self.unequal
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN])}{more}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH)


_HEADER = ("compared", "difference", "rounding", "", "largest in")


def relative_differences(found: Results, wanted: Results) -> dict[str, float]:
    """Returns name -> largest difference, relative to the largest number in `wanted`."""
    differences = dict.fromkeys([*wanted, *found], np.inf)  # if only one side has the name
    for name in wanted.keys() & found.keys():
        ours, right = (np.asarray(each[name], "float64") for each in (found, wanted))
        if ours.shape == right.shape:
            scale = max(SMALLEST_SCALE, float(np.abs(np.nan_to_num(right)).max(initial=0.0)))
            apart = np.where(np.isnan(ours) & np.isnan(right), 0.0, np.abs(ours - right))
            largest = np.nan_to_num(apart, nan=np.inf).max(initial=0.0)
            differences[name] = float(largest) / scale
    return differences
