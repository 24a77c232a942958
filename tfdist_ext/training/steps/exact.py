"""What the replaced functions of Keras and TensorFlow do in a replica's step.

A step on several replicas gives the losses, gradients, updates and metrics of one device with the
whole batch. docs/exactness.md states the rules; each function here is a part of one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
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
    AGGREGATING_ASSIGN,
    ASSIGN_DEPENDENCIES,
    LAZY_READ,
    MIRRORED_UPDATE,
    PFOR,
    REDUCE_EXAMPLES,
    REDUCE_LOSS,
    Original,
    flat_layers,
    loss_ids,
    overrides,
    replaces,
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
from tfdist_ext.training.steps.random_numbers import (
    gather,
    random_operation,
    refuse_to_draw,
    shuffle,
)
from tfdist_ext.training.steps.row_updates import RowUpdates
from tfdist_ext.training.steps.rows import Gradient, mixed_rows, symbolic_tensors, tensor_key
from tfdist_ext.training.steps.scope import (
    ReplicaScope,
    check_equal,
    check_value,
    shared_by_replicas,
    take,
    warn_of_sums,
)
from tfdist_ext.training.steps.sharded_optimizer import ShardedOptimizer, sums_of_parts
from tfdist_ext.training.steps.step_timer import timestamp_after
from tfdist_ext.training.variables import (
    LocalCopies,
    UpdatesInPlace,
    broadcast_from_owner,
    default_strategy,
    default_strategy_scope,
    is_updated_once,
    local_copy,
    owner_copy,
    sharded_optimizer_of,
    with_inner_optimizers,
)
from tfdist_ext.user_frames import warn


def substitutes_of(context: StepContext) -> Mapping[Any, Callable[..., Any]]:
    """Returns what a step calls in place of functions of Keras and TensorFlow."""
    replacements = [
        *(optimizer_apply, tape_gradient, vectorized_map, call_loss, reduce_loss, average_loss),
        *(added_loss, clear_losses, update_mean, moments, replicas_in_sync, take),
        *(random_operation, shuffle, gather),
    ]
    if context.replicas > 1 and not context.on_tpu:
        replacements += [write_variable, update_variable]
    return {replaced: functools.partial(replaced.function, context) for replaced in replacements}


@replaces("tensorflow:distribute.Strategy.num_replicas_in_sync")
def replicas_in_sync(context: StepContext, original: Original, strategy: object) -> int:
    """Is 1: Keras and users divide a mean loss by it, but gradients are weighted already."""
    return 1


@replaces(LAZY_READ, ASSIGN_DEPENDENCIES)
def write_variable(
    context: StepContext, original: Original, variable: tf.Variable, *op: tf.Operation | None
) -> Any:
    """Averages over all rows what a replica assigns to a tf.Variable of the user.

    Each writing method calls `_lazy_read` with the operation that wrote, None in eager code. Only
    `assign`, `assign_add` and `assign_sub` do not with read_value=False.
    """
    result = original(variable, *op)
    _note_write(context, variable, *op)
    return result


def _note_write(
    context: StepContext, variable: tf.Variable, op: tf.Operation | None = None
) -> None:
    """Checks what an operation writes to a variable."""
    scope = stateless_scope()
    if not isinstance(scope, ReplicaScope):
        return
    if op is not None:
        values = op.inputs[1:]
        for value in values:
            check_value(context, variable, value)
            if variable.dtype.is_floating:
                warn_of_sums(context, variable.name, value)
        if not variable.dtype.is_floating:
            check_equal(context, variable, values, op.type)
        elif "Scatter" in op.type or "Slice" in op.type:
            check_equal(context, variable, values[0], op.type)
    scope.copies.add(variable)


@replaces(MIRRORED_UPDATE, AGGREGATING_ASSIGN)
def update_variable(
    context: StepContext, original: Original, variable: tf.Variable, *args: Any, **named: Any
) -> Any:
    """Writes the replica's own copy of a tf.Variable of the user, also in a cond."""
    if hasattr(variable, "get") or variable.aggregation == tf.VariableAggregation.SUM:
        raise shared_by_replicas(variable, context.local_replicas)
    update, value = args
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    result = update(copy := copies[replica_id() % len(copies)], value, **named)
    if isinstance(result, tf.Operation):  # read_value=False
        _note_write(context, copy, result)
    return result


