"""What the replaced functions of Keras and TensorFlow do in a replica's step.

A step on several replicas gives the losses, gradients, updates and metrics of one device with the
whole batch. docs/exactness.md states the rules; each function here is a part of one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any

import keras
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure
from tfdist_ext.errors import TrainingError
from tfdist_ext.messages import shown
from tfdist_ext.strategies._tf_private import is_recording
from tfdist_ext.strategies.reductions import STATISTIC
from tfdist_ext.strategies.traced_replica import computed_once, replica_id
from tfdist_ext.training._keras_private import (
    Original,
    Target,
    flat_layers,
    loss_ids,
    not_called,
    overrides,
    seed_generators,
    stateless_scope,
    substitutes,
    trained_by,
    uses_keras_step,
)
from tfdist_ext.training.steps.context import (
    StepContext,
    all_rows,
    current_graph,
    reduced_for,
    running_step,
)
from tfdist_ext.training.steps.mixing import mixed_rows
from tfdist_ext.training.steps.parts import OptimizerParts, sums_of_parts
from tfdist_ext.training.steps.random_numbers import RANDOM, REFUSED_IN_UPDATES, rows_at
from tfdist_ext.training.steps.row_updates import RowUpdates
from tfdist_ext.training.steps.rows import Gradient, symbolic_tensors, tensor_key
from tfdist_ext.training.steps.scope import (
    ReplicaScope,
    check_equal,
    check_value,
    shared_by_replicas,
    take_rows,
    warn_of_sums,
)
from tfdist_ext.training.steps.step_timer import timestamp_after
from tfdist_ext.training.variables import (
    LocalCopies,
    UpdatesInPlace,
    broadcast_from_owner,
    check_built,
    default_strategy,
    default_strategy_scope,
    is_updated_once,
    local_copy,
    optimizers_of,
    owner_copy,
    parts_of,
    with_inner_optimizers,
)
from tfdist_ext.user_frames import warn


def substitutes_of(context: StepContext) -> Mapping[str, Callable[..., Any]]:
    """Returns the functions that replace those of Keras and TensorFlow in a step, by key."""
    functions: dict[str, Callable[..., Any]] = {
        "apply": _apply,
        "reduce_loss": _reduce_loss,
        "loss": _loss_of_batch,
        "average_loss": _average_loss,
        "clear_losses": _clear_losses,
        "added_loss": _added_loss,
        "gradient": _gradient,
        "vectorize": _vectorize,
        "update_mean": _update_mean,
        "moments": _moments,
        "replicas": lambda context, original, strategy: 1,
        "take": _take,
        **RANDOM,
    }
    if context.replicas > 1 and not context.on_tpu:
        functions |= {"write_variable": _write_variable, "update_variable": _update_variable}
    return {key: functools.partial(function, context) for key, function in functions.items()}


def _take(
    context: StepContext,
    original: Original,
    x: Any,
    indices: Any,
    axis: int | None = None,
) -> tf.Tensor:
    x = x if axis is None else rows_at(context, x, indices, axis)
    return take_rows(original, x, indices, axis)


def _write_variable(
    context: StepContext, original: Original, variable: tf.Variable, *args: Any, **named: Any
) -> Any:
    """Handles a write to a tf.Variable of the user.

    Each writing method calls `_lazy_read` with the operation that wrote, None in eager code. Only
    `assign` does not with read_value=False: it returns that operation.
    """
    result = original(variable, *args, **named)
    op = args[0] if original.__name__ == "_lazy_read" else result
    scope = stateless_scope()
    if isinstance(scope, ReplicaScope) and isinstance(op, tf.Operation | None):
        values = [] if op is None else op.inputs[1:]
        for value in values:
            check_value(context, variable, value)
            if variable.dtype.is_floating:
                warn_of_sums(context, variable.name, value)
        if op is not None and not variable.dtype.is_floating:
            check_equal(context, variable, values, op.type)
        elif op is not None and ("Scatter" in op.type or "Slice" in op.type):
            check_equal(context, variable, values[0], op.type)
        scope.copies.add(variable)
    return result


def _update_variable(
    context: StepContext, original: Original, variable: tf.Variable, *args: Any, **named: Any
) -> Any:
    """Updates this replica's copy of a mirrored tf.Variable of the user."""
    del original
    if hasattr(variable, "get") or variable.aggregation == tf.VariableAggregation.SUM:
        raise shared_by_replicas(variable, context.local_replicas)
    update, value = args
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    return update(copies[replica_id() % len(copies)], value, **named)


