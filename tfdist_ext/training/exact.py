"""Keras in a replica's step: as on one device with the whole batch.

Inside the step of a `DistributedModel` on several replicas

- code sees one replica (`num_replicas_in_sync` is 1): every loss is the mean over the examples
  at hand, and nothing is to be divided by the number of replicas, nor is it when it is;
- losses are parts of the one loss of the global batch (py);
- an optimizer gets the gradient of the global batch, the sum over replicas, each weighted by its
  share of the examples, before it clips, accumulates or applies it, and works on this replica's
  copies as if there were no strategy. So does an `apply` or `apply_gradients` of its own;
- in a step of the user's, a tape's gradients of variables are those of the global batch already;
- statistics that are synchronized over replicas count each example once.

Elsewhere nothing is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.strategies.reductions import batch_reduce_to
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.exact_losses import added_loss, clear_losses, gradient, loss_of_batch, reduce_loss
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
from tfdist_ext.training.optimizers import optimizers_of, with_inner
from tfdist_ext.training.part import Part, reduced_for, set_part
from tfdist_ext.training.passed import not_called, requiring
from tfdist_ext.training.replaced import Target, own_targets, substitutes
from tfdist_ext.training.sparse_gradients import ToReduce, finished, to_reduce
from tfdist_ext.training.step_timer import timestamp_after

__all__ = ["of_part", "own_applies"]


def of_part(here: Part, take: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    """What stands in for Keras's and TensorFlow's functions in a replica's step, by key.

    Args:
        take: of rows of a table, which the variables know.
    """
    functions: dict[str, Callable[..., Any]] = {
        "apply": _apply,
        "apply_gradients": _apply_gradients,
        "reduce_loss": reduce_loss,
        "loss": loss_of_batch,
        "clear_losses": clear_losses,
        "added_loss": added_loss,
        "gradient": gradient,
        "update_mean": _update_mean,
        "moments": _moments,
        "moments_of_layer": _moments_of_layer,
    }
    bound = {key: functools.partial(function, here) for key, function in functions.items()}
    return {**bound, "replicas": lambda original, strategy: 1, "take": take}


def own_applies(model: keras.Model) -> list[Target]:
    """What the classes of the model's optimizers define themselves in the place of Keras's."""
    kinds = [type(optimizer) for optimizer in optimizers_of(model).values()]
    of_keras = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    return own_targets(kinds, of_keras, ("apply", "apply_gradients"))


def _apply(
    here: Part, original: Callable[..., Any], optimizer: Any, grads: Any, *more: Any, **named: Any
) -> Any:
    """`optimizer.apply(grads, variables)` in a replica's context, with this replica's gradients."""
    given = [*more, *named.values()]
    variables = next((list(each) for each in given if isinstance(each, list | tuple)), None)

    def apply(summed: list[Any]) -> Any:
        return original(optimizer, summed, *more, **named)

    return _with_sums(here, optimizer, list(grads), variables, apply)


def _apply_gradients(
    here: Part, original: Callable[..., Any], optimizer: Any, pairs: Any, *more: Any, **named: Any
) -> Any:
    """`optimizer.apply_gradients(zip(grads, variables))`, the same."""
    pairs = list(pairs)

    def apply(summed: list[Any]) -> Any:
        of_all = [(g, variable) for g, (_, variable) in zip(summed, pairs, strict=True)]
        return original(optimizer, of_all, *more, **named)

    return _with_sums(here, optimizer, [g for g, _ in pairs], [v for _, v in pairs], apply)


def _with_sums(
    here: Part,
    optimizer: Any,
    grads: list[Any],
    variables: list[Any] | None,
    apply: Callable[[list[Any]], Any],
) -> Any:
    """Call `apply` with the gradients of the global batch; nothing in it sums once more.

    It may be an optimizer's own, which is not linear, or keeps a state of its own.
    """
    variables = kp.trained_by(optimizer) if variables is None else variables
    # Where the numbers of gradients and variables differ, Keras says what is wrong.
    places = [i for i, g in enumerate(grads[: len(variables)]) if g is not None]
    # Where the step has summed them already they are the same on every replica, whatever it has
    # made of them since.
    apart = [i for i in places if not here.is_equal(grads[i])]
    weighted = [grads[i] for i in apart]
    if not here.gradients_are_weighted:
        weighted = here.weighted(weighted)

    if here.timer is not None:
        of_part = dict(zip(apart, weighted, strict=True))
        own = [of_part[i] if i in of_part else here.own_gradient(grads[i]) for i in places]
        with set_part(None):
            loss_scale = optimizer.scale_loss(tf.constant(1.0))
        here.timer.gradients(own, here.share(tf.float64) * tf.cast(loss_scale, tf.float64))

    def apply_to(summed: list[Any]) -> Any:
        sums = dict(zip(apart, summed, strict=True))
        return apply([sums.get(i, g) for i, g in enumerate(grads)])

    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.TPUStrategy):
        # A replica's copies cannot be had one by one there: Keras sums, after it has clipped.
        with set_part(None):
            return apply_to(weighted)

    optimizers = with_inner(optimizer)
    touched = [*variables, *(v for each in optimizers for v in each.variables)]
    if here.local_replicas > 1 and is_updated_once(touched, strategy, here.local_replicas):
        parts = [to_reduce(gradient, here.dependence) for gradient in weighted]

        called: set[str] = set()

        def apply_once(_: Any, values: list[list[Any]]) -> Any:
            owned = [variables[i] for i in apart]
            summed = _on_owners(parts, values, owned, strategy)
            copies = LocalCopies(lambda variable: owner_copy(variable, strategy))
            updates = UpdatesInPlace(optimizer, copies)
            with (
                set_part(None),
                outside_of_strategies(optimizers, updates),
                copies,
                substitutes({"variable_key": updates.key_of}, called),
                requiring("variable_key", called),
            ):
                result = apply_to(summed)
            send_out([*touched, *copies.used], strategy)
            return result, () if here.timer is None else timestamp_after(summed)

        here.check_graph()
        merge_call = tf.distribute.get_replica_context().merge_call
        return here.meeting(
            lambda values: merge_call(apply_once, args=(values,)), [each.values for each in parts]
        )[0]
    what = [reduced_for("gradient", variables[i]) for i in apart]
    summed = here.meeting(lambda gradients: here.sum_up(gradients, what), weighted)
    number = int(tf.get_static_value(_replica_number()))
    copies = LocalCopies(lambda variable: local_copy(variable, strategy, number))
    with set_part(None), outside_of_strategies(optimizers), copies:
        return apply_to(summed)


def _on_owners(
    parts: Sequence[ToReduce],
    values: Sequence[Sequence[Any]],
    variables: Sequence[Any],
    strategy: tf.distribute.Strategy,
) -> list[Any]:
    """The sum over replicas of each gradient, on the device that computes its update alone."""
    devices = [device_of_update(owner_copy(variable, strategy)) for variable in variables]
    of_all = list(zip(values, devices, variables, strict=True))
    pairs = [(value, device) for of_one, device, _ in of_all for value in of_one]
    what = [reduced_for("gradient", variable) for of_one, _, variable in of_all for _ in of_one]
    if not pairs:
        return []
    return finished(parts, batch_reduce_to(strategy, tf.distribute.ReduceOp.SUM, pairs, what))


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


def _moments(
    here: Part, original: Callable[..., Any], x: Any, axes: Any, keepdims: bool
) -> tuple[Any, Any]:
    """Mean and variance over the rows of all replicas, by Keras's formula."""
    del original
    here.synchronized_moments += 1
    present = here.present(x.dtype)
    sums = [tf.reduce_sum(v, axes, keepdims=True) for v in (x, tf.square(x), tf.ones_like(x))]
    total, squares, count = here.total([value * present for value in sums])
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _moments_of_layer(
    here: Part, original: Callable[..., Any], layer: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Those of a BatchNormalization; over the entries of all replicas that a mask leaves."""
    if mask is None or not layer.synchronized:
        before = here.synchronized_moments
        moments: tuple[Any, Any] = original(layer, inputs, mask)
        if layer.synchronized and here.synchronized_moments == before:
            raise not_called("moments")
        return moments
    axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
    mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    present = here.present(inputs.dtype)

    def sum_of(value: Any) -> Any:
        value = tf.where(mask, value, tf.zeros_like(value))
        return tf.reduce_sum(value, axes, keepdims=True) * present

    total, count = here.total([sum_of(inputs), sum_of(tf.ones_like(inputs))])
    epsilon = keras.config.epsilon()
    mean = total / (count + epsilon)
    (squares,) = here.total([sum_of(tf.square(inputs - mean))])
    return tf.squeeze(mean), tf.squeeze(squares / (count + epsilon))