def check_called(
    model: keras.Model, kind: str, called: Set[Any], written: Container[int], losses: Set[int]
) -> None:
    """Checks that a step has called the replaced functions that its model must call.

    A new release of Keras may compute something without them, and train on wrong numbers.

    Args:
        kind: "train" or "test".
        called: the replacements that the step has called.
        written: ids of the variables that the step has written.
        losses: ids of what the layers have given to add_loss.
    """
    of_keras = uses_keras_step(model, kind)
    computes_loss = of_keras and not overrides(model, "compute_loss")
    trains = of_keras and kind == "train" and bool(model.trainable_variables)
    required = {
        clear_losses: of_keras,
        update_mean: of_keras,
        call_loss: computes_loss and any(map(_is_reduced, keras.tree.flatten(model.loss))),
        reduce_loss: call_loss in called,
        tape_gradient: trains,
        optimizer_apply: trains,
        replicas_in_sync: of_keras,
        **dict.fromkeys((added_loss, moments, random_operation), False),
    }
    for layer in flat_layers(model):
        required[added_loss] |= computes_loss and not losses.isdisjoint(loss_ids(layer))
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            required[moments] |= id(layer.moving_mean) in written
        if type(layer).__module__.startswith("keras.") and shuffle not in called:
            seeds = [generator.state for generator in seed_generators(layer)]
            required[random_operation] |= any(id(state) in written for state in seeds)
    for replacement, is_required in required.items():
        if is_required and replacement not in called:
            raise replacement.not_called()


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


@replaces("keras:optimizers.Optimizer.apply", overrides=("apply", "apply_gradients"))
def optimizer_apply(
    context: StepContext,
    original: Original,
    optimizer: keras.optimizers.Optimizer,
    grads: Iterable[Any],
    *more: Any,
    **named: Any,
) -> Any:
    """Gets the gradients of the global batch, before it clips, accumulates or applies them.

    It is `optimizer.apply(grads, variables)`, or `apply_gradients(zip(grads, variables))` of an
    optimizer of the user's. An override may use the gradients before it calls Keras's method.
    """
    if not optimizer.built:
        raise TrainingError(
            f"A step uses the optimizer {optimizer.name!r}, which has no variables. Call its"
            " build(variables) in the function given to distribute(), after the model is built."
        )
    grads = list(grads)
    has_pairs = bool(grads) and isinstance(grads[0], tuple | list)
    if has_pairs:
        grads, variables = map(list, zip(*grads, strict=True))
    else:
        lists = [value for value in [*more, *named.values()] if isinstance(value, list | tuple)]
        variables = list(lists[0]) if lists else trained_by(optimizer)

    def apply(grads: Sequence[Gradient | None], variables: Sequence[Any] = variables) -> Any:
        if has_pairs:
            pairs = list(zip(grads, variables, strict=True))
            result = original(optimizer, pairs, *more, **named)
            return optimizer.iterations if result is None else result
        args = [variables if isinstance(value, list | tuple) else value for value in more]
        options = {k: variables if isinstance(v, list | tuple) else v for k, v in named.items()}
        return original(optimizer, grads, *args, **options)

    if (shared := sharded_optimizer_of(optimizer)) is not None:
        return _apply_to_parts(context, shared, grads, variables, apply)
    grads = _summed(context, grads, variables)
    if context.on_tpu:
        with running_step(None):
            return apply(grads)
    strategy = tf.distribute.get_strategy()
    optimizers = with_inner_optimizers(optimizer)
    touched = [*variables, *(v for optimizer in optimizers for v in optimizer.variables)]
    if context.local_replicas > 1 and is_updated_once(touched, strategy, context.local_replicas):
        _update_once(context, optimizer, grads, touched, apply)
        return optimizer.iterations
    number = replica_id()
    copies = LocalCopies(lambda variable: local_copy(variable, strategy, number), optimizers)
    drawing = substitutes({random_operation: refuse_to_draw} if context.replicas > 1 else {})
    with _updating(context, default_strategy(), optimizers, grads), drawing, copies:
        return apply(grads)