def check_called(
    model: keras.Model, kind: str, called: Set[str], written: Container[int], losses: Set[int]
) -> None:
    """Checks that a step has called the replaced functions that its model must call.

    A new release of Keras may compute something without them, and train on wrong numbers.

    Args:
        kind: "train" or "test".
        called: keys of `REPLACED` that the step has called.
        written: ids of the variables that the step has written.
        losses: ids of what the layers have given to add_loss.
    """
    of_keras = uses_keras_step(model, kind)
    computes_loss = of_keras and not overrides(model, "compute_loss")
    trains = of_keras and kind == "train" and bool(model.trainable_variables)
    required = {
        "clear_losses": of_keras,
        "update_mean": of_keras,
        "loss": computes_loss and any(map(_is_reduced, keras.tree.flatten(model.loss))),
        "reduce_loss": "loss" in called,
        "gradient": trains,
        "apply": trains,
        "replicas": of_keras,
        **dict.fromkeys(("added_loss", "moments", "draw"), False),
    }
    for layer in flat_layers(model):
        required["added_loss"] |= computes_loss and not losses.isdisjoint(loss_ids(layer))
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            required["moments"] |= id(layer.moving_mean) in written
        if type(layer).__module__.startswith("keras.") and "shuffle" not in called:
            required["draw"] |= any(id(each.state) in written for each in seed_generators(layer))
    for key, is_required in required.items():
        if is_required and key not in called:
            raise not_called(key)


def _is_reduced(loss: object) -> bool:
    """Whether one of the losses given to `compile` is called as Keras's own are."""
    if isinstance(loss, keras.losses.Loss):
        return type(loss).__call__ is keras.losses.Loss.__call__
    return loss is not None


def check_activity_regularizers(model: keras.Model) -> None:
    """Raise TrainingError if this release of Keras sums the losses of activities over rows."""
    if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14):
        return
    for layer in flat_layers(model):
        if layer.activity_regularizer is not None:
            raise TrainingError(
                f"The activity_regularizer of layer {layer.name!r} is not supported on several"
                f" replicas with Keras {keras.__version__}, which adds the sum over the examples of"
                " a replica. Install Keras 3.14 or newer, or call add_loss with one number per"
                " example in a custom layer."
            )


def own_applies(model: keras.Model) -> list[Target]:
    """Returns the `apply` methods that the classes of the model's optimizers override.

    An override is replaced, because it may use the gradients before it calls Keras's method.
    """
    of_keras = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    owners = dict.fromkeys(
        owner
        for optimizer in optimizers_of(model).values()
        for owner in itertools.takewhile(lambda base: base not in of_keras, type(optimizer).mro())
    )
    names = ("apply", "apply_gradients")
    return [
        Target("apply", owner, name) for owner in owners for name in names if name in vars(owner)
    ]


