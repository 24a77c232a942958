"""Makes a Keras model, its optimizers and its metrics inside a strategy's scope.

Every variable is made before a step is traced. Layers that keep a state for each row of a batch are
refused, because the state cannot follow its row to a replica.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import PlacementError, TrainingError
from tfdist_ext.placement.live.learning import fresh_names, learn_specs
from tfdist_ext.strategies import PlacedStrategy, StrategyTemplate
from tfdist_ext.strategies.placed import PlacedParameterServers
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import creating_without_broadcast
from tfdist_ext.training.building.build_from_step import build_from_step
from tfdist_ext.training.building.cloning import (
    cannot_be_copied,
    clone_from_config,
    clone_model,
    copy_flags_and_assets,
    custom_objects_of,
)
from tfdist_ext.training.protocols import Specs, Structure
from tfdist_ext.training.steps.replaced import uses_keras_step
from tfdist_ext.training.variables import (
    all_built,
    copies_of_one_name,
    optimizers_of,
    variables_of_steps,
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
    scope.enter_context(strategy.scope())
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        scope.enter_context(creating_without_broadcast(strategy))
        scope.enter_context(tf.variable_creator_scope(note))
    places = isinstance(strategy, StrategyTemplate | PlacedParameterServers)
    scope.enter_context(variables_of_steps(in_pieces=not places))
    return scope


def adopt(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy,
    created: list[tf.Variable],
) -> keras.Model:
    """Returns the model that a builder makes, or a copy of an existing one, on the strategy.

    Args:
        created: see `creation_scope`.

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
    if isinstance(strategy, PlacedStrategy):
        try:
            specs = learn_specs(model_or_builder)
        except PlacementError:  # the model makes its variables later
            specs = []
        if specs:
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
    """Makes every variable, before a step is traced, from the structure of one global batch.

    Args:
        spec: tf.TypeSpecs of a batch, batch dimension unknown.
        kind: of the steps to come: "train", "test" or "predict", which needs no metrics, losses
            and optimizers.

    Raises:
        TrainingError: a layer keeps a state for each row of a batch; or only a custom step could
            make the variables, and tracing the step fails.
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
            # compute_loss may use layers that the call does not use.
            with contextlib.suppress(TrainingError):
                build_from_step(model, kind, batch)
        _build_from_call_or_step(model, kind, batch)
        if kind != "predict" and not uses_keras_step(model, "train") and not all_built(model):
            build_from_step(model, "train", batch)
    if isinstance(strategy, PlacedStrategy):
        strategy.check_model([variable.path for variable in model.variables])


def _build_from_call_or_step(model: keras.Model, kind: str, batch: Structure) -> None:
    """Builds from one symbolic batch, by the model's `call` or else by its custom step."""
    own_step = not uses_keras_step(model, kind)
    with warnings.catch_warnings():
        if own_step:  # which need not use the call that Keras cannot trace
            warnings.filterwarnings("ignore", ".*unbuilt state", UserWarning)
        try:
            (kp.symbolic_call if kind == "predict" else kp.symbolic_build)(model, batch)
            return
        except Exception:
            if not own_step:
                raise
    build_from_step(model, kind, batch)


