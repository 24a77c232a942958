"""What a step logs: results of metrics, and what an overridden step returns.

A step returns values such as `{"acc": self.accuracy.result()}`. While a replica runs its step, a
metric has seen only the rows of that replica. So a value that is the `result()` of a metric is
computed again at the end of the execution, from the states combined over all replicas
(`OwnOutputs`). Any other number is the mean over the replicas, weighted by their rows. A warning
names a number that is computed from a metric and is not its `result()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.rows import Structure
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.steps.replaced import redirect_methods
from tfdist_ext.training.steps.rows import follows_from
from tfdist_ext.user_frames import warn

__all__ = [
    "Logs",
    "OwnOutputs",
    "StepScope",
    "metric_variables",
    "metrics_of",
    "observed_metrics",
]


# The value of each metric by name. An output that is not a single number is an array.
Logs: TypeAlias = dict[str, float | np.ndarray]


class _Result(NamedTuple):
    """One call of a metric's `result()`.

    Attributes:
        values: what it returned, flat.
        state: the values of the metric's variables at that time.
    """

    metric: keras.metrics.Metric
    values: list[Any]
    state: list[Any]


class StepScope(keras.StatelessScope):
    """The scope of a replica's or a worker's step."""

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self._results: list[_Result] = []  # of this step

    def rows(self, variable: keras.Variable, ids: tf.Tensor) -> tf.Tensor | None:
        """Rows of a table, moved without its other rows; None if that is not possible."""
        raise NotImplementedError

    def record(self, metric: keras.metrics.Metric, result: Structure) -> None:
        """Record the result of a metric, with the state from which it is computed."""
        self._results.append(_Result(metric, keras.tree.flatten(result), self._state_of(metric)))

    def final_results(self) -> dict[int, tuple[keras.metrics.Metric, int]]:
        """By id, the values that are results of metrics in the state that the step leaves.

        Returns:
            The metric, and the index of the value in its flat result.
        """
        return {
            id(value): (metric, index)
            for metric, values, state in self._results
            if all(a is b for a, b in zip(state, self._state_of(metric), strict=True))
            for index, value in enumerate(values)
        }

    def _state_of(self, metric: keras.metrics.Metric) -> list[Any]:
        return [self.get_current_value(variable) for variable in metric.variables]


@contextlib.contextmanager
def observed_metrics(metrics: Iterable[keras.metrics.Metric]) -> Iterator[None]:
    """Scope in which a StepScope records the calls of metrics' `result`."""
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(redirect_methods(metric, result=_recording(metric)))
        yield


def _recording(metric: keras.metrics.Metric) -> Callable[..., Structure]:
    original = metric.result

    def result(*args: Any, **kwargs: Any) -> Structure:
        value, scope = original(*args, **kwargs), kp.stateless_scope()
        if isinstance(scope, StepScope):
            scope.record(metric, value)
        return value

    return result


class OwnOutputs:
    """The logs of "train" or "test" steps of a model, and what an overridden step returns.

    Attributes:
        exist: whether steps return more than metrics, as Keras's own do not.
    """

    def __init__(self, model: keras.Model, kind: str):
        self.exist = any(
            getattr(type(model), name) is not getattr(keras.Model, name)
            for name in (f"{kind}_step", "compute_metrics")
        )
        # Name of a log -> the metric whose result it is, and the index in the flat result.
        self._of_metrics: dict[str, tuple[keras.metrics.Metric, int]] = {}
        self._model = model
        self._kind = kind
        self._warned_of: set[str] = set()  # names of logs

    def others(
        self, returned: Structure, scope: StepScope, before: Sequence[tf.Tensor], *, warns: bool
    ) -> dict[str, tf.Tensor]:
        """What the step returned, by name, other than metrics' results.

        To be called in the scope of the step: a metric's result may be a variable.

        Args:
            before: the states of the metrics before the step.
            warns: a number that is computed from a metric gets a warning, in a compiled step.

        Raises:
            TrainingError: an overridden step returned something else than a dict.
        """
        if not self.exist:
            return {}
        if not isinstance(returned, dict):
            raise TrainingError(
                f"{type(self._model).__name__}'s own step must return a dict of names and values,"
                f" got {returned!r}."
            )
        logs, known = _flat(returned), scope.final_results()
        self._of_metrics = {n: known[id(value)] for n, value in logs.items() if id(value) in known}
        others = {
            name: tf.convert_to_tensor(value)
            for name, value in logs.items()
            if name not in self._of_metrics
        }
        for name, value in others.items():
            dtype = value.dtype
            if warns and not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
                raise TrainingError(
                    f"{type(self._model).__name__}'s own step returns {dtype.name} values as"
                    f" {name!r}. Several replicas can only sum up numbers: return a number, or the"
                    " result() of a metric."
                )
        if warns and not tf.executing_eagerly():
            self._warn_of([n for n, value in others.items() if follows_from(value, before)])
        return others

    def _warn_of(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._warned_of]
        self._warned_of.update(new)
        if new:
            warn(
                f"{type(self._model).__name__}.{self._kind}_step returns"
                f" {', '.join(map(repr, new))}, computed from a metric. Only a metric's result() is"
                " logged over all examples; any other number is the mean over the replicas of what"
                " each computed from its own rows. Return the result() of a metric that computes"
                " this value from its own state."
            )

    def results(self, outputs: dict[str, tf.Tensor], updated: set[int]) -> dict[str, tf.Tensor]:
        """Logs, in a scope that holds the metrics' states of the whole epoch.

        Args:
            outputs: the other values that an overridden step returned, over all replicas; empty
                without one. An output has the value of the metric of its name, if the step updates
                that metric.
            updated: ids of the metric variables that the step writes. A step of its own may return
                a "loss" and leave the model's tracker of that name at zero.
        """
        found = _flat(self._model.get_metrics_result())
        if self.exist:
            live = _names_of_updated(self._model, updated)
            known = {name: found[name] for name in outputs if name in live and name in found}
            results = {
                name: keras.tree.flatten(metric.result())[index]
                for name, (metric, index) in self._of_metrics.items()
            }
            found = {**outputs, **known, **results}
        return {name: tf.convert_to_tensor(value) for name, value in found.items()}


def _names_of_updated(model: keras.Model, updated: set[int]) -> set[str]:
    """Names of the values of those metrics that have one of these variables, by id."""
    names = set()
    for metric in model.metrics:
        if any(id(variable) in updated for variable in metric.variables):
            value = metric.result()
            names |= set(value) if isinstance(value, dict) else {metric.name}
    return names


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The model's metrics, including those that its own `metrics` property leaves out."""
    found = list(model.metrics)
    for layer in kp.flat_layers(model):
        kind = keras.Model if isinstance(layer, keras.Model) else keras.Layer
        found += kind.metrics.fget(layer)
    return list({id(metric): metric for metric in found}.values())


def metric_variables(metrics: Iterable[keras.metrics.Metric]) -> list[keras.Variable]:
    """The variables of metrics, each once."""
    variables = [variable for metric in metrics for variable in metric.variables]
    return list({id(variable): variable for variable in variables}.values())


def _flat(outputs: dict[str, Any]) -> dict[str, Any]:
    """The values of nested dicts in one dict: a metric may have a dict of results."""
    found: dict[str, Any] = {}
    for name, value in outputs.items():
        found.update(_flat(value) if isinstance(value, dict) else {name: value})
    return found