def _apply(
    context: StepContext,
    original: Original,
    optimizer: keras.optimizers.Optimizer,
    grads: Iterable[Any],
    *more: Any,
    **named: Any,
) -> Any:
    """Calls an optimizer's `apply` with the gradients of the global batch.

    It is `optimizer.apply(grads, variables)`, or `apply_gradients(zip(grads, variables))` of an
    optimizer of the user's. It may be a method that is not linear, or has a state of its own.
    """
    check_built(optimizer)
    grads = list(grads)
    has_pairs = bool(grads) and isinstance(grads[0], tuple | list)
    if has_pairs:
        grads, variables = map(list, zip(*grads, strict=True))
    else:
        given = [each for each in [*more, *named.values()] if isinstance(each, list | tuple)]
        variables = list(given[0]) if given else trained_by(optimizer)

    def apply(grads: Sequence[Gradient | None], variables: Sequence[Any] = variables) -> Any:
        if has_pairs:
            pairs = list(zip(grads, variables, strict=True))
            result = original(optimizer, pairs, *more, **named)
            return optimizer.iterations if result is None else result
        args = [variables if isinstance(each, list | tuple) else each for each in more]
        options = {k: variables if isinstance(v, list | tuple) else v for k, v in named.items()}
        return original(optimizer, grads, *args, **options)

    if (shared := parts_of(optimizer)) is not None:
        return _apply_to_parts(context, shared, grads, variables, apply)
    # Gradients that the step has summed are equal on all replicas, whatever the step did to them.
    # If the numbers of gradients and variables differ, Keras raises an error.
    local = [
        i
        for i, gradient in enumerate(grads[: len(variables)])
        if gradient is not None and not context.equal.has(gradient)
    ]
    warn_of_mixed_rows(context, [grads[i] for i in local])
    sums = [context.weighted(grads[i]) for i in local]
    if not context.on_tpu:  # there Keras sums, after it has clipped
        sums = context.sums.all_reduce(sums, [reduced_for("gradient", variables[i]) for i in local])
    for i, total in zip(local, sums, strict=True):
        grads[i] = total
    if context.on_tpu:
        with running_step(None):
            return apply(grads)
    strategy = tf.distribute.get_strategy()
    optimizers = with_inner_optimizers(optimizer)
    touched = [*variables, *(v for each in optimizers for v in each.variables)]
    if context.local_replicas > 1 and is_updated_once(touched, strategy, context.local_replicas):
        _update_once(context, optimizer, grads, touched, apply)
        return optimizer.iterations
    number = replica_id()
    copies = LocalCopies(lambda variable: local_copy(variable, strategy, number), optimizers)
    drawing = substitutes(REFUSED_IN_UPDATES if context.replicas > 1 else {})
    updates = RowUpdates(default_strategy(), optimizers, context.row_rules)
    with running_step(None), drawing, default_strategy_scope(optimizers, updates), copies:
        result = apply(grads)
        updates.check_decays()
        return result


def _apply_to_parts(
    context: StepContext,
    shared: OptimizerParts,
    grads: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
    apply: Callable[[Sequence[Gradient | None], Sequence[Any]], Any],
) -> Any:
    """Update the parts of weights that this worker owns.

    Args:
        grads: of this replica's part of the batch, or what the step has made of their sums.
        apply: called with the gradients of the global batch for the parts, and the parts.
    """
    context.sums.check_graph()
    strategy = tf.distribute.get_strategy()
    parts = [shared.part_of(variable) for variable in variables]
    if any(part is variable for part, variable in zip(parts, variables, strict=True)):
        return apply(grads, variables)  # Keras names the variable that the optimizer lacks
    mine: list[Gradient | None] = []
    dense: list[int] = []
    sparse: list[int] = []
    for number, (gradient, part) in enumerate(zip(grads, parts, strict=False)):
        if gradient is not None and context.replicas > 1 and not context.equal.has(gradient):
            gradient = context.weighted(gradient)
            (sparse if isinstance(gradient, tf.IndexedSlices) else dense).append(number)
        elif gradient is not None:
            gradient = part.of_whole(gradient)
        mine.append(gradient)
    what = [reduced_for("gradient", variables[number]) for number in sparse]
    slices = context.sums.all_reduce([mine[number] for number in sparse], what)
    for number, total in zip(sparse, slices, strict=True):
        mine[number] = parts[number].of_whole(total)
    values = [tf.ensure_shape(mine[number], variables[number].shape) for number in dense]
    sums = functools.partial(sums_of_parts, parts=[parts[number] for number in dense])
    for number, total in zip(dense, context.sums.synchronize(sums, values), strict=True):
        mine[number] = total
    updating = shared.updating(strategy, context.row_rules)
    with running_step(None), substitutes(REFUSED_IN_UPDATES), updating:
        return apply(mine, parts)


