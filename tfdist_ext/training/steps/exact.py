"""Keras in a replica's step: as on one device with the whole batch.

Inside the step of a `DistributedModel` on several replicas

- code sees one replica (`num_replicas_in_sync` is 1): every loss is the mean over the examples at
  hand, and nothing is to be divided by the number of replicas, nor is it when it is;
- a replica's loss counts with its fraction of the rows, as a mean over its part does. What is no
  plain mean is corrected for the fraction of what it sums or divides by, and what is not reduced
  at all counts as the sum over all rows;
- an optimizer gets the gradient of the global batch, the sum over replicas, each weighted by its
  fraction of the examples, before it clips, accumulates or applies it, and works on this
  replica's copies as if there were no strategy. So does an `apply` or `apply_gradients` of its
  own;
- in a step of the user's, a tape's gradients of variables are those of the global batch already;
- statistics that are synchronized over replicas count each example once.

Elsewhere nothing is changed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies.reductions import batch_reduce_to
from tfdist_ext.strategies.traced_replica import copy_number, once_for_all
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import is_recording
from tfdist_ext.training.protocols import Structure
from tfdist_ext.training.steps.context import StepContext, reduced_for, running_step
from tfdist_ext.training.steps.random_numbers import RANDOM
from tfdist_ext.training.steps.replaced import (
    Target,
    not_called,
    substitutes,
)
from tfdist_ext.training.steps.rows import Gradient
from tfdist_ext.training.steps.scope import ReplicaScope, shared_by_replicas
from tfdist_ext.training.steps.step_timer import timestamp_after
from tfdist_ext.training.variables import (
    LocalCopies,
    UpdatesInPlace,
    broadcast_from_owner,
    default_strategy_scope,
    device_of_update,
    is_updated_once,
    local_copy,
    optimizers_of,
    owner_copy,
    with_inner_optimizers,
)

__all__ = ["own_applies", "substitutes_of"]


# Mean and variance of each channel.
Moments: TypeAlias = tuple[tf.Tensor, tf.Tensor]


def substitutes_of(
    here: StepContext, take: Callable[..., tf.Tensor]
) -> Mapping[str, Callable[..., Any]]:
    """The replacements of Keras's and TensorFlow's functions in a replica's step, by key.

    Args:
        take: of rows of a table, which the variables know.
    """
    functions: dict[str, Callable[..., Any]] = {
        "apply": _apply,
        "apply_gradients": _apply_gradients,
        "reduce_loss": _reduce_loss,
        "loss": _loss_of_batch,
        "average_loss": _average_loss,
        "clear_losses": _clear_losses,
        "added_loss": _added_loss,
        "gradient": _gradient,
        "update_mean": _update_mean,
        "moments": _moments,
        "moments_of_layer": _moments_of_layer,
        "gather": _gather,
        **RANDOM,
    }
    on_tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    if here.replicas > 1 and not on_tpu:  # copies cannot be had one by one there
        functions.update(write_variable=_write_variable, update_variable=_update_variable)
    bound = {key: functools.partial(function, here) for key, function in functions.items()}
    taking = functools.partial(_take, here, take)
    return {**bound, "replicas": lambda original, strategy: 1, "take": taking}


def _take(
    here: StepContext,
    take: Callable[..., tf.Tensor],
    original: Callable[..., tf.Tensor],
    x: Any,
    indices: Any,
    axis: int | None = None,
) -> tf.Tensor:
    x = x if axis is None else here.rows_at(x, indices, axis)
    return take(original, x, indices, axis=axis)


def _gather(
    here: StepContext,
    original: Callable[..., tf.Tensor],
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: int | None = None,
    **named: Any,
) -> tf.Tensor:
    """`tf.gather`; of the rows of all replicas, where these are shuffled."""
    params = here.rows_at(params, indices, axis)
    return original(params, indices, validate_indices, axis, **named)


def _write_variable(
    here: StepContext,
    original: Callable[..., Any],
    variable: tf.Variable,
    *args: Any,
    **named: Any,
) -> Any:
    """A method of a tf.Variable that writes one copy; Keras's variables do not come here."""
    scope = kp.stateless_scope()
    if isinstance(scope, ReplicaScope):
        given, how = [*args, *named.values()], original.__name__
        if isinstance(given[0], tf.IndexedSlices):
            given[:1] = [given[0].indices, given[0].values]
        if "scatter" in how or "slice" in how:
            here.check_places(variable, given[0], how)
        for value in given:
            here.check_written(variable, value)
        here.check_equal(variable, given)
        scope.own.note_write(variable)
    return original(variable, *args, **named)


