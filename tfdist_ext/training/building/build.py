"""A Keras model, with all that belongs to it, made inside a strategy's scope.

Every variable is made before a step is traced. Layers that keep a state for each row of a batch,
which cannot follow its row to a replica, are refused.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import PlacementError, TrainingError
from tfdist_ext.placement.live.learning import fresh_names, learn_specs
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.strategies import PlacedStrategy, StrategyTemplate
from tfdist_ext.strategies.placed import PlacedParameterServers
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import creating_without_broadcast
from tfdist_ext.training.building.build_from_step import build_from_step
from tfdist_ext.training.building.cloning import (
    clone_from_config,
    clone_model,
    copy_flags_and_assets,
    custom_objects_of,
    truncate_message,
)
from tfdist_ext.training.protocols import Specs, Structure
from tfdist_ext.training.steps.replaced import uses_keras_step
from tfdist_ext.training.steps.scope import metric_variables_on_one_copy
from tfdist_ext.training.variables import (
    all_built,
    copies_of_one_name,
    make_readable,
    optimizers_of,
    readable_numbers,
    slots_beside_shards,
)

__all__ = [
    "adopt",
    "batch_normalization_layers",
    "belongs_to",
    "build",
    "creation_scope",
    "recompile",
    "reject_stateful_rnns",
]


def creation_scope(
    strategy: tf.distribute.Strategy, created: list[tf.Variable] | None = None
) -> contextlib.ExitStack:
    """The scope in which everything of a distributed model is created.

    Each of several workers creates its variables alone, and waits for no other.

    Args:
        created: gets the variables that are to be given the chief's values when the workers have
            compared their models.
    """

    def note(create: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        variable = create(**kwargs)
        sendable = variable.dtype != tf.string and variable.shape.is_fully_defined()
        if tf.executing_eagerly() and sendable and created is not None:
            created.append(variable)
        return variable

    scope = contextlib.ExitStack()
    scope.enter_context(copies_of_one_name())
    scope.enter_context(strategy.scope())
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        scope.enter_context(creating_without_broadcast(strategy))
        scope.enter_context(tf.variable_creator_scope(note))
    scope.enter_context(metric_variables_on_one_copy())
    scope.enter_context(readable_numbers())
    # Both strategies place variables themselves.
    if not isinstance(strategy, StrategyTemplate | PlacedParameterServers):
        scope.enter_context(slots_beside_shards())
    return scope


def adopt(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy,
    created: list[tf.Variable],
) -> keras.Model:
    """The model made by a builder, or a copy of an existing one, on the strategy.

    Args:
        created: as `creation_scope` has it, here and below.

    Raises:
        TrainingError: neither a model nor a function that returns one, or a model that cannot
            be copied from its config.
        PlacementError: the strategy's placement does not fit the model.
    """
    is_model = isinstance(model_or_builder, keras.Model)
    if not is_model and not callable(model_or_builder):
        raise TrainingError(
            "model_or_builder must be a keras.Model, or a function without arguments that returns"
            f" one, got {model_or_builder!r}."
        )
    named_as_planned: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(strategy, PlacedParameterServers) and strategy.placer.plans_models:
        strategy.placer.learn(learn_specs(model_or_builder))
        named_as_planned = fresh_names()
    if isinstance(strategy, PlacedStrategy) and (specs := _specs_if_known(model_or_builder)):
        strategy.plan_model(specs)
        named_as_planned = fresh_names()
    if is_model:
        return _copy(model_or_builder, strategy, created)
    with creation_scope(strategy, created), named_as_planned:
        model = model_or_builder()
    if not isinstance(model, keras.Model):
        raise TrainingError(
            f"the function given to distribute() must return a keras.Model, got {model!r}."
        )
    if not all(belongs_to(variable, strategy) for variable in model.weights):
        return _copy(model, strategy, created)  # the function did not make it
    recompile(model, model, strategy, created)
    return model


def build(
    model: keras.Model,
    spec: Specs,
    strategy: tf.distribute.Strategy,
    created: list[tf.Variable] | None = None,
    *,
    kind: str = "train",
) -> None:
    """Make every variable, before a step is traced, from the structure of one global batch.

    Args:
        spec: tf.TypeSpecs of a batch, batch dimension unknown.
        kind: of the steps to come: "train", "test" or "predict", which needs no metrics, losses
            and optimizers.

    Raises:
        TrainingError: a layer keeps a state for each row of a batch, where rows go elsewhere; or
            only a step of the model's own could make its variables, and that fails.
    """
    reject_stateful_rnns(model, strategy)

    def symbol(spec: tf.TypeSpec | None) -> keras.KerasTensor | None:
        if spec is None:
            return None
        sparse = isinstance(spec, tf.SparseTensorSpec)
        return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=sparse)

    batch = keras.tree.map_structure(symbol, spec)
    with creation_scope(strategy, created):
        own_loss = type(model).compute_loss is not keras.Model.compute_loss
        if kind == "train" and own_loss and not all(each.built for each in kp.flat_layers(model)):
            # It may use layers that the call does not.
            with contextlib.suppress(TrainingError):
                build_from_step(model, kind, batch)
        _build_from(model, kind, batch)
        if kind != "predict" and not uses_keras_step(model, "train") and not all_built(model):
            build_from_step(model, "train", batch)
    if isinstance(strategy, PlacedStrategy):
        strategy.check_model([variable.path for variable in model.variables])
    make_readable(model)


def _build_from(model: keras.Model, kind: str, batch: Structure) -> None:
    """Build from one symbolic batch, by the model's `call` or else by its own step.

    Keras warns of a model whose `call` it cannot trace. Where the model's own step can be traced
    instead, nothing depends on that `call`. What Keras says of layers inside counts if one of them
    has no variables then.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            (kp.symbolic_call if kind == "predict" else kp.symbolic_build)(model, batch)
            failure = None
        except Exception as error:
            failure = error
    by_trial = failure is not None and not uses_keras_step(model, kind)
    # Where the trial fails, its error says more than Keras's warnings of the call.
    traced = by_trial and build_from_step(model, kind, batch)
    complete = all(layer.built for layer in kp.flat_layers(model))
    try:
        for warning in caught:
            text = str(warning.message)
            of_attempt = "unbuilt state" in text and (complete or f"'{model.name}'" in text)
            if not (traced and of_attempt):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
    finally:  # also where a warning is an error: the failure says more
        if failure is not None and not by_trial:
            raise failure