def _update_once(
    context: StepContext,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Gradient | None],
    touched: Sequence[keras.Variable],
    apply: Callable[[Sequence[Gradient | None]], Any],
) -> None:
    """Update each variable on its owner, for all replicas of this worker.

    Args:
        grads: the gradients of the global batch.
        touched: the variables that the update may write.
        apply: called with the gradients.
    """
    strategy = tf.distribute.get_strategy()
    optimizers = with_inner_optimizers(optimizer)

    def update(values: list[Gradient]) -> tf.Tensor:
        sums = [strategy.experimental_local_results(each)[0] for each in values]
        rest = iter(sums)
        copies = LocalCopies(lambda variable: owner_copy(variable, strategy), optimizers)
        updates = RowUpdates(UpdatesInPlace(optimizer), optimizers, context.row_rules)
        with running_step(None), default_strategy_scope(optimizers, updates), copies:
            apply([None if each is None else next(rest) for each in grads])
            updates.check_decays()
        broadcast_from_owner([*touched, *copies.used], strategy)
        return timestamp_after(sums)

    context.sums.check_graph()
    values = [gradient for gradient in grads if gradient is not None]
    context.sums.synchronize(functools.partial(computed_once, update), values)


def _update_mean(
    context: StepContext,
    original: Original,
    metric: keras.metrics.Metric,
    values: npt.ArrayLike | tf.Tensor,
    sample_weight: npt.ArrayLike | tf.Tensor | None = None,
) -> Any:
    """Updates a mean. A single number is the mean of the part, and counts once in a step."""
    share = context.batch_fraction(metric.dtype)
    if sample_weight is None and len(getattr(values, "shape", ())) == 0:
        warn_of_mixed_rows(context, values)
        sample_weight = share
    elif context.rows_in(values) == "batch":  # equal on all replicas
        weights = tf.ones_like(values) if sample_weight is None else sample_weight
        sample_weight = tf.cast(weights, metric.dtype) * share
    return original(metric, values, sample_weight)


def _vectorize(context: StepContext, original: Original, *args: Any, **named: Any) -> Any:
    """Traces the function of a vectorized map, in which a gradient is that of a single row."""
    with substitutes({"gradient": None}):
        return original(*args, **named)


