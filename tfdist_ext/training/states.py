"""Layers that keep a state for each row of a batch, which cannot follow its row to a replica."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp

__all__ = ["check_states"]


def check_states(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """To be called before anything of a model is traced, or even built.

    Raises:
        TrainingError: a recurrent layer is stateful, and batches are cut for several replicas or go
            to workers in no order; or it was not told the size of a batch.
    """
    stateful = [
        layer
        for layer in kp.flat_layers(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
    ]
    if not stateful:
        return
    names = ", ".join(repr(layer.name) for layer in stateful)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        where = "the workers of a ParameterServerStrategy, which take batches in no order"
    elif strategy.num_replicas_in_sync > 1:
        where = f"{strategy.num_replicas_in_sync} replicas, each of which gets other rows"
    elif not all(layer.built for layer in stateful):
        raise TrainingError(
            f"stateful=True of {names} needs the size of a batch before the first one comes: begin"
            " the model with keras.Input(batch_shape=(examples, steps, features)), or call its"
            " build((examples, steps, features)) in the function given to distribute()."
        )
    else:
        return
    raise TrainingError(
        f"stateful=True of {names} keeps a state for each row of a batch, on which row i of the"
        f" next batch goes on. That cannot be with {where}. Make the layers with stateful=False, or"
        ' train on one replica: create_strategy("one_device").'
    )
