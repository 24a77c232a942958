"""What the compiled steps of a model are, whoever runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.training.derived_logs import DerivedLogs, MetricVersions
from tfdist_ext.training.logs import has_own_outputs, mixed_warning
from tfdist_ext.training.optimizers import check_built
from tfdist_ext.training.protocols import StepFunction
from tfdist_ext.training.replica_scope import metrics_and_others

__all__ = ["ProgramBase"]


class ProgramBase:
    """One step of a model, its variables, and how its logs come out of it.

    Args:
        kind: "train" or "test".
        step: the model's step, to be called with a batch in its scope.
    """

    def __init__(self, model: keras.Model, kind: str, step: StepFunction):
        check_built(model)
        self._model = model
        self._kind = kind
        self._step = step
        self._own_outputs = has_own_outputs(model, kind)
        self._metrics, self._others = metrics_and_others(model)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._derived: DerivedLogs | None = None  # of steps in a graph
        self._mixed: set[str] = set()  # names of logs that were warned of

    def _derive_logs(
        self,
        logs: dict[str, tf.Tensor],
        versions: MetricVersions,
        final: Mapping[str, int],
        has_mean: Callable[[Any], bool],
        *,
        warns: bool = True,
    ) -> DerivedLogs:
        """How a traced step's logs come out of the metrics' states; see `DerivedLogs`."""
        self._derived = DerivedLogs(logs, versions, dict(final), has_mean)
        new = [name for name in self._derived.mixed if name not in self._mixed]
        self._mixed.update(new)
        if new and warns:
            warnings.warn(mixed_warning(self._model, self._kind, new), stacklevel=3)
        return self._derived