def _moments(
    context: StepContext,
    original: Original,
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel, of a synchronized layer over all replicas."""
    if not layer.synchronized:
        moments = original(layer, inputs, mask)
        for moment in symbolic_tensors(moments):  # `distribute` warns of them
            context.exact[tensor_key(moment)] = [inputs]
            context.statistics[tensor_key(moment)] = False
        return moments
    counted = tf.ones_like(inputs)
    if mask is not None:
        counted *= tf.cast(tf.cast(mask, tf.bool), inputs.dtype)[..., tf.newaxis]
        inputs = tf.math.multiply_no_nan(inputs, counted)
    rank = len(inputs.shape)
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]
    sums = [tf.reduce_sum(value, axes) for value in (inputs, tf.square(inputs), counted)]
    total, squares, count = context.differentiable_sum(list(map(context.where_nonempty, sums)))
    mean = tf.math.divide_no_nan(total, count)
    # Keras's formula of a synchronized layer
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    return mean, variance


_RATIOS = (keras.losses.dice, keras.losses.tversky)

_REDUCTIONS = ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight", "none", None)


def _reduce_loss(
    context: StepContext,
    original: Original,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """Reduces a loss over the part, so that the weighted mean over parts is the global loss."""
    loss = _reduced(context, original, values, sample_weight, *more, **named)
    if loss is not values:
        before = symbolic_tensors([values, sample_weight])
        context.exact.update({tensor_key(each): before for each in symbolic_tensors(loss)})
    return loss


def _reduced(
    context: StepContext,
    original: Original,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None,
    mask: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: tf.DType | str | None = None,
) -> tf.Tensor:
    if reduction not in _REDUCTIONS:
        raise TrainingError(
            f"The reduction {reduction!r} of a loss is not supported on several replicas. Use"
            f" {shown(_REDUCTIONS)}."
        )
    reduce = functools.partial(original, sample_weight=sample_weight, reduction=reduction)
    loss = reduce(values, mask=mask, dtype=dtype)
    if loss.shape.rank != 0:
        return loss  # reduction=None
    if values.shape.rank == 0:
        if sample_weight is None or mask is not None or reduction == "mean_with_sample_weight":
            return loss
        # The mean over parts, times the weights of all rows.
        weights = reduce(tf.ones_like(values))
        weigh = context.where_nonempty if reduction == "sum" else context.weighted
        return values * context.sums.all_reduce([weigh(weights)])[0]
    if reduction == "sum":
        return context.sum_over_rows(loss, values)
    counted = sample_weight if reduction == "mean_with_sample_weight" else None
    rows = context.rows_of(values)
    is_selection = rows is not None and (rows.is_selection or not rows.blocks)
    if counted is None and mask is None and not is_selection:
        return loss  # divided by the number of rows
    # Keras's `apply_mask` scales the weights so that the sum is divided by the rows that count.
    ones = tf.ones_like(values, loss.dtype)
    divisor = original(ones, sample_weight=counted, mask=mask, reduction="sum")
    mine = context.where_nonempty(divisor)
    (whole,) = context.sums.all_reduce([mine])
    if is_selection:  # the part may have none of the selected rows
        total = original(values, sample_weight=sample_weight, mask=mask, reduction="sum")
        return tf.math.divide_no_nan(total, context.batch_fraction(total.dtype)) / whole
    return loss * tf.math.divide_no_nan(mine, whole * context.batch_fraction(loss.dtype))


def _loss_of_batch(
    context: StepContext,
    original: Original,
    loss: keras.losses.Loss,
    y_true: Any,
    y_pred: Any,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """Calls a loss; those that relate rows to each other, with the rows of all replicas.

    Without an axis, Dice and Tversky are ratios of sums over the whole batch.
    """
    is_ratio = type(loss).call is keras.losses.Dice.call and loss.fn in _RATIOS
    if is_ratio and loss.get_config().get("axis") is None:
        y_true, y_pred = all_rows((y_true, y_pred))
    elif isinstance(loss, keras.losses.Circle):
        y_true, y_pred, *more = all_rows((y_true, y_pred, *more))
        named = all_rows(named)
    return original(loss, y_true, y_pred, *more, **named)


def _average_loss(
    context: StepContext,
    original: Original,
    losses: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> tf.Tensor:
    """Calls `tf.nn.compute_average_loss`, and makes its result a mean over the part."""
    losses = tf.convert_to_tensor(losses)
    rows = context.rows_of(losses)
    if global_batch_size is None and rows is not None and rows.is_selection:
        mine = context.where_nonempty(tf.shape(losses, tf.int64)[0])
        (global_batch_size,) = context.sums.all_reduce([mine])
    loss = original(losses, sample_weight, global_batch_size)
    if global_batch_size is None or context.rows_in(losses) == "batch":
        return loss  # divided by as many rows as it is the sum of
    return tf.math.divide_no_nan(loss, context.batch_fraction(loss.dtype))


def _clear_losses(context: StepContext, original: Original, layer: keras.Layer) -> None:
    """Drops the losses that this replica's last call of a layer has added.

    A layer keeps the ids of its losses, and all replicas share the layer. While a replica waits for
    the others in the middle of its step, their calls of the layer would drop its losses.
    """
    scope = stateless_scope()
    if not isinstance(scope, ReplicaScope):
        return original(layer)
    scope.forget_losses(layer)


def _added_loss(
    context: StepContext, original: Original, model: keras.Model, loss: tf.Tensor
) -> tf.Tensor:
    """Adds up what a layer gave to `add_loss`; Keras sums one number per row over all rows."""
    return context.sum_over_rows(original(model, loss), loss)


def _gradient(
    context: StepContext,
    original: Original,
    tape: tf.GradientTape,
    target: Structure,
    sources: Structure,
    output_gradients: Structure = None,
    *options: Any,
    **named_options: Any,
) -> Structure:
    """Returns a tape's gradient of the loss of the global batch.

    That of a variable is summed over all replicas. That of a tensor with rows has the rows of this
    part. A loss with one number per row is a sum over rows, not a mean. Inside another tape, or a
    graph in the step's graph, the gradient of a variable is that of the part, and `_apply` sums it.
    """
    if context.replicas == 1:
        return original(tape, target, sources, output_gradients, *options, **named_options)
    targets = tf.nest.flatten(target)
    warn_of_mixed_rows(context, targets)
    upstream = _upstream(context, targets, output_gradients)
    with substitutes({"gradient": None}):  # a custom gradient may call a tape
        made = original(tape, target, sources, upstream, *options, **named_options)
    # Replicas cannot wait for each other in inner graphs. On TPUs Keras's optimizer sums. Another
    # tape would want the gradient of the sum.
    is_summed_later = context.sums_in_apply or context.on_tpu
    is_inside = current_graph() is not context.graph or _is_inside_of_another(tape)
    flat = tf.nest.flatten(made)
    summed: dict[int, Any] = {}
    for number, source in enumerate(tf.nest.flatten(sources)):
        is_variable = isinstance(source, tf.Variable | keras.Variable)
        if flat[number] is None or (is_variable and (is_inside or is_summed_later)):
            continue
        flat[number] = context.weighted(flat[number])
        if is_variable or (context.equal.has(source) and not is_inside):
            summed[number] = source
    what = [
        reduced_for("gradient", source)
        if isinstance(source, tf.Variable | keras.Variable)
        else STATISTIC
        for source in summed.values()
    ]
    sums = context.sums.all_reduce([flat[number] for number in summed], what)
    for number, total in zip(summed, sums, strict=True):
        flat[number] = total
    return tf.nest.pack_sequence_as(made, flat)


def _is_inside_of_another(tape: tf.GradientTape) -> bool:
    """Whether another tape records. A persistent tape may be asked in its own scope."""
    try:
        with tape.stop_recording():
            return is_recording()
    except (RuntimeError, ValueError):  # it does not record
        return is_recording()


def _upstream(context: StepContext, targets: list[tf.Tensor], given: Structure) -> list[tf.Tensor]:
    """Returns the upstream gradient of each target, of rows divided by `batch_fraction`."""
    upstream = list(map(tf.ones_like, targets)) if given is None else tf.nest.flatten(given)
    return [
        each * tf.math.reciprocal_no_nan(context.batch_fraction(each.dtype))
        if context.rows_in(target) == "part"
        else each
        for target, each in zip(targets, upstream, strict=True)
    ]


def warn_of_mixed_rows(context: StepContext, targets: Structure) -> None:
    """Warns once, while the first replica is traced, if a step mixes the rows of the batch."""
    if context.replicas == 1 or context.graph is None or context.on_tpu:
        return
    targets = symbolic_tensors(targets)
    if replica_id() % context.local_replicas == 0 and (
        mixed := mixed_rows(targets, context.equal, context.exact, context.statistics)
    ):
        warn(
            f"The step {mixed}. Each of {context.replicas} replicas sees"
            " only its own rows, so the result differs from one device. Compute it from the rows"
            " of all replicas, such as tfd.all_rows(x) in place of x. For a loss over pairs of"
            " rows, take one side from tfd.all_rows: tf.matmul(queries, tfd.all_rows(candidates),"
            " transpose_b=True). For a mean of selected rows, give a loss that returns one number"
            " for each row to compile."
        )
