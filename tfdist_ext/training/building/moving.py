"""Moves the variables of Keras models, optimizers and metrics into a strategy, and out of it.

A `keras.Variable` holds a `tf.Variable`. To move it, a new `tf.Variable` with the same value is
created in the scope of the strategy. The `keras.Variable` stays the same object, so layers,
optimizers, metrics, callbacks and the user keep their references.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.creating import pieces_of
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.strategies.owned_sums import owned_sums_of
from tfdist_ext.strategies.placed import PlacedParameterServers
from tfdist_ext.training._keras_private import (
    compile_arguments,
    flat_layers,
    initialize_again,
    is_watched,
    keys_of,
    layers_of,
    raw_value,
    set_raw_value,
    set_strategy,
    trained_by,
)
from tfdist_ext.training._tf_private import creating_without_broadcast, leave_container
from tfdist_ext.training.state import copies_of_piece, own_variables, owner_path, whole_value
from tfdist_ext.training.steps.parts import OptimizerParts, deferring_builds
from tfdist_ext.training.steps.scope import metrics_of
from tfdist_ext.training.variables import (
    PARTS,
    copies_of_one_name,
    default_strategy,
    optimizers_of,
    outside_of_scopes,
    parts_of,
    variables_of_steps,
    with_inner_optimizers,
)

_MIRRORED = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy


def creation_scope(
    strategy: tf.distribute.Strategy, created: list[tf.Variable] | None = None
) -> contextlib.ExitStack:
    """Returns the scope in which everything of a distributed model is created.

    Each of several workers creates its variables alone, and waits for no other.

    Args:
        created: gets the variables that need the chief's values when the workers have compared
            their models.
    """

    def note(create: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        variable = create(**kwargs)
        sendable = variable.dtype != tf.string and variable.shape.is_fully_defined()
        if tf.executing_eagerly() and sendable and created is not None:
            created.append(variable)
        return variable

    scope = contextlib.ExitStack()
    scope.enter_context(copies_of_one_name())
    if owned_sums_of(strategy) is not None:
        scope.enter_context(deferring_builds())
    scope.enter_context(strategy.scope())
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        scope.enter_context(creating_without_broadcast(strategy))
        scope.enter_context(tf.variable_creator_scope(note))
    places = isinstance(strategy, StrategyTemplate | PlacedParameterServers)
    scope.enter_context(variables_of_steps(in_pieces=not places))
    return scope


def move(model: keras.Model, strategy: tf.distribute.Strategy, created: list[tf.Variable]) -> bool:
    """Moves variables that are not in a strategy: of a model, its optimizers and its metrics.

    A user may add layers, and compile with optimizers and metrics, outside of the scope. If workers
    share the optimizers, a built optimizer gives its state to `OptimizerParts`, which builds it
    again.

    Args:
        created: see `creation_scope`.

    Returns:
        Whether a variable has moved.

    Raises:
        TrainingError: a layer holds a tf.Variable that was created outside of the strategy, or
            workers share an optimizer that has to move to another strategy.
    """
    shares_optimizers = owned_sums_of(strategy) is not None
    weights = [variable for variable in _variables(model) if not is_in(variable, strategy)]
    optimizers = [each for each in optimizers_of(model).values() if parts_of(each) is None]
    slots = [
        [variable for variable in optimizer.variables if not is_in(variable, strategy)]
        for optimizer in optimizers
    ]
    if not weights and not any(slots):
        return False
    _check_can_move(model, strategy)
    _forget_train_functions(weights)
    keys = keys_of(optimizers, weights)
    for optimizer in optimizers:
        if shares_optimizers and optimizer.built:
            vars(optimizer)[PARTS] = parts = OptimizerParts(optimizer, trained_by(optimizer))
            parts.initial = [variable.numpy() for variable in optimizer.variables]
    with _keeping_first_copies() as keeps, creation_scope(strategy, created):
        for variable in weights:
            _move(variable, strategy, keeps)
        for optimizer, variables in zip(optimizers, slots, strict=True):
            trained = trained_by(optimizer) if optimizer.built else ()
            owners = {owner.path.replace("/", "_"): owner for owner in trained}
            for variable in variables:
                owner = owners.get(owner_path(variable, owners))
                if owner is None:
                    _move(variable, strategy, keeps)
                elif not shares_optimizers:  # which creates them again
                    with strategy.extended.colocate_vars_with(raw_value(owner)):
                        _move(variable, strategy, keeps)
    replaced = dict(zip(keys, keys_of(optimizers, weights), strict=True))
    for optimizer in optimizers:
        set_strategy(with_inner_optimizers(optimizer), strategy, replaced)
    return True


def _variables(model: keras.Model) -> list[keras.Variable]:
    """Returns all variables but those of optimizers: weights, seeds, metrics."""
    metrics = metrics_of(model)
    found = [*model.variables, *(variable for metric in metrics for variable in metric.variables)]
    for part in layers_of(model, keras.Model):
        if part.compiled:
            found += _variables_of_compile(part)
    for optimizer in optimizers_of(model).values():  # it may train variables of another model
        if optimizer.built and parts_of(optimizer) is None:
            found += trained_by(optimizer)
    return list({id(variable): variable for variable in found}.values())


def _variables_of_compile(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the metrics that are arguments of `compile`."""
    try:
        arguments = compile_arguments(model)
    except (AttributeError, TypeError, TrainingError):  # the model has a compile() of its own
        return []
    given = keras.tree.flatten([arguments.get("metrics"), arguments.get("weighted_metrics")])
    metrics = [each for each in given if isinstance(each, keras.metrics.Metric)]
    return [variable for metric in metrics for variable in metric.variables]


