"""Keras in a replica's step: as on one device with the whole batch.

Inside the step of a `DistributedModel` on several replicas

- code sees one replica (`num_replicas_in_sync` is 1): every loss is the mean over the examples
  at hand, and nothing is to be divided by the number of replicas, nor is it when it is;
- losses are parts of the one loss of the global batch (exact_losses.py);
- an optimizer gets the gradient of the global batch, the sum over replicas, each weighted by its
  share of the examples, before it clips, accumulates or applies it, and works on this replica's
  copies as if there were no strategy;
- statistics that are synchronized over replicas count each example once.

Elsewhere nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.strategies.reductions import OTHER, batch_reduce_to
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._keras_hooks import replace_in_steps
from tfdist_ext.training.copies import (
    LocalCopies,
    UpdatesInPlace,
    device_of_update,
    is_updated_once,
    local_copy,
    outside_of_strategies,
    owner_copy,
    send_out,
)
from tfdist_ext.training.exact_losses import (
    add_loss,
    added_loss,
    clear_losses,
    gradient,
    loss_of_batch,
    losses_of,
    reduce_loss,
    scale_loss,
)
from tfdist_ext.training.part import Part, part, reduced_for, set_part
from tfdist_ext.training.step_watch import when

__all__ = ["install"]


def install() -> None:
    """Make Keras's functions ask whether a replica's step is running; once in a process."""
    replace_in_steps(
        part,
        apply=_apply,
        reduce_loss=reduce_loss,
        loss_of_batch=loss_of_batch,
        add_loss=add_loss,
        losses_of=losses_of,
        clear_losses=clear_losses,
        added_loss=added_loss,
        gradient=gradient,
        scale_loss=scale_loss,
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
    of_loss = here.weighted_loss
    weighted = [
        g if of_loss is not None and of_loss.gave(g) else here.weighted([g])[0]
        for g in grads
        if g is not None
    ]

    if here.watch is not None:
        with set_part(None):
            loss_scale = optimizer.scale_loss(tf.constant(1.0))
        here.watch.gradients(weighted, here.share(tf.float64) * tf.cast(loss_scale, tf.float64))

    def apply(gradients: list[Any]) -> None:
        there = iter(gradients)
        original(optimizer, [None if g is None else next(there, None) for g in grads], variables)

    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.TPUStrategy):
        # A replica's copies cannot be had one by one there: Keras sums, after it has clipped.
        with set_part(None):
            apply(weighted)
        return

    touched = [*variables, *optimizer.variables]
    if here.local_replicas > 1 and is_updated_once(touched, strategy, here.local_replicas):

        def apply_once(_: Any, gradients: list[Any]) -> Any:
            with_gradient = [v for g, v in zip(grads, variables, strict=False) if g is not None]
            summed = _on_owners(gradients, with_gradient, strategy)
            copies = LocalCopies(lambda variable: owner_copy(variable, strategy))
            updates = UpdatesInPlace(optimizer, copies)
            with (
                set_part(None),
                outside_of_strategies(optimizer, updates),
                copies,
                kp.optimizer_keys(updates.whole_of),
            ):
                apply(summed)
            send_out(touched, strategy)
            return () if here.watch is None else when(summed)

        here.check_graph()
        merge_call = tf.distribute.get_replica_context().merge_call
        here.meeting(lambda gradients: merge_call(apply_once, args=(gradients,)), weighted)
    else:
        pairs = zip(grads, variables, strict=False)
        what = [reduced_for("gradient", v) for g, v in pairs if g is not None]
        what += [OTHER] * (len(weighted) - len(what))  # Keras says what is wrong with numbers
        summed = here.meeting(lambda gradients: here.sum_up(gradients, what), weighted)
        number = int(tf.get_static_value(_replica_number()))
        copies = LocalCopies(lambda variable: local_copy(variable, strategy, number))
        with set_part(None), outside_of_strategies(optimizer), copies:
            apply(summed)


def _on_owners(
    gradients: Sequence[Any], variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> list[Any]:
    """The sum over replicas of each gradient, on the device that computes its update alone."""
    devices = [device_of_update(owner_copy(variable, strategy)) for variable in variables]
    pairs = list(zip(gradients, devices, strict=False))  # Keras says what is wrong with numbers
    what = [reduced_for("gradient", variable) for variable in variables]
    return batch_reduce_to(strategy, tf.distribute.ReduceOp.SUM, pairs, what[: len(pairs)])


def _replica_number() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _update_mean(
    here: Part,
    original: Callable[..., Any],
    metric: Any,
    values: Any,
    sample_weight: Any = None,
) -> Any:
    """A single number is the part's mean: as on one device it counts once a step."""
    share = here.share(metric.dtype)
    if sample_weight is None and len(getattr(values, "shape", ())) == 0:
        sample_weight = share
    elif here.has_all_rows(values):  # each replica has the same ones
        weights = tf.ones_like(values) if sample_weight is None else sample_weight
        sample_weight = tf.cast(weights, metric.dtype) * share
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
