"""What is shown of a step: results of metrics, and what an overridden step returned."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError

__all__ = ["flat", "has_own_outputs", "own_outputs", "results"]


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


def results(model: keras.Model, outputs: dict[str, Any], updated: set[int]) -> dict[str, tf.Tensor]:
    """Logs, in a scope that holds the metrics' states of the whole epoch.

    Args:
        outputs: what the last step returned beside them, which gives the names, if anything.
        updated: ids of the metric variables that the step writes. A step of its own may return a
            "loss" and leave the model's tracker of that name at zero.
    """
    found = flat(model.get_metrics_result())
    if outputs:
        live = set()
        for metric in model.metrics:
            if any(id(variable) in updated for variable in metric.variables):
                value = metric.result()
                live |= set(value) if isinstance(value, dict) else {metric.name}
        known = {name: found[name] for name in outputs if name in live and name in found}
        found = {**outputs, **known}
    return {name: tf.convert_to_tensor(value) for name, value in found.items()}


def flat(outputs: dict[str, Any]) -> dict[str, Any]:
    """Without dicts in the dict, which a metric of several values leaves; as Keras flattens."""
    found: dict[str, Any] = {}
    for name, value in outputs.items():
        found.update(flat(value) if isinstance(value, dict) else {name: value})
    return found