def _update_variable(
    here: StepContext,
    original: Callable[..., Any],
    variable: tf.Variable,
    *args: Any,
    **named: Any,
) -> Any:
    """What a replica does to a tf.Variable that the strategy has made.

    Where each replica has a copy, it writes that one. Where replicas share one they meet, as
    TensorFlow does, if that gives the sum or the mean over all rows, or a counter.
    """
    aggregation, is_shared = variable.aggregation, hasattr(variable, "get")
    sums = aggregation == tf.VariableAggregation.SUM
    averages = aggregation == tf.VariableAggregation.MEAN
    counts = not variable.dtype.is_floating and aggregation != tf.VariableAggregation.NONE
    if sums or (is_shared and (averages or counts)):
        here.check_aggregated(variable)
        if averages:  # TensorFlow's is that of the replicas
            value = here.contribution(tf.convert_to_tensor(args[0], variable.dtype))
            args = (value * here.replicas, *args[1:])
        return original(variable, *args, **named)
    if is_shared:
        raise shared_by_replicas(variable, here.local_replicas)
    update, value = args
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    return update(copies[copy_number() % len(copies)], value, **named)


def own_applies(model: keras.Model) -> list[Target]:
    """The `apply` methods that the classes of the model's optimizers override.

    An override is replaced, because it may use the gradients before it calls Keras's method.
    """
    of_keras = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    owners = dict.fromkeys(
        owner
        for optimizer in optimizers_of(model).values()
        for owner in itertools.takewhile(lambda base: base not in of_keras, type(optimizer).mro())
    )
    names = ("apply", "apply_gradients")
    return [Target(name, owner, name) for owner in owners for name in names if name in vars(owner)]


def _apply(
    here: StepContext,
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    grads: Iterable[Gradient | None],
    *more: Any,
    **named: Any,
) -> Any:
    """`optimizer.apply(grads, variables)` in a replica's context, with this replica's gradients."""
    given = [*more, *named.values()]
    variables = next((list(each) for each in given if isinstance(each, list | tuple)), None)

    def apply(summed: list[Gradient | None]) -> Any:
        return original(optimizer, summed, *more, **named)

    return _with_sums(here, optimizer, list(grads), variables, apply)


def _apply_gradients(
    here: StepContext,
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    pairs: Iterable[tuple[Gradient | None, keras.Variable]],
    *more: Any,
    **named: Any,
) -> Any:
    """`optimizer.apply_gradients(zip(grads, variables))`, the same."""
    pairs = list(pairs)

    def apply(summed: list[Gradient | None]) -> Any:
        of_all = [(g, variable) for g, (_, variable) in zip(summed, pairs, strict=True)]
        return original(optimizer, of_all, *more, **named)

    result = _with_sums(here, optimizer, [g for g, _ in pairs], [v for _, v in pairs], apply)
    return optimizer.iterations if result is None else result


