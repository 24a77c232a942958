"""The result of `tfd.verify`: how far two trainings are apart, and a table that says so.

This module only compares arrays. It knows neither models nor strategies.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tfdist_ext.errors import address_of

Results = Mapping[str, np.ndarray]  # "weight dense/kernel", "log loss": kind and name

TOLERANCE = 1e-5  # default for the largest relative difference that counts as equal
SMALLEST_SCALE = 1e-3  # differences of numbers that are all smaller are relative to this
# A change of last bits is one rounding. Another order of additions rounds in each addition.
ROUNDING_FACTOR = 100.0
_KINDS = ("weight", "variable", "optimizer", "log", "prediction", "data")  # first words of names
_ROW = "{:10}  {:10}  {:8}  {:9}  {}"
# Addresses of pages stay whole.
_wrapped = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False).fill


@dataclass(frozen=True)
class Verification:
    """The result of `tfd.verify`. Print it to read the differences as a table.

    Attributes:
        title: a description of both trainings.
        differences: maps each variable, log and prediction to its largest difference, relative to
            its largest number. The difference is `inf` if only one training has NaN, or if the
            shapes differ.
        rounding: the differences between two trainings in plain Keras. In the second training, the
            last bits of weights and inputs are changed. Empty if no difference exceeds `tolerance`.
        tolerance: the largest relative difference that counts as equal.
        error: the message of the error that ended the training on the strategy, or "".
    """

    title: str
    differences: Mapping[str, float]
    rounding: Mapping[str, float]
    tolerance: float
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether rounding explains all differences."""
        return not self.error and not self.unequal

    @property
    def unequal(self) -> list[str]:
        """The names of values that differ by more than rounding, the largest difference first."""
        found = [name for name, value in self.differences.items() if value > self.allowed(name)]
        return sorted(found, key=lambda name: -self.differences[name])

    def allowed(self, name: str) -> float:
        """Returns the largest difference of a variable or log that counts as rounding."""
        return max(self.tolerance, ROUNDING_FACTOR * self.rounding.get(name, 0.0))

    def __str__(self) -> str:
        verdict = "EQUAL: the model trains as it does on one device."
        if names := self.unequal:
            count = f"{len(names)} of {len(self.differences)}"
            verdict = f"NOT EQUAL: {count} compared values differ, the most in {names[0]}."
        if self.error:
            verdict = f"NOT EQUAL: {self.error}"
        notes = [verdict]
        if self.unequal:
            page = address_of("docs/troubleshooting.md#losses-differ-from-one-device")
            notes.append(f"Causes: {page}")
        table = [self._table()] if self.differences else []
        return "\n\n".join([_wrapped(self.title), *table, *map(_wrapped, notes)])

    def _table(self) -> str:
        rows = [_ROW.format("kind", "difference", "rounding", "", "largest in")]
        for kind in _KINDS:
            names = [name for name in self.differences if name.split()[0] == kind]
            if names:
                unequal = [name for name in self.unequal if name in names]
                worst = max(unequal or names, key=self.differences.__getitem__)
                explained = "rounding" if self.differences[worst] > self.tolerance else "equal"
                verdict = "DIFFERENT" if unequal else explained
                numbers = self.differences[worst], self.rounding.get(worst)
                shown = ("-" if number is None else f"{number:.1e}" for number in numbers)
                rows.append(_ROW.format(kind, *shown, verdict, worst.removeprefix(f"{kind} ")))
        return "\n".join(rows)


def relative_differences(found: Results, wanted: Results) -> dict[str, float]:
    """Returns name -> largest difference, relative to the largest number in `wanted`."""
    # Only names of `wanted`: Keras does not make the slots of an optimizer without use.
    differences = dict.fromkeys(wanted, np.inf)
    for name in wanted.keys() & found.keys():
        ours, right = (np.asarray(each[name], "float64") for each in (found, wanted))
        if ours.shape == right.shape:
            scale = max(SMALLEST_SCALE, float(np.abs(np.nan_to_num(right)).max(initial=0.0)))
            apart = np.where(np.isnan(ours) & np.isnan(right), 0.0, np.abs(ours - right))
            largest = np.nan_to_num(apart, nan=np.inf).max(initial=0.0)
            differences[name] = float(largest) / scale
    return differences