def belongs_to(variable: keras.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Whether a Keras variable was created in the strategy's scope (or not at all yet)."""
    value = kp.raw_value(variable)
    return value is None or strategy.extended.variable_created_in_scope(value)


def recompile(
    source: keras.Model,
    target: keras.Model,
    strategy: tf.distribute.Strategy,
    created: list[tf.Variable],
) -> None:
    """Compile `target` as `source` is, its optimizers and metrics made in the scope.

    Where they are there already (the usual case of a builder), nothing happens. A class with
    `compile_from_config` is compiled by it, as Keras does when it loads a model; of another
    `compile()` of the user's, the arguments are those that the model keeps under their names.

    Raises:
        TrainingError: a compile() whose arguments are not known, an optimizer or a metric that
            cannot be cloned, or an optimizer that trains variables of something else.
    """
    if not source.compiled:
        return
    before = optimizers_of(source)
    stateful = [*kp.metrics_in_use(source), *before.values()]
    variables = [v for thing in stateful for v in thing.variables]
    if source is target and all(belongs_to(variable, strategy) for variable in variables):
        return
    if type(source).compile_from_config is not keras.Model.compile_from_config:
        config = source.get_compile_config()
        with creation_scope(strategy, created), custom_objects_of([source]):
            target.compile_from_config(config)
    else:
        own = type(source).compile is not keras.Model.compile
        arguments = _compile_arguments(source) if own else kp.compile_arguments(source)
        with creation_scope(strategy, created):
            remade = keras.tree.map_structure(_stateless, arguments)
            target.compile(**remade)
        if own:
            _check_compiled_alike(source, arguments, target)
    after = optimizers_of(target)
    for name, old in before.items():
        if (new := after.get(name)) is None:
            raise TrainingError(
                f"{type(source).__name__}.{name} must be an optimizer after compile_from_config(),"
                " got none of that name: let it make all that get_compile_config() describes."
            )
        if old.built:
            weights = _copies_of_trained(old, source, target)
            with creation_scope(strategy, created):
                new.build(weights)
            _take_over_state(old, new, weights)


def _stateless(argument: Any) -> Any:
    """An argument of compile, anew where it has variables of its own, so not two models' one."""
    stateful = isinstance(argument, keras.optimizers.Optimizer | keras.metrics.Metric)
    if stateful or (getattr(argument, "variables", None) and hasattr(argument, "get_config")):
        return clone_from_config(argument)
    return argument


def _compile_arguments(source: keras.Model) -> dict[str, Any]:
    """The arguments of a custom compile(), as far as the model stores them.

    Keras keeps what it was given itself; other arguments are attributes of the same name.
    """
    parameters = inspect.signature(type(source).compile).parameters.values()
    of_keras = kp.compile_arguments(source)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    arguments = dict(of_keras) if takes_all else {}
    for parameter in list(parameters)[1:]:
        name = parameter.name
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in of_keras:
            arguments[name] = of_keras[name]
        elif name in vars(source):
            arguments[name] = vars(source)[name]
        else:
            raise TrainingError(_OWN_COMPILE.format(type(source).__name__, name))
    return arguments


_OWN_COMPILE = (
    "{0} has a compile() of its own, and what it was given as {1!r} is not known here. Pass a"
    " function that builds and compiles the model: distribute(build, strategy). Or give the class"
    " get_compile_config() and compile_from_config(), which Keras also needs to load it."
)


def _check_compiled_alike(
    source: keras.Model, arguments: dict[str, Any], target: keras.Model
) -> None:
    """Calling a compile() with what it made of its arguments must make the same of them again."""

    def told(value: Any) -> Any:
        if not callable(getattr(value, "get_config", None)):
            return value
        config = value.get_config()
        config.pop("name", None)  # Keras numbers the ones that it makes
        return type(value), config

    mine, theirs = kp.compile_arguments(source), kp.compile_arguments(target)
    pairs = {name: (mine[name], theirs[name]) for name in mine}
    pairs |= {name: (arguments[name], vars(target).get(name)) for name in arguments.keys() - mine}
    for name, pair in pairs.items():
        try:
            one, other = ([told(part) for part in keras.tree.flatten(value)] for value in pair)
            same = bool(np.all([np.all(a == b) for a, b in zip(one, other, strict=True)]))
        except (TypeError, ValueError):
            same = False
        if not same:
            raise TrainingError(_OWN_COMPILE.format(type(source).__name__, name))


def _specs_if_known(
    model_or_builder: keras.Model | Callable[[], keras.Model],
) -> list[VariableSpec]:
    """The variables of a model that is to be; none where they are made later only."""
    try:
        return learn_specs(model_or_builder)
    except PlacementError:
        return []


def _copies_of_trained(
    optimizer: keras.optimizers.Optimizer, source: keras.Model, target: keras.Model
) -> list[keras.Variable]:
    """The weights of `target` that stand for those of `source` that an optimizer was built for.

    What it was built for, not what is trainable today: weights may have been frozen since.
    """
    copies = {id(weight): copy for weight, copy in zip(source.weights, target.weights, strict=True)}
    trained = kp.trained_by(optimizer)
    if not all(id(variable) in copies for variable in trained):
        raise TrainingError(
            f"the optimizer of {source.name!r} must be built for the model's weights, got other"
            " variables, so its state cannot be copied. Call compile() with a new one."
        )
    return [copies[id(variable)] for variable in trained]


def _take_over_state(
    old: keras.optimizers.Optimizer,
    new: keras.optimizers.Optimizer,
    weights: list[keras.Variable],
) -> None:
    if [id(v) for v in kp.trained_by(new)] != [id(v) for v in weights]:
        raise TrainingError(
            f"the optimizer {new.name!r} must have the same variables after the model is compiled"
            " again, got others: do not build it in compile() or compile_from_config()."
        )
    for variable, value in zip(new.variables, old.variables, strict=True):
        variable.assign(value.numpy())


def _copy(
    model: keras.Model, strategy: tf.distribute.Strategy, created: list[tf.Variable]
) -> keras.Model:
    try:
        with creation_scope(strategy, created):
            copy = clone_model(model)
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise TrainingError(
            f"the model {model.name!r} ({type(model).__name__}) cannot be copied from its config:"
            f" {truncate_message(error)} Pass a function that builds the model instead:"
            " distribute(build, strategy); or give the class a get_config()."
        ) from error
    if len(copy.weights) != len(model.weights):
        raise TrainingError(
            f"the copy of {model.name!r} must have {len(model.weights)} weights, as the model"
            f" itself, got {len(copy.weights)}: its config is incomplete. Pass a function that"
            " builds the model instead: distribute(build, strategy)."
        )
    for new, old in zip(copy.weights, model.weights, strict=True):
        if new.shape != old.shape:
            raise TrainingError(
                f"the copy of {model.name!r} must have the weight {old.path!r} of shape"
                f" {old.shape}, as the model itself, got {new.path!r} of shape {new.shape}: its"
                " config is incomplete. Pass a function that builds the model instead:"
                " distribute(build, strategy)."
            )
        new.assign(old.numpy())
    copy_flags_and_assets(model, copy)
    recompile(model, copy, strategy, created)
    return copy


def reject_stateful_rnns(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuse stateful RNN layers, before anything of a model is traced or built.

    Raises:
        TrainingError: a recurrent layer is stateful, and batches are cut for several replicas or go
            to workers in no order.
    """
    layers = (layer for layer in kp.flat_layers(model) if isinstance(layer, keras.layers.RNN))
    stateful = [layer for layer in layers if layer.stateful]
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        where = "the workers of a ParameterServerStrategy, which take batches in no order"
    else:
        where = f"{strategy.num_replicas_in_sync} replicas, each of which gets other rows"
        stateful = stateful if strategy.num_replicas_in_sync > 1 else []
    if stateful:
        raise TrainingError(
            f"{', '.join(repr(layer.name) for layer in stateful)} must not be stateful on {where}:"
            " a stateful layer continues row i of a batch with row i of the next batch. Make the"
            ' layers with stateful=False, or train on one replica: create_strategy("one_device").'
        )


def batch_normalization_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The BatchNormalization layers of a model, of its inner models and wrappers."""
    layers = kp.flat_layers(model)
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