def _with_sums(
    here: StepContext,
    optimizer: keras.optimizers.Optimizer,
    grads: list[Gradient | None],
    variables: list[keras.Variable] | None,
    apply: Callable[[list[Gradient | None]], Any],
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
    equal = [i for i in places if i not in apart]
    weighted = [grads[i] for i in apart]
    if here.gradients_are_weighted:
        # Keras's own step applies them at once. What another optimizer then gets is the user's.
        here.gradients_are_weighted = False
    else:
        weighted = here.weighted(weighted)

    if here.timer is not None:
        by_place = dict(zip(apart, weighted, strict=True))
        own = [by_place[i] if i in by_place else here.own_gradient(grads[i]) for i in places]
        with running_step(None):
            loss_scale = optimizer.scale_loss(tf.constant(1.0))
        here.timer.gradients(own, here.batch_fraction(tf.float64) * tf.cast(loss_scale, tf.float64))

    def apply_to(summed: list[Gradient]) -> Any:
        of_all = dict(zip([*apart, *equal], summed, strict=True))
        return apply([of_all.get(i, g) for i, g in enumerate(grads)])

    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.TPUStrategy):
        # A replica's copies cannot be had one by one there: Keras sums, after it has clipped.
        with running_step(None):
            return apply_to([*weighted, *(grads[i] for i in equal)])

    optimizers = with_inner_optimizers(optimizer)
    touched = [*variables, *(v for each in optimizers for v in each.variables)]
    if here.local_replicas > 1 and is_updated_once(touched, strategy, here.local_replicas):
        owned, known = [variables[i] for i in apart], [grads[i] for i in equal]
        return _update_once(here, optimizer, weighted, known, owned, touched, apply_to)
    what = [reduced_for("gradient", variables[i]) for i in apart]
    summed = here.synchronize(lambda gradients: here.all_reduce(gradients, what), weighted)
    number = copy_number()
    copies = LocalCopies(lambda variable: local_copy(variable, strategy, number), optimizers)
    with running_step(None), default_strategy_scope(optimizers), copies:
        return apply_to([*summed, *(grads[i] for i in equal)])


def _update_once(
    here: StepContext,
    optimizer: keras.optimizers.Optimizer,
    weighted: Sequence[Gradient],
    known: Sequence[Gradient],
    variables: Sequence[keras.Variable],
    touched: Sequence[keras.Variable],
    apply: Callable[[list[Gradient]], Any],
) -> Any:
    """Update each variable on its owner, for all replicas of this worker.

    Args:
        weighted: this replica's shares in gradients.
        known: gradients that are summed already.
        variables: those of `weighted`.
        touched: the variables that the update may write.
        apply: of the gradients of the global batch, `weighted` and then `known`.
    """
    strategy = tf.distribute.get_strategy()
    optimizers = with_inner_optimizers(optimizer)
    lookups = list(map(here.lookups, weighted))

    def update(values: tuple[list[list[Gradient]], list[Gradient]]) -> tuple[Any, tf.Tensor]:
        summed = here.merged(lookups, _sums_on_owners(values[0], variables, strategy))
        summed += [strategy.experimental_local_results(each)[0] for each in values[1]]
        copies = LocalCopies(lambda variable: owner_copy(variable, strategy), optimizers)
        scope = default_strategy_scope(optimizers, UpdatesInPlace(optimizer))
        with running_step(None), scope, copies:
            result = apply(summed)
        broadcast_from_owner([*touched, *copies.used], strategy)
        return result, tf.constant(0.0) if here.timer is None else timestamp_after(summed)

    here.check_graph()
    mine = [[each.value for each in of_one] for of_one in lookups], list(known)
    return here.synchronize(functools.partial(once_for_all, update), mine)[0]


def _sums_on_owners(
    values: Sequence[Sequence[Gradient]],
    variables: Sequence[keras.Variable],
    strategy: tf.distribute.Strategy,
) -> list[Gradient]:
    """The sums over replicas of gradients' lookups, on the devices that compute the updates."""
    devices = [device_of_update(owner_copy(variable, strategy)) for variable in variables]
    of_all = list(zip(values, devices, variables, strict=True))
    pairs = [(value, device) for of_one, device, _ in of_all for value in of_one]
    what = [reduced_for("gradient", variable) for of_one, _, variable in of_all for _ in of_one]
    return batch_reduce_to(strategy, tf.distribute.ReduceOp.SUM, pairs, what) if pairs else []


def _update_mean(
    here: StepContext,
    original: Callable[..., Any],
    metric: keras.metrics.Metric,
    values: npt.ArrayLike | tf.Tensor,
    sample_weight: npt.ArrayLike | tf.Tensor | None = None,
) -> Any:
    """A single number is the part's mean: as on one device it counts once a step."""
    share = here.batch_fraction(metric.dtype)
    if sample_weight is None and len(getattr(values, "shape", ())) == 0:
        sample_weight = share
    elif here.has_all_rows(values):  # each replica has the same ones
        weights = tf.ones_like(values) if sample_weight is None else sample_weight
        sample_weight = tf.cast(weights, metric.dtype) * share
    return original(metric, values, sample_weight)


