"""Losses in a replica's step: parts of the one loss of the global batch.

A replica's loss counts with its share of the rows, as a mean over its part does. What is no plain
mean is corrected for the share of what it sums or divides by, and what is not reduced at all counts
as the sum over all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.part import Part
from tfdist_ext.training.replica_scope import ReplicaScope

__all__ = [
    "add_loss",
    "added_loss",
    "clear_losses",
    "gradient",
    "loss_of_batch",
    "losses_of",
    "reduce_loss",
    "scale_loss",
]

_RATIOS = (keras.losses.dice, keras.losses.tversky)


def reduce_loss(
    here: Part,
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Keras's reduction of a loss over the part; its weighted mean over parts is the global one."""
    loss = original(
        values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype
    )
    if loss.shape.rank != 0:
        return loss  # not reduced here
    if values.shape.rank == 0:
        return _weighted_number(here, original, values, sample_weight, mask, reduction, loss)
    if reduction == "sum":
        if here.has_all_rows(values):
            return loss
        return tf.math.divide_no_nan(loss, here.share(loss.dtype))
    # What the mean divides by, where that is not the number of rows.
    if reduction == "mean_with_sample_weight":
        divisor = kp.loss_weights(sample_weight, mask, reduction, loss.dtype)
    else:
        divisor = mask
    if divisor is None:
        return loss
    mine = tf.reduce_sum(tf.cast(divisor, loss.dtype)) * here.present(loss.dtype)
    (whole,) = here.sum_up([mine])
    return loss * tf.math.divide_no_nan(mine, whole * here.share(loss.dtype))


def _weighted_number(
    here: Part,
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: str | None,
    loss: Any,
) -> Any:
    """A loss function's one number for the batch: the mean over parts, times the weights of all."""
    if sample_weight is None or mask is not None or reduction == "mean_with_sample_weight":
        return loss
    weights = original(tf.ones_like(values), sample_weight=sample_weight, reduction=reduction)
    if reduction == "sum":
        mine = tf.math.multiply_no_nan(weights, here.present(weights.dtype))
    else:
        mine = here.contribution(weights)
    return values * here.sum_up([mine])[0]


def loss_of_batch(
    here: Part, original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any
) -> Any:
    """Keras's Dice and Tversky losses: ratios of sums over the whole batch."""
    arguments = kp.loss_arguments(loss)
    if loss.fn not in _RATIOS or arguments.get("axis") is not None:
        return original(loss, y_true, y_pred)

    def ratio(y_true: Any, y_pred: Any, alpha: Any = 0.5, beta: Any = 0.5, axis: Any = None) -> Any:
        del axis
        y_pred = tf.convert_to_tensor(y_pred)
        y_true = tf.cast(y_true, y_pred.dtype)
        present, zero = here.present(y_pred.dtype), keras.config.epsilon()
        sums = [tf.reduce_sum(value) * present for value in (y_true * y_pred, y_true, y_pred)]
        both, wanted, found = here.total(sums)
        if loss.fn is keras.losses.dice:
            return 1 - 2 * both / (wanted + found + zero)
        return 1 - both / (both + alpha * (wanted - both) + beta * (found - both) + zero)

    return original(kp.loss_with_function(loss, ratio), y_true, y_pred)


def add_loss(here: Part, original: Callable[..., Any], layer: Any, loss: Any) -> None:
    """A layer's `add_loss`: kept for this replica.

    Keras keeps in the layer whose loss is whose, and all replicas share the layer: one that waits
    for the others in the middle of its step would find its losses forgotten by their model calls.
    """
    del here
    original(layer, loss)
    if (scope := _scope()) is not None:
        scope.losses_by_layer.setdefault(id(layer), []).extend(keras.tree.flatten(loss))


def losses_of(here: Part, original: Callable[..., Any], layer: Any) -> list[Any]:
    """The losses that this replica's calls of the layer have added."""
    del here
    scope = _scope()
    return original(layer) if scope is None else list(scope.losses_by_layer.get(id(layer), ()))


def clear_losses(here: Part, original: Callable[..., Any], layer: Any) -> Any:
    """Forget the losses of an earlier call; Keras goes on to the layers inside of this one."""
    del here
    if (scope := _scope()) is not None:
        scope.losses_by_layer.pop(id(layer), None)
    return original(layer)


def _scope() -> ReplicaScope | None:
    scope = kp.stateless_scope()
    return scope if isinstance(scope, ReplicaScope) else None


def added_loss(here: Part, original: Callable[..., Any], model: Any, loss: Any) -> Any:
    """A layer's `add_loss`; of one number for each example Keras takes the sum, as of all."""
    total = original(model, loss)
    if not here.has_rows(loss):
        return total
    return tf.math.divide_no_nan(total, here.share(total.dtype))


def scale_loss(here: Part, original: Callable[..., Any], optimizer: Any, loss: Any) -> Any:
    """An optimizer's loss scaling, or its loss as it is."""
    scaled = original(optimizer, loss)
    if here.weighted_loss is not None:
        here.weighted_loss.scaled(optimizer, scaled)
    return scaled


def gradient(
    here: Part,
    original: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *options: Any,
    **named_options: Any,
) -> Any:
    """A tape's gradient with respect to variables: that of the global batch.

    Of a loss for each example it is that of their sum, which is no mean. What belongs to a row
    stays with it. Those of a `WeightedLoss` are of the loss times the part's share, for an
    optimizer to sum them.
    """
    to_variables = all(
        isinstance(source, tf.Variable | keras.Variable) for source in tf.nest.flatten(sources)
    )
    if to_variables and here.replicas > 1:
        variables = sources
        if (scope := _scope()) is not None:
            sources = tf.nest.map_structure(scope.source_of, sources)
        targets = tf.nest.flatten(target)
        here.warn_of_rows_compared(targets)
        output_gradients = _of_sums(here, targets, output_gradients)
        of_loss = here.weighted_loss
        if of_loss is not None and of_loss.is_target(target):
            upstream = here.weighted(_upstream(targets, output_gradients))
            with of_loss.gradients_of() as known:
                made = original(tape, target, sources, upstream, *options, **named_options)
                known += [each for each in tf.nest.flatten(made) if each is not None]
            return made
        made = original(tape, target, sources, output_gradients, *options, **named_options)
        return here.of_all_rows(made, variables) if here.can_sum_gradients() else made
    return original(tape, target, sources, output_gradients, *options, **named_options)


def _of_sums(here: Part, targets: list[Any], output_gradients: Any) -> Any:
    """The upstream gradients of targets, over the part's share for those that have rows.

    Raises:
        TrainingError: it cannot be told of one.
    """
    for target in targets:
        if here.may_have_rows(target):
            raise TrainingError(
                f"the gradient of a loss of shape {target.shape} is asked for, which may or may"
                " not be several numbers for each row of this replica's part of the batch. Sum it"
                " up first, which leaves the gradient as it is on one device: to one number for"
                " each row with tf.reduce_sum(loss, axis=...) if it has rows, with"
                " tf.reduce_sum(loss) if not."
            )
    if not any(map(here.has_rows, targets)):
        return output_gradients
    return [
        upstream * tf.math.reciprocal_no_nan(here.share(upstream.dtype))
        if here.has_rows(target)
        else upstream
        for target, upstream in zip(targets, _upstream(targets, output_gradients), strict=True)
    ]


def _upstream(targets: list[Any], given: Any) -> list[Any]:
    """The upstream gradient of each target, ones where none is given."""
    return [tf.ones_like(t) for t in targets] if given is None else tf.nest.flatten(given)
