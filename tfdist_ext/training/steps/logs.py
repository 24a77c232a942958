"""What a step logs: results of metrics, and what an overridden step returns.

A step returns values such as `{"acc": self.accuracy.result()}`. While a replica runs its step, a
metric has seen only the rows of that replica. So a value that is the `result()` of a metric is
computed again at the end of the execution, from the states combined over all replicas
(`OwnOutputs`). Any other number is the mean over the replicas, weighted by their rows. A warning
names a number that is computed from a metric and is not its `result()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.steps.replaced import redirect_methods
from tfdist_ext.training.steps.rows import follows_from
from tfdist_ext.user_frames import warn

__all__ = [
    "OwnOutputs",
    "StepScope",
    "has_own_outputs",
    "metric_variables",
    "metrics_of",
    "observed_metrics",
    "results",
    "results_of",
]


# Name of a log -> the metric whose result it is, and the index of the value in the flat result.
MetricLogs: TypeAlias = dict[str, tuple[keras.metrics.Metric, int]]


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
    """The scope of a replica's or a worker's step.

    Attributes:
        results: the calls of metrics' `result()` in this step.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.results: list[_Result] = []

    def rows(self, variable: keras.Variable, ids: tf.Tensor) -> tf.Tensor | None:
        """Rows of a table, moved without its other rows; None if that is not possible."""
        raise NotImplementedError

    def state_of(self, metric: keras.metrics.Metric) -> list[Any]:
        """The current values of a metric's variables."""
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
            values = keras.tree.flatten(value)
            scope.results.append(_Result(metric, values, scope.state_of(metric)))
        return value

    return result


class OwnOutputs:
    """What an overridden "train" or "test" step of a model returns.

    Attributes:
        exist: whether the step is overridden.
        of_metrics: the logs that are a metric's result, after a step.
    """

    def __init__(self, model: keras.Model, kind: str):
        self.exist = has_own_outputs(model, kind)
        self.of_metrics: MetricLogs = {}
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
        """
        if not self.exist:
            return {}
        logs = _own_outputs(self._model, returned)
        self.of_metrics = known = _metric_logs(logs, scope)
        others = {n: tf.convert_to_tensor(value) for n, value in logs.items() if n not in known}
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


def _metric_logs(logs: Mapping[str, Any], scope: StepScope) -> MetricLogs:
    """The logs that are the `result()` of a metric in the state that the step leaves."""
    found = {
        id(value): (result.metric, index)
        for result in scope.results
        if all(a is b for a, b in zip(result.state, scope.state_of(result.metric), strict=True))
        for index, value in enumerate(result.values)
    }
    return {name: found[id(value)] for name, value in logs.items() if id(value) in found}


def has_own_outputs(model: keras.Model, kind: str) -> bool:
    """Whether "train" or "test" steps return more than metrics, as Keras's own do not."""
    return any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in (f"{kind}_step", "compute_metrics")
    )


def _own_outputs(model: keras.Model, outputs: Structure) -> dict[str, Any]:
    """The outputs of an overridden step, by name.

    Raises:
        TrainingError: the outputs are not a dict.
    """
    if not isinstance(outputs, dict):
        raise TrainingError(
            f"{type(model).__name__}'s own step must return a dict of names and values, got"
            f" {outputs!r}."
        )
    return _flat(outputs)


def results(
    model: keras.Model, outputs: dict[str, tf.Tensor], of_metrics: MetricLogs, updated: set[int]
) -> dict[str, tf.Tensor]:
    """Logs, in a scope that holds the metrics' states of the whole epoch.

    Args:
        outputs: the other values that an overridden step returned, over all replicas; empty
            without one. An output has the value of the metric of its name, if the step updates
            that metric.
        of_metrics: what an overridden step returned that is a metric's result.
        updated: ids of the metric variables that the step writes. A step of its own may return a
            "loss" and leave the model's tracker of that name at zero.
    """
    found = _flat(model.get_metrics_result())
    if outputs or of_metrics:
        live = _names_of_updated(model, updated)
        known = {name: found[name] for name in outputs if name in live and name in found}
        found = {**outputs, **known, **results_of(of_metrics)}
    return {name: tf.convert_to_tensor(value) for name, value in found.items()}


def results_of(of_metrics: MetricLogs) -> dict[str, tf.Tensor]:
    """The logs that are metrics' results, in a scope that holds the metrics' states."""
    return {
        name: keras.tree.flatten(metric.result())[index]
        for name, (metric, index) in of_metrics.items()
    }


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
