"""Arguments of fit, evaluate and predict that are numbers, checked before anything starts."""

from __future__ import annotations

import numbers
from typing import Any

from tfdist_ext.errors import TrainingError

__all__ = ["check_counts"]


def check_counts(**counts: Any) -> None:
    """Raise TrainingError for one that is no whole number, or is too small; None is none given."""
    for name, value in counts.items():
        least = 1 if name.endswith("batch_size") else 0  # 0 steps are all, as in Keras
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise TrainingError(f"{name} must be a whole number from {least}, got {value!r}.")
