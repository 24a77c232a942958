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
from tfdist_ext.training._tf_private import is_recording
from tfdist_ext.training.part import Part
from tfdist_ext.training.passed import not_called
from tfdist_ext.training.replica_scope import ReplicaScope

__all__ = [
    "added_loss",
    "clear_losses",
    "gradient",
    "loss_of_batch",
    "reduce_loss",
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
    here.reduced_losses += 1
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
    here: Part, original: Callable[..., Any], loss: Any, *given: Any, **named: Any
) -> Any:
    """A loss of Keras's or the user's; Dice and Tversky are ratios of sums over the whole batch."""
    before = here.reduced_losses
    is_function = type(loss).call is keras.losses.Dice.call
    config = loss.get_config() if is_function and loss.fn in _RATIOS else {"axis": "any"}
    if config.get("axis") is None:
        loss = _RatioOfSums(here, loss, config)
    value = original(loss, *given, **named)
    if here.reduced_losses == before:
        raise not_called("reduce_loss")
    return value


class _RatioOfSums(keras.losses.Loss):
    """Dice or Tversky over the rows of all replicas."""

    def __init__(self, here: Part, loss: Any, config: dict[str, Any]):
        super().__init__(loss.name, loss.reduction, loss.dtype)
        self._here = here
        is_dice = loss.fn is keras.losses.dice
        # Dice is Tversky with equal weights, but for the epsilon above.
        self._weights = None if is_dice else (config.get("alpha", 0.5), config.get("beta", 0.5))

    def call(self, y_true: Any, y_pred: Any) -> Any:
        here = self._here
        y_pred = tf.convert_to_tensor(y_pred)
        y_true = tf.cast(y_true, y_pred.dtype)
        present, zero = here.present(y_pred.dtype), keras.config.epsilon()
        sums = [tf.reduce_sum(value) * present for value in (y_true * y_pred, y_true, y_pred)]
        both, wanted, found = here.total(sums)
        if self._weights is None:
            return 1 - 2 * both / (wanted + found + zero)
        alpha, beta = self._weights
        return 1 - both / (both + alpha * (wanted - both) + beta * (found - both) + zero)


def clear_losses(here: Part, original: Callable[..., Any], layer: Any) -> None:
    """Forget the losses that this replica's last call of a layer has added.

    Keras keeps in the layer which losses are its own, and all replicas share the layer: one that
    waits for the others in the middle of its step would find its losses forgotten by their calls.
    """
    del here
    if (scope := _scope()) is None:
        return original(layer)
    scope.forget_losses(layer)


def _scope() -> ReplicaScope | None:
    scope = kp.stateless_scope()
    return scope if isinstance(scope, ReplicaScope) else None


def added_loss(here: Part, original: Callable[..., Any], model: Any, loss: Any) -> Any:
    """A layer's `add_loss`; of one number for each example Keras takes the sum, as of all."""
    total = original(model, loss)
    if not here.has_rows(loss):
        return total
    return tf.math.divide_no_nan(total, here.share(total.dtype))


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
    stays with it. Keras's own step gives the gradients of its loss to an optimizer, as they are:
    they are weighted with the part's share here, and summed there.
    """
    to_variables = all(
        isinstance(source, tf.Variable | keras.Variable) for source in tf.nest.flatten(sources)
    )
    if not to_variables or here.replicas == 1 or here.computes_gradients:
        return original(tape, target, sources, output_gradients, *options, **named_options)
    variables = sources
    if (scope := _scope()) is not None:
        sources = tf.nest.map_structure(scope.source_of, sources)
    targets = tf.nest.flatten(target)
    here.warn_of_rows_compared(targets)
    output_gradients = _of_sums(here, targets, output_gradients)
    # What a model's own tape gives is taken while the step's tape still records.
    of_step = here.keras_step and not is_recording()
    if of_step:
        output_gradients = here.weighted(_upstream(targets, output_gradients))
    with here.computing_gradients(weighted=of_step):
        made = original(tape, target, sources, output_gradients, *options, **named_options)
    if of_step or not here.can_sum_gradients():
        return made
    return here.of_all_rows(made, variables)


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
