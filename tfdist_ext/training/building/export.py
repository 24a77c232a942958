"""Exports a model: a copy of it without a strategy.

A model cannot be exported as it is if its variables are partitioned. One on parameter servers is
traced with variables of other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.building.build import build
from tfdist_ext.training.building.cloning import (
    cannot_be_copied,
    clone_model,
    copy_flags_and_assets,
)
from tfdist_ext.training.protocols import Specs
from tfdist_ext.training.state import (
    MODEL,
    assign_whole,
    check_has_variables,
    group_of,
    state_of,
    whole_value,
)
from tfdist_ext.training.variables import outside_of_scopes

__all__ = ["Builder", "export"]

# Builds another model; None if there is only the model itself.
Builder: TypeAlias = Callable[[], keras.Model] | None


def export(
    model: keras.Model, filepath: str, builder: Builder, spec: Specs, **arguments: Any
) -> None:
    """Exports a model as `keras.Model.export` does, on this task alone.

    Args:
        builder: builds another model, if the model cannot be copied from its config.
        spec: tf.TypeSpecs of the batch that the model was built for; None: unknown.
        arguments: those of `keras.Model.export`.

    Raises:
        TrainingError: the model has no variables yet, or it cannot be copied.
    """
    policy = keras.config.dtype_policy()

    def copy_and_export() -> None:
        keras.config.set_dtype_policy(policy)  # a setting of each thread
        copy = _plain_copy(model, builder, spec)
        if not kp.is_graph_of_layers(model) and spec is not None:
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
            arguments.setdefault("input_signature", [inputs])
        copy.export(filepath, **arguments)

    outside_of_scopes(copy_and_export)


def _plain_copy(model: keras.Model, builder: Builder, spec: Specs) -> keras.Model:
    """Returns a copy with ordinary variables of this process, not compiled."""
    check_has_variables(model, "export")
    try:
        copy = clone_model(model)
    except TrainingError:
        if builder is None:
            raise
        copy = builder()
    if len(copy.variables) != len(model.variables) and spec is not None:
        build(copy, spec, tf.distribute.get_strategy(), kind="predict")
    copy_flags_and_assets(model, copy)
    values, targets = (
        {name: variable for name, variable in state_of(each).items() if group_of(name) == MODEL}
        for each in (model, copy)
    )
    if differs := sorted({*values} ^ {*targets}):
        raise cannot_be_copied(model, f"the copy has other variables: {', '.join(differs[:6])}.")
    for name, target in targets.items():
        assign_whole(target, whole_value(values[name]))
    return copy
