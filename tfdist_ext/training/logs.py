"""What is shown of a step: results of metrics, and what an overridden step returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp

__all__ = [
    "flat",
    "has_own_outputs",
    "metric_variables",
    "metrics_of",
    "mixed_warning",
    "names_of_updated",
    "own_outputs",
    "results",
]


def has_own_outputs(model: keras.Model, kind: str) -> bool:
    """Whether "train" or "test" steps return more than metrics, as Keras's own do not."""
    return any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in (f"{kind}_step", "compute_metrics")
    )


def own_outputs(model: keras.Model, outputs: Any) -> dict[str, tf.Tensor]:
    """What an overridden step returned, by name, as tensors.

    To be called in the step's scope: a metric's result may be a variable itself.

    Raises:
        TrainingError: it is no dict.
    """
    if not isinstance(outputs, dict):
        raise TrainingError(
            f"{type(model).__name__}'s own step must return a dict of names and values; it"
            f" returned {outputs!r}."
        )
    return {name: tf.convert_to_tensor(value) for name, value in flat(outputs).items()}


def results(
    model: keras.Model, outputs: dict[str, Any], of_metrics: Set[str], updated: set[int]
) -> dict[str, tf.Tensor]:
    """Logs, in a scope that holds the metrics' states of the whole epoch.

    Args:
        outputs: what an overridden step returned, over all replicas; empty without one.
        of_metrics: names of the outputs that are computed from metrics. Another output has the
            value of the metric of its name, if the step updates one.
        updated: ids of the metric variables that the step writes. A step of its own may return a
            "loss" and leave the model's tracker of that name at zero.
    """
    found = flat(model.get_metrics_result())
    if outputs:
        live = names_of_updated(model, updated) - of_metrics
        known = {name: found[name] for name in outputs if name in live and name in found}
        found = {**outputs, **known}
    return {name: tf.convert_to_tensor(value) for name, value in found.items()}


def mixed_warning(model: keras.Model, kind: str, names: Sequence[str]) -> str:
    """Of logs that are not computed from the metrics of all replicas."""
    return (
        f"{type(model).__name__}.{kind}_step returns {', '.join(map(repr, names))}, computed from a"
        " metric's result() and from numbers of single examples, or from a variable in a"
        " tf.function of its own. It is the value of the replicas' own rows. Reduce the numbers to"
        " one, or return them and the metric's result under keys of their own, to log the values"
        " over all examples."
    )


def names_of_updated(model: keras.Model, updated: set[int]) -> set[str]:
    """Names of the values of those metrics that have one of these variables, by id."""
    names = set()
    for metric in model.metrics:
        if any(id(variable) in updated for variable in metric.variables):
            value = metric.result()
            names |= set(value) if isinstance(value, dict) else {metric.name}
    return names


def metrics_of(model: keras.Model) -> list[Any]:
    """The model's metrics, those that a `metrics` property of its own leaves out too."""
    found = list(model.metrics)
    for layer in kp.flat_layers(model):
        kind = keras.Model if isinstance(layer, keras.Model) else keras.Layer
        found += kind.metrics.fget(layer)
    return list({id(metric): metric for metric in found}.values())


def metric_variables(metrics: Iterable[Any]) -> list[Any]:
    """The variables of metrics, each once."""
    variables = [variable for metric in metrics for variable in metric.variables]
    return list({id(variable): variable for variable in variables}.values())


def flat(outputs: dict[str, Any]) -> dict[str, Any]:
    """Without dicts in the dict, which a metric of several values leaves; as Keras flattens."""
    found: dict[str, Any] = {}
    for name, value in outputs.items():
        found.update(flat(value) if isinstance(value, dict) else {name: value})
    return found
