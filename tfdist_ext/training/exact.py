"""Keras in a replica's step: as on one device with the whole batch.

Inside the step of a `DistributedModel` on several replicas

- code sees one replica (`num_replicas_in_sync` is 1): every loss is the mean over the examples
  at hand, and nothing is to be divided by the number of replicas, nor is it when it is;
- a loss that is no plain mean is corrected for its replica's share of what it sums or divides by,
  and one that is not reduced at all counts as the sum over all rows;
- an optimizer gets the gradient of the global batch, the sum over replicas, each weighted by its
  share of the examples, before it clips, accumulates or applies it, and works on this replica's
  copies as if there were no strategy;
- statistics that are synchronized over replicas count each example once.

Elsewhere nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._keras_hooks import replace_in_steps
from tfdist_ext.training.copies import (
    LocalCopies,
    copies_per_worker,
    local_copy,
    outside_of_strategies,
)
from tfdist_ext.training.part import Part, part, set_part

__all__ = ["install"]


def install() -> None:
    """Make Keras's functions ask whether a replica's step is running; once in a process."""
    replace_in_steps(
        part,
        apply=_apply,
        reduce_loss=_reduce_loss,
        added_loss=_added_loss,
        gradient=_gradient,
        update_mean=_update_mean,
        moments=_moments,
        masked_moments=_masked_moments,
    )


def _apply(
    here: Part, original: Callable[..., Any], optimizer: Any, grads: Any, variables: Any = None
) -> None:
    """`optimizer.apply` in a replica's context, with this replica's gradients."""
    grads = list(grads)
    variables = kp.trained_by(optimizer) if variables is None else list(variables)
    weighted = here.weighted([gradient for gradient in grads if gradient is not None])

    def apply(gradients: list[Any]) -> None:
        there = iter(gradients)
        original(optimizer, [None if g is None else next(there) for g in grads], variables)

    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.TPUStrategy):
        # A replica's copies cannot be had one by one there: Keras sums, after it has clipped.
        with set_part(None):
            apply(weighted)
        return
    summed = here.sum_up(weighted)

    def apply_on(copy: int, gradients: list[Any]) -> None:
        copies = LocalCopies(lambda variable: local_copy(variable, strategy, copy))
        with set_part(None), outside_of_strategies(optimizer), copies:
            apply(gradients)

    if here.local_replicas > 1 and copies_per_worker(optimizer.variables[0], strategy) == 1:

        def apply_once(_: Any, gradients: list[Any]) -> None:
            apply_on(0, [strategy.experimental_local_results(value)[0] for value in gradients])

        tf.distribute.get_replica_context().merge_call(apply_once, args=(summed,))
    else:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        apply_on(int(tf.get_static_value(number)), summed)


def _reduce_loss(
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
    if loss.shape.rank != 0 or values.shape.rank == 0:
        return loss  # not reduced here
    if reduction == "sum":
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


def _added_loss(here: Part, original: Callable[..., Any], model: Any, loss: Any) -> Any:
    """A layer's `add_loss`; of one number for each example Keras takes the sum, as of all."""
    total = original(model, loss)
    if not here.has_rows(loss):
        return total
    return tf.math.divide_no_nan(total, here.share(total.dtype))


def _gradient(
    here: Part,
    original: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    *options: Any,
    **named_options: Any,
) -> Any:
    """A tape's gradient of a loss for each example: that of their sum, which is no mean.

    Only with respect to variables, which sum over the rows; what belongs to a row stays with it.
    """
    to_variables = all(
        isinstance(source, tf.Variable | keras.Variable) for source in tf.nest.flatten(sources)
    )
    if to_variables and here.replicas > 1:
        output_gradients = _of_sums(here, tf.nest.flatten(target), output_gradients)
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
    if output_gradients is None:
        given = [tf.ones_like(target) for target in targets]
    else:
        given = tf.nest.flatten(output_gradients)
    return [
        upstream * tf.math.reciprocal_no_nan(here.share(upstream.dtype))
        if here.has_rows(target)
        else upstream
        for target, upstream in zip(targets, given, strict=True)
    ]


def _update_mean(
    here: Part,
    original: Callable[..., Any],
    metric: Any,
    values: Any,
    sample_weight: Any = None,
) -> Any:
    """A single number is the part's mean: as on one device it counts once a step."""
    if sample_weight is None and len(getattr(values, "shape", ())) == 0:
        sample_weight = here.share(metric.dtype)
    return original(metric, values, sample_weight)


def _moments(here: Part, x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
    """Mean and variance over the rows of all replicas, by Keras's formula."""
    present = here.present(x.dtype)
    sums = [tf.reduce_sum(v, axes, keepdims=True) for v in (x, tf.square(x), tf.ones_like(x))]
    total, squares, count = here.total([value * present for value in sums])
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _masked_moments(here: Part, x: Any, mask: Any, axes: Any, epsilon: float) -> tuple[Any, Any]:
    """The same over the entries of all replicas that a mask leaves."""
    mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(x))
    present = here.present(x.dtype)

    def sum_of(value: Any) -> Any:
        value = tf.where(mask, value, tf.zeros_like(value))
        return tf.reduce_sum(value, axes, keepdims=True) * present

    total, count = here.total([sum_of(x), sum_of(tf.ones_like(x))])
    mean = total / (count + epsilon)
    (squares,) = here.total([sum_of(tf.square(x - mean))])
    return tf.squeeze(mean), tf.squeeze(squares / (count + epsilon))