@contextlib.contextmanager
def _updating(
    context: StepContext,
    inner: Any,
    optimizers: Sequence[keras.optimizers.Optimizer],
    grads: Sequence[Gradient | None],
) -> Iterator[None]:
    """Scope in which optimizers update variables, or rows of tables where a gradient has rows.

    Args:
        inner: updates a variable on its device: an object with `extended.update`.
    """
    lazy = context.lazy_updates
    has_rows = lazy or any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
    updates = RowUpdates(inner, optimizers, lazy) if has_rows else inner
    with running_step(None), default_strategy_scope(optimizers, updates):
        yield
    if isinstance(updates, RowUpdates):
        updates.check_decays()


def _summed(
    context: StepContext, grads: Sequence[Gradient | None], variables: Sequence[keras.Variable]
) -> list[Gradient | None]:
    """Returns the gradients of the global batch.

    Gradients that the step has summed are equal on all replicas, whatever the step did to them.
    """
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
    by_index = dict(zip(local, sums, strict=True))
    return [by_index.get(i, gradient) for i, gradient in enumerate(grads)]


def _apply_to_parts(
    context: StepContext,
    shared: ShardedOptimizer,
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
    by_id = {id(part.variable): part for part in shared.parts}
    if any(id(variable) not in by_id for variable in variables):
        return apply(grads, variables)  # Keras names the variable that the optimizer lacks
    parts = [by_id[id(variable)] for variable in variables]
    local: list[Gradient | None] = []
    dense: list[int] = []
    sparse: list[int] = []
    for number, (gradient, part) in enumerate(zip(grads, parts, strict=False)):
        if gradient is not None and context.replicas > 1 and not context.equal.has(gradient):
            gradient = context.weighted(gradient)
            (sparse if isinstance(gradient, tf.IndexedSlices) else dense).append(number)
        elif gradient is not None:
            gradient = part.of_whole(gradient)
        local.append(gradient)
    what = [reduced_for("gradient", variables[number]) for number in sparse]
    slices = context.sums.all_reduce([local[number] for number in sparse], what)
    for number, total in zip(sparse, slices, strict=True):
        local[number] = parts[number].of_whole(total)
    values = [tf.ensure_shape(local[number], variables[number].shape) for number in dense]
    sums = functools.partial(sums_of_parts, parts=[parts[number] for number in dense])
    for number, total in zip(dense, context.sums.synchronize(sums, values), strict=True):
        local[number] = total
    updating = shared.updating(strategy, lazy=context.lazy_updates)
    with running_step(None), substitutes({random_operation: refuse_to_draw}), updating:
        return apply(local, parts)


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
        sums = [strategy.experimental_local_results(value)[0] for value in values]
        rest = iter(sums)
        copies = LocalCopies(lambda variable: owner_copy(variable, strategy), optimizers)
        with _updating(context, UpdatesInPlace(optimizer), optimizers, sums), copies:
            apply([None if gradient is None else next(rest) for gradient in grads])
        broadcast_from_owner([*touched, *copies.used], strategy)
        return timestamp_after(sums)

    context.sums.check_graph()
    values = [gradient for gradient in grads if gradient is not None]
    context.sums.synchronize(functools.partial(computed_once, update), values)


@replaces(REDUCE_EXAMPLES)
def update_mean(
    context: StepContext,
    original: Original,
    values: npt.ArrayLike | tf.Tensor,
    sample_weight: npt.ArrayLike | tf.Tensor | None,
    reduce_fn: Callable[..., tf.Tensor],
    dtype: str,
) -> Any:
    """Counts a single number in Mean and Sum, the mean over a part, with the part's share.

    A weight that depends on the part is the number's share already, such as the rows of the part.
    """
    share = context.batch_fraction(dtype)
    if len(getattr(values, "shape", ())) == 0 and context.equal.has(sample_weight):
        warn_of_mixed_rows(context, values)
        weight = 1.0 if sample_weight is None else tf.cast(sample_weight, dtype)
        sample_weight = weight * share
    elif context.rows_in(values) == "batch":  # equal on all replicas
        weights = tf.ones_like(values) if sample_weight is None else sample_weight
        sample_weight = tf.cast(weights, dtype) * share
    return original(values, sample_weight, reduce_fn, dtype)


@replaces(PFOR)
def vectorized_map(context: StepContext, original: Original, *args: Any, **named: Any) -> Any:
    """Computes the gradients of single rows in `tape.jacobian` and `tf.vectorized_map`."""
    with substitutes({tape_gradient: None}):
        return original(*args, **named)


@replaces("keras:layers.BatchNormalization._moments")
def moments(
    context: StepContext,
    original: Original,
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Weights replicas by their rows, also in the gradient, and applies the mask."""
    if not layer.synchronized:
        of_part = original(layer, inputs, mask)
        for moment in symbolic_tensors(of_part):  # `distribute` warns of them
            context.inputs_of_exact[tensor_key(moment)] = [inputs]
            context.statistics[tensor_key(moment)] = False
        return of_part
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


@replaces(REDUCE_LOSS)
def reduce_loss(
    context: StepContext,
    original: Original,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """Weighs a loss by the part's share of the divisor, which no public function returns."""
    loss = _reduced(context, original, values, sample_weight, *more, **named)
    if loss is not values:
        before = symbolic_tensors([values, sample_weight])
        context.inputs_of_exact.update(
            {tensor_key(tensor): before for tensor in symbolic_tensors(loss)}
        )
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
    share = context.where_nonempty(divisor)
    (whole,) = context.sums.all_reduce([share])
    if is_selection:  # the part may have none of the selected rows
        total = original(values, sample_weight=sample_weight, mask=mask, reduction="sum")
        return tf.math.divide_no_nan(total, whole * context.batch_fraction(total.dtype))
    return loss * tf.math.divide_no_nan(share, whole * context.batch_fraction(loss.dtype))


@replaces("keras:losses.Loss.__call__")
def call_loss(
    context: StepContext,
    original: Original,
    loss: keras.losses.Loss,
    y_true: Any,
    y_pred: Any,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """Computes Dice and Tversky, ratios of sums, and Circle from the rows of all replicas."""
    is_ratio = type(loss).call is keras.losses.Dice.call and loss.fn in _RATIOS
    if is_ratio and loss.get_config().get("axis") is None:
        y_true, y_pred = all_rows((y_true, y_pred))
    elif isinstance(loss, keras.losses.Circle):
        y_true, y_pred, *more = all_rows((y_true, y_pred, *more))
        named = all_rows(named)
    return original(loss, y_true, y_pred, *more, **named)


@replaces("tensorflow:nn.compute_average_loss")
def average_loss(
    context: StepContext,
    original: Original,
    losses: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> tf.Tensor:
    """Divides by the rows of all parts."""
    losses = tf.convert_to_tensor(losses)
    rows = context.rows_of(losses)
    if global_batch_size is None and rows is not None and rows.is_selection:
        selected = context.where_nonempty(tf.shape(losses, tf.int64)[0])
        (global_batch_size,) = context.sums.all_reduce([selected])
    loss = original(losses, sample_weight, global_batch_size)
    if global_batch_size is None or context.rows_in(losses) == "batch":
        return loss  # divided by as many rows as it is the sum of
    return tf.math.divide_no_nan(loss, context.batch_fraction(loss.dtype))


@replaces("keras:Layer._clear_losses")
def clear_losses(context: StepContext, original: Original, layer: keras.Layer) -> None:
    """Keeps the losses of other replicas, which share the layer.

    While a replica waits in the middle of its step, other replicas call the layer.
    """
    scope = stateless_scope()
    if not isinstance(scope, ReplicaScope):
        return original(layer)
    scope.forget_losses(layer)


@replaces("keras:Model._aggregate_additional_loss")
def added_loss(
    context: StepContext, original: Original, model: keras.Model, loss: tf.Tensor
) -> tf.Tensor:
    """Sums the losses from add_loss; a sum over the rows of a part is not a mean."""
    return context.sum_over_rows(original(model, loss), loss)


@replaces("tensorflow:GradientTape.gradient")
def tape_gradient(
    context: StepContext,
    original: Original,
    tape: tf.GradientTape,
    target: Structure,
    sources: Structure,
    output_gradients: Structure = None,
    *options: Any,
    **named_options: Any,
) -> Structure:
    """Returns the gradient of the global batch; only here is the shape of the loss known.

    That of a variable is summed over all replicas. That of a tensor with rows has the rows of this
    part. A loss with one number per row is a sum over rows, not a mean. Inside another tape, or a
    graph in the step's graph, a variable has the gradient of the part; `optimizer_apply` sums it.
    """
    if context.replicas == 1:
        return original(tape, target, sources, output_gradients, *options, **named_options)
    targets = tf.nest.flatten(target)
    warn_of_mixed_rows(context, targets)
    grads = output_gradients
    upstream = list(map(tf.ones_like, targets)) if grads is None else tf.nest.flatten(grads)
    upstream = [  # of rows, divided by their fraction of the batch
        gradient * tf.math.reciprocal_no_nan(context.batch_fraction(gradient.dtype))
        if context.rows_in(target) == "part"
        else gradient
        for target, gradient in zip(targets, upstream, strict=True)
    ]
    with substitutes({tape_gradient: None}):  # a custom gradient may call a tape
        gradients = original(tape, target, sources, upstream, *options, **named_options)
    # Replicas cannot wait for each other in inner graphs. On TPUs Keras's optimizer sums. Another
    # tape would want the gradient of the sum.
    is_summed_later = context.sums_in_apply or context.on_tpu
    is_inside = current_graph() is not context.graph or _is_inside_of_another(tape)
    flat = tf.nest.flatten(gradients)
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
    return tf.nest.pack_sequence_as(gradients, flat)


def _is_inside_of_another(tape: tf.GradientTape) -> bool:
    """Whether another tape records. A persistent tape itself may still record."""
    with contextlib.suppress(RuntimeError, ValueError), tape.stop_recording():
        return is_recording()
    return is_recording()  # it does not record


def warn_of_mixed_rows(context: StepContext, targets: Structure) -> None:
    """Warns once, while the first replica is traced, if a step mixes the rows of the batch."""
    if context.replicas == 1 or context.graph is None or context.on_tpu:
        return
    targets = symbolic_tensors(targets)
    if replica_id() % context.local_replicas:
        return
    known = context.inputs_of_exact, context.statistics, context.checked
    if mixed := mixed_rows(targets, context.equal, *known):
        warn(
            f"The step {mixed}. Each of {context.replicas} replicas sees"
            " only its own rows, so the result differs from one device. Compute it from the rows"
            " of all replicas, such as tfd.all_rows(x) in place of x. For a loss over pairs of"
            " rows, take one side from tfd.all_rows: tf.matmul(queries, tfd.all_rows(candidates),"
            " transpose_b=True). For a mean of selected rows, give a loss that returns one number"
            " for each row to compile."
        )