def _moments(
    here: StepContext,
    original: Callable[..., Moments],
    x: tf.Tensor,
    axes: Sequence[int],
    keepdims: bool,
) -> Moments:
    """Mean and variance over the rows of all replicas, by Keras's formula."""
    del original
    here.synchronized_moments += 1
    present = here.is_nonempty(x.dtype)
    sums = [tf.reduce_sum(v, axes, keepdims=True) for v in (x, tf.square(x), tf.ones_like(x))]
    total, squares, count = here.differentiable_all_reduce([value * present for value in sums])
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _moments_of_layer(
    here: StepContext,
    original: Callable[..., Moments],
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> Moments:
    """Those of a BatchNormalization; over the entries of all replicas that a mask leaves."""
    if mask is None or not layer.synchronized:
        before = here.synchronized_moments
        moments: Moments = original(layer, inputs, mask)
        if layer.synchronized and here.synchronized_moments == before:
            raise not_called("moments")
        return moments
    axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
    mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    present = here.is_nonempty(inputs.dtype)

    def sum_of(value: tf.Tensor) -> tf.Tensor:
        value = tf.where(mask, value, tf.zeros_like(value))
        return tf.reduce_sum(value, axes, keepdims=True) * present

    total, count = here.differentiable_all_reduce([sum_of(inputs), sum_of(tf.ones_like(inputs))])
    epsilon = keras.config.epsilon()
    mean = total / (count + epsilon)
    (squares,) = here.differentiable_all_reduce([sum_of(tf.square(inputs - mean))])
    return tf.squeeze(mean), tf.squeeze(squares / (count + epsilon))


_RATIOS = (keras.losses.dice, keras.losses.tversky)


def _reduce_loss(
    here: StepContext,
    original: Callable[..., tf.Tensor],
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: tf.DType | str | None = None,
) -> tf.Tensor:
    """Keras's reduction of a loss over the part; its weighted mean over parts is the global one."""
    reduce = functools.partial(original, sample_weight=sample_weight, reduction=reduction)
    loss = reduce(values, mask=mask, dtype=dtype)
    if loss.shape.rank != 0:
        return loss  # not reduced here
    if values.shape.rank == 0:
        if sample_weight is None or mask is not None:
            return loss
        weights = reduce(tf.ones_like(values))
        if reduction == "mean_with_sample_weight":
            return values * weights  # not a ratio of sums, which would cause a warning
        return _weighted_number(here, values, weights, reduction)
    if reduction == "sum":
        if here.has_all_rows(values):
            return loss
        return tf.math.divide_no_nan(loss, here.batch_fraction(loss.dtype))
    # What the mean divides by, where that is not the number of rows.
    if reduction == "mean_with_sample_weight":
        divisor = kp.loss_weights(sample_weight, mask, reduction, loss.dtype)
    else:
        divisor = mask
    if divisor is None:
        return loss
    mine = tf.reduce_sum(tf.cast(divisor, loss.dtype)) * here.is_nonempty(loss.dtype)
    (whole,) = here.all_reduce([mine])
    return loss * tf.math.divide_no_nan(mine, whole * here.batch_fraction(loss.dtype))


def _weighted_number(
    here: StepContext, values: tf.Tensor, weights: tf.Tensor, reduction: str | None
) -> tf.Tensor:
    """A loss function's one number for the batch: the mean over parts, times the weights of all."""
    if reduction == "sum":
        mine = tf.math.multiply_no_nan(weights, here.is_nonempty(weights.dtype))
    else:
        mine = here.contribution(weights)
    return values * here.all_reduce([mine])[0]


def _loss_of_batch(
    here: StepContext,
    original: Callable[..., tf.Tensor],
    loss: keras.losses.Loss,
    *given: Any,
    **named: Any,
) -> tf.Tensor:
    """A loss of Keras's or the user's; Dice and Tversky are ratios of sums over the whole batch."""
    is_function = type(loss).call is keras.losses.Dice.call
    config = loss.get_config() if is_function and loss.fn in _RATIOS else {"axis": "any"}
    if config.get("axis") is None:
        loss = _RatioOfSums(here, loss)
    return original(loss, *given, **named)


@contextlib.contextmanager
def _average_loss(
    here: StepContext, original: Callable[..., Any], losses: tf.Tensor
) -> Iterator[None]:
    """Scope of `tf.nn.compute_average_loss`, whose result is a mean over the rows at hand.

    Given a `global_batch_size`, it divides the sum over the part by the rows of all parts.
    """
    is_mean = here.has_all_rows(losses)

    def replicas(*_: Any) -> int:
        nonlocal is_mean
        is_mean = True  # no size was given: it divides by the rows at hand
        return 1

    def divide(original: Callable[..., tf.Tensor], total: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        loss = original(total, size)
        return loss if is_mean else original(loss, here.batch_fraction(loss.dtype))

    with original(losses), substitutes({"replicas": replicas, "divide_average_loss": divide}):
        yield


class _RatioOfSums(keras.losses.Loss):
    """Dice or Tversky over the rows of all replicas."""

    def __init__(self, here: StepContext, loss: keras.losses.Loss):
        super().__init__(loss.name, loss.reduction, loss.dtype)
        self._here = here
        self._loss = loss

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        here = self._here
        y_pred = tf.convert_to_tensor(y_pred)
        y_true = tf.cast(y_true, y_pred.dtype)
        present = here.is_nonempty(y_pred.dtype)
        sums = [tf.reduce_sum(value) * present for value in (y_true * y_pred, y_true, y_pred)]
        both, wanted, found = here.differentiable_all_reduce(sums)
        # Three numbers with the sums of all, for the formula of whatever release of Keras.
        one, zero = tf.ones_like(both), tf.zeros_like(both)
        three = tf.stack([one, wanted - one, zero]), tf.stack([both, zero, found - both])
        return self._loss.call(*three)


def _clear_losses(here: StepContext, original: Callable[..., None], layer: keras.Layer) -> None:
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


def _added_loss(
    here: StepContext, original: Callable[..., tf.Tensor], model: keras.Model, loss: tf.Tensor
) -> tf.Tensor:
    """A layer's `add_loss`; of one number for each example Keras takes the sum, as of all."""
    total = original(model, loss)
    if not here.has_rows(loss):
        return total
    return tf.math.divide_no_nan(total, here.batch_fraction(total.dtype))


def _gradient(
    here: StepContext,
    original: Callable[..., Structure],
    tape: tf.GradientTape,
    target: Structure,
    sources: Structure,
    output_gradients: Structure = None,
    *options: Any,
    **named_options: Any,
) -> Structure:
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


def _of_sums(here: StepContext, targets: list[tf.Tensor], output_gradients: Structure) -> Structure:
    """The upstream gradients of targets, over the part's share for those that have rows.

    Raises:
        TrainingError: it cannot be told of one.
    """
    for target in targets:
        if here.may_have_rows(target):
            raise TrainingError(
                "a loss whose gradient is taken must be one number, or one for each row, got shape"
                f" {target.shape}, which may have several for each row of this replica's part of"
                " the batch. Sum it up first, which leaves the gradient as it is on one device: to"
                " one number for each row with tf.reduce_sum(loss, axis=...) if it has rows, with"
                " tf.reduce_sum(loss) if not."
            )
    if not any(map(here.has_rows, targets)):
        return output_gradients
    return [
        upstream * tf.math.reciprocal_no_nan(here.batch_fraction(upstream.dtype))
        if here.has_rows(target)
        else upstream
        for target, upstream in zip(targets, _upstream(targets, output_gradients), strict=True)
    ]


def _upstream(targets: list[tf.Tensor], given: Structure) -> list[tf.Tensor]:
    """The upstream gradient of each target, ones where none is given."""
    return [tf.ones_like(t) for t in targets] if given is None else tf.nest.flatten(given)