def belongs_to(variable: keras.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a variable was created in the strategy's scope, or is not created yet."""
    value = kp.raw_value(variable)
    return value is None or strategy.extended.variable_created_in_scope(value)


def recompile(
    source: keras.Model,
    target: keras.Model,
    strategy: tf.distribute.Strategy,
    created: list[tf.Variable],
) -> None:
    """Compiles `target` as `source` is, with optimizers and metrics made in the scope.

    Nothing happens if they were made there, as in most builders. A class with
    `compile_from_config` is compiled by that method, as Keras does when it loads a model. Other
    classes are compiled with the arguments that the model keeps as attributes of the same name.

    Raises:
        TrainingError: a compile() whose arguments are not known, an optimizer or a metric that
            cannot be cloned, or an optimizer that was built for other variables.
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
        arguments = _compile_arguments(source)
        with creation_scope(strategy, created):
            target.compile(**keras.tree.map_structure(_stateless, arguments))
        if type(source).compile is not keras.Model.compile:  # which may keep something else
            for name, value in _compile_arguments(target).items():
                if _described(value) != _described(arguments[name]):
                    raise _unknown_argument(source, name)
    after = optimizers_of(target)
    for name, old in before.items():
        if old.built:
            weights = _copies_of_trained(old, source, target)
            with creation_scope(strategy, created):
                _take_over_state(old, after.get(name), weights, f"{type(source).__name__}.{name}")


def _stateless(argument: Any) -> Any:
    """Clones an argument of compile that has variables, which two models must not share."""
    stateful = isinstance(argument, keras.optimizers.Optimizer | keras.metrics.Metric)
    if stateful or (getattr(argument, "variables", None) and hasattr(argument, "get_config")):
        return clone_from_config(argument)
    return argument


def _compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of compile(): those that Keras keeps, and attributes of their names."""
    of_keras = kp.compile_arguments(model)
    _, *parameters = inspect.signature(type(model).compile).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [each.name for each in parameters if each.kind not in variadic]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names += [name for name in of_keras if name not in names]
    known = {**vars(model), **of_keras}
    for name in names:
        if name not in known:
            raise _unknown_argument(model, name)
    return {name: known[name] for name in names}


def _described(argument: Any) -> str:
    """Returns a text that is equal for two equal arguments of compile()."""
    parts = []
    for part in keras.tree.flatten(argument):
        if callable(getattr(part, "get_config", None)):
            # Keras numbers the names that it makes.
            part = type(part), {**part.get_config(), "name": None}
        parts.append(part)
    return repr(parts)


def _unknown_argument(model: keras.Model, name: str) -> TrainingError:
    return TrainingError(
        f"{type(model).__name__} has its own compile(), and the value of its argument {name!r} is"
        " not known here. Pass a function that builds and compiles the model: distribute(build,"
        " strategy). Or give the class get_compile_config() and compile_from_config(), which Keras"
        " also needs to load it."
    )


def _copies_of_trained(
    optimizer: keras.optimizers.Optimizer, source: keras.Model, target: keras.Model
) -> list[keras.Variable]:
    """Returns the weights of `target` that correspond to those an optimizer was built for.

    Weights that were frozen later are among them.
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
    new: keras.optimizers.Optimizer | None,
    weights: list[keras.Variable],
    name: str,
) -> None:
    if new is not None:
        new.build(weights)
    if new is None or [id(v) for v in kp.trained_by(new)] != [id(v) for v in weights]:
        raise TrainingError(
            f"{name} must be an optimizer of the same variables after the model is compiled again."
            " Let compile_from_config() make all that get_compile_config() describes, and do not"
            " build optimizers there."
        )
    for variable, value in zip(new.variables, old.variables, strict=True):
        variable.assign(value.numpy())


def _copy(
    model: keras.Model, strategy: tf.distribute.Strategy, created: list[tf.Variable]
) -> keras.Model:
    with creation_scope(strategy, created):
        copy = clone_model(model)
    if [weight.shape for weight in copy.weights] != [weight.shape for weight in model.weights]:
        raise cannot_be_copied(model, "the copy has weights of other shapes.")
    for new, old in zip(copy.weights, model.weights, strict=True):
        new.assign(old.numpy())
    copy_flags_and_assets(model, copy)
    recompile(model, copy, strategy, created)
    return copy


def reject_stateful_rnns(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuses stateful RNN layers before anything of a model is traced or built.

    Raises:
        TrainingError: a recurrent layer is stateful, and several replicas or workers share the
            batches.
    """
    asynchronous = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if not asynchronous and strategy.num_replicas_in_sync == 1:
        return
    layers = (layer for layer in kp.flat_layers(model) if isinstance(layer, keras.layers.RNN))
    if stateful := [repr(layer.name) for layer in layers if layer.stateful]:
        raise TrainingError(
            f"{', '.join(stateful)} must not be stateful on {type(strategy).__name__}: a stateful"
            " layer continues row i of a batch with row i of the next batch, which another replica"
            " or worker may get. Make the layers with stateful=False, or train on one replica:"
            ' create_strategy("one_device").'
        )


def batch_normalization_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of a model, of its inner models and wrappers."""
    layers = kp.flat_layers(model)
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
