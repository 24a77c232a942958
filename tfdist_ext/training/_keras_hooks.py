"""Functions of Keras that do something else while a distributed model runs, each with the reason.

They are replaced because there is no other way in: Keras's losses, layers and optimizers call each
other, and the steps of users call them directly. Outside of a step they are as Keras made them.
`tests/training/test_keras_private.py` fails where a release does not call one any more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn
from keras.src.losses import loss as loss_module
from keras.src.losses.losses import LossFunctionWrapper

__all__ = ["TRAINER_METHODS", "replace_apply_of", "replace_in_steps", "replace_trainer"]

# What a model's class may override and call by super().
TRAINER_METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


def replace_trainer(instead: Callable[[keras.Model, str], Callable[..., Any] | None]) -> None:
    """Let `keras.Model.fit`, `evaluate`, ... call `instead(model, name)` where that is not None.

    There is no other way in: a `fit` of the user's calls `super().fit(...)`, which is looked up in
    the classes and not in the model.
    """

    def replace(name: str) -> None:
        original = getattr(keras.Model, name)

        @functools.wraps(original)
        def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
            other = instead(self, name)
            if other is None:
                return original(self, *args, **kwargs)
            return other(*args, **kwargs)

        setattr(keras.Model, name, chosen)

    for name in TRAINER_METHODS:
        replace(name)


def replace_in_steps(
    part: Callable[[], Any],
    *,
    apply: Callable[..., Any],
    apply_gradients: Callable[..., Any],
    reduce_loss: Callable[..., Any],
    loss_of_batch: Callable[..., Any],
    add_loss: Callable[..., Any],
    losses_of: Callable[..., Any],
    clear_losses: Callable[..., Any],
    added_loss: Callable[..., Any],
    gradient: Callable[..., Any],
    scale_loss: Callable[..., Any],
    update_mean: Callable[..., Any],
    moments: Callable[..., Any],
    masked_moments: Callable[..., Any],
) -> None:
    """Let Keras call other functions where `part()` is not None.

    Each is called as `other(part(), original function, *its arguments)`.
    """

    def instead(owner: Any, name: str, other: Callable[..., Any]) -> None:
        _replace(part, owner, name, other)

    def moments_of_layer(here: Any, original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
        if mask is None or not layer.synchronized:
            return original(layer, inputs, mask)
        epsilon = keras.config.epsilon()
        return masked_moments(here, inputs, mask, layer._reduction_axes, epsilon)

    instead(keras.optimizers.Optimizer, "apply", apply)
    instead(keras.optimizers.Optimizer, "apply_gradients", apply_gradients)
    instead(keras.optimizers.LossScaleOptimizer, "apply", apply)
    # What Keras's own step then asks the gradients of.
    instead(keras.optimizers.Optimizer, "scale_loss", scale_loss)
    instead(keras.optimizers.LossScaleOptimizer, "scale_loss", scale_loss)
    instead(loss_module, "reduce_weighted_values", reduce_loss)
    instead(LossFunctionWrapper, "call", loss_of_batch)
    # Whose losses these are, which Keras keeps in the layer, for all replicas together.
    instead(keras.Layer, "add_loss", add_loss)
    instead(keras.Layer, "_get_own_losses", losses_of)
    instead(keras.Layer, "_clear_losses", clear_losses)
    # What a layer gave to add_loss; Keras adds it up, whatever its shape.
    instead(keras.Model, "_aggregate_additional_loss", added_loss)
    # All losses pass here, compiled or not. Public, and the only place where it is known of a loss
    # without reduction that nothing reduces it any more.
    instead(tf.GradientTape, "gradient", gradient)
    instead(keras.metrics.Mean, "update_state", update_mean)
    # Its gradient would not weigh the replicas, and a part of 0 rows would count.
    instead(nn, "_compute_moments_sync", lambda here, _, *args: moments(here, *args))
    # Keras forgets `synchronized` where there is a mask.
    instead(keras.layers.BatchNormalization, "_moments", moments_of_layer)
    # Keras and users divide a replica's mean loss by this number; the parts' shares do it here.
    replicas = tf.distribute.Strategy.num_replicas_in_sync.fget
    tf.distribute.Strategy.num_replicas_in_sync = property(
        lambda strategy: replicas(strategy) if part() is None else 1,
        doc=tf.distribute.Strategy.num_replicas_in_sync.__doc__,
    )


def replace_apply_of(
    kind: type,
    part: Callable[[], Any],
    *,
    apply: Callable[..., Any],
    apply_gradients: Callable[..., Any],
) -> None:
    """The same for what a class of optimizers, and its bases above Keras's, define themselves.

    What is called first in a step must get the sums over replicas, and calls Keras's only then.
    """
    for owner in kind.__mro__:
        if owner in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            break
        for name, other in (("apply", apply), ("apply_gradients", apply_gradients)):
            if name in vars(owner) and not hasattr(vars(owner)[name], "replaced_in_steps"):
                _replace(part, owner, name, other)


def _replace(part: Callable[[], Any], owner: Any, name: str, other: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        here = part()
        if here is None:
            return original(*args, **kwargs)
        return other(here, original, *args, **kwargs)

    chosen.replaced_in_steps = True  # type: ignore[attr-defined]
    setattr(owner, name, chosen)