def is_in(variable: keras.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a variable was created in the strategy's scope, or is not created yet."""
    value = raw_value(variable)
    return value is None or strategy.extended.variable_created_in_scope(value)


def _check_can_move(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    shared = [each for each in optimizers_of(model).values() if parts_of(each) is not None]
    if not all(is_in(variable, strategy) for each in shared for variable in each.variables):
        raise TrainingError(
            "The workers share the optimizer of this model (shard_optimizer=True), so the model"
            " cannot move to another strategy. Save a checkpoint, and restore it in a new model."
        )
    for layer in flat_layers(model):
        if isinstance(layer, keras.layers.TFSMLayer) and layer.weights:
            raise TrainingError(
                f"The layer {layer.name!r} is a TFSMLayer, whose variables cannot move to"
                f" {type(strategy).__name__}. Pass the function that builds the model:"
                " distribute(build, strategy)."
            )
        if type(layer).__module__.startswith("keras."):
            continue
        for name, variable in own_variables(layer).items():
            if not strategy.extended.variable_created_in_scope(variable):
                raise TrainingError(
                    f"{type(layer).__name__}.{name} is a tf.Variable, which cannot move to"
                    f" {type(strategy).__name__}. Create it with self.add_weight(), or pass the"
                    " function that builds the model: distribute(build, strategy)."
                )


def _forget_train_functions(weights: list[keras.Variable]) -> None:
    """Lets Keras trace the steps of other models again, which would write a single copy.

    Variables and layers have no list of the models that they are in.
    """
    moved = {*map(id, weights)}
    for found in gc.get_objects():
        is_fitted = issubclass(type(found), keras.Model) and vars(found).get("train_function")
        if is_fitted and not moved.isdisjoint(map(id, found.weights)):
            found.train_function = None


@contextlib.contextmanager
def _keeping_first_copies() -> Iterator[list[tf.Variable]]:
    """Scope to enter before the strategy's: the next variable may be one that exists.

    Yields:
        A list. A tf.Variable in it is returned in place of the next one that is created.
    """
    keeps: list[tf.Variable] = []

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        return keeps.pop() if keeps else next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        yield keeps


def _move(
    variable: keras.Variable, strategy: tf.distribute.Strategy, keeps: list[tf.Variable]
) -> None:
    """Creates the value of a variable again, in the current scope.

    A tf.Variable from outside of all strategies stays in use, as the copy of the first replica.
    Graphs that were traced before, such as those of a part of the model, read what is trained.
    """
    value, (first, _, _) = whole_value(variable), next(iter(pieces_of(raw_value(variable))))
    first = copies_of_piece(first)[0]
    default = default_strategy()
    is_kept = strategy is default
    if isinstance(strategy, _MIRRORED):
        is_kept = first.device == strategy.extended.worker_devices[0]
    if is_kept and default.extended.variable_created_in_scope(first):
        leave_container(first)
        keeps.append(first)

    def initializer(shape: tuple[int, ...], dtype: Any = None) -> tf.Tensor:
        return tf.constant(value, dtype)

    initialize_again(variable, initializer)
    keeps.clear()


@contextlib.contextmanager
def moved_out(model: keras.Model) -> Iterator[None]:
    """Scope in which the variables of a model are outside of any strategy, on this task alone.

    TensorFlow cannot export variables in shards, and traces variables on servers with their
    addresses.
    """
    before = [(variable, raw_value(variable)) for variable in model.variables]
    before = [(variable, value) for variable, value in before if value is not None]

    def create() -> None:
        for variable, _ in before:
            value, trainable = whole_value(variable), is_watched(variable)
            value = tf.Variable(value, trainable=trainable, name=variable.name)
            set_raw_value(variable, value, tuple(variable.shape))

    try:
        outside_of_scopes(create)
        yield
    finally:
        for variable, value in before:
            set_raw_value(variable, value, tuple(variable.shape))
