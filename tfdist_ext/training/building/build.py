"""Makes a Keras model, its optimizers and its metrics inside a strategy's scope.

Every variable is made before a step is traced. Layers that keep a state for each row of a batch are
refused, because the state cannot follow its row to a replica.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import PlacementError, TrainingError
from tfdist_ext.placement.live.learning import fresh_names, learn_specs
from tfdist_ext.strategies import PlacedStrategy, StrategyTemplate
from tfdist_ext.strategies.placed import PlacedParameterServers
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import creating_without_broadcast
from tfdist_ext.training.building.cloning import (
    cannot_be_copied,
    clone_from_config,
    clone_model,
    copy_flags_and_assets,
    custom_objects_of,
    truncate_message,
)
from tfdist_ext.training.protocols import Specs, Structure
from tfdist_ext.training.steps.replaced import (
    functions_in_place,
    step_targets,
    substitutes,
    uses_keras_step,
)
from tfdist_ext.training.variables import (
    copies_of_one_name,
    default_strategy_scope,
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
    specs = []
    if isinstance(strategy, PlacedParameterServers) and strategy.placer.plans_models:
        specs = learn_specs(model_or_builder)
        strategy.placer.learn(specs)
    elif isinstance(strategy, PlacedStrategy):
        with contextlib.suppress(PlacementError):  # the model makes its variables later
            specs = learn_specs(model_or_builder)
        if specs:
            strategy.plan_model(specs)
    if is_model:
        return _copy(model_or_builder, strategy, created)
    names_of_plan = fresh_names() if specs else contextlib.nullcontext()
    with creation_scope(strategy, created), names_of_plan:
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
                _build_from_step(model, kind, batch)
        _build_from_call_or_step(model, kind, batch)
        all_built = all(optimizer.built for optimizer in optimizers_of(model).values())
        if kind != "predict" and not uses_keras_step(model, "train") and not all_built:
            _build_from_step(model, "train", batch)
    if isinstance(strategy, PlacedStrategy):
        strategy.check_model([variable.path for variable in model.variables])


def _build_from_call_or_step(model: keras.Model, kind: str, batch: Structure) -> None:
    """Builds from one symbolic batch, by the model's `call` or else by its custom step."""
    own_step = not uses_keras_step(model, kind)
    with warnings.catch_warnings():
        if own_step:  # which need not use the call that Keras cannot trace
            warnings.filterwarnings("ignore", ".*unbuilt state", UserWarning)
        try:
            if kind != "predict":
                kp.symbolic_build(model, batch)
            elif not all(layer.built for layer in kp.flat_layers(model)):
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                kp.call_symbolically(model, x, training=False)
            return
        except Exception:
            if not own_step:
                raise
    _build_from_step(model, kind, batch)


def _build_from_step(model: keras.Model, kind: str, batch: Structure) -> None:
    """Traces a custom step once for the variables of its layers and optimizers.

    A GAN or a VAE may have no `call`, or a `call` that does not take what the data begins with.
    Plain Keras makes missing variables while it traces the first step. An optimizer is built for
    the variables that the step applies it to first, as in Keras.

    Args:
        kind: "train", "test" or "predict".
        batch: a structure of `keras.KerasTensor`, one global batch.

    Raises:
        TrainingError: the step cannot be traced while layers have no variables yet.
    """
    step = getattr(model, f"{kind}_step")
    step = getattr(step, "python_function", step)  # of a tf.function
    applied: dict[int, tuple[keras.optimizers.Optimizer, list[keras.Variable]]] = {}

    def apply(
        original: object,
        optimizer: keras.optimizers.Optimizer,
        grads: object,
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        if trainable_variables is not None:
            applied.setdefault(id(optimizer), (optimizer, list(trainable_variables)))

    def tried(batch: Structure) -> Structure:
        targets = [target for target in step_targets() if target.name in ("apply", "gradient")]
        instead = substitutes({"apply": apply, "gradient": _zero_gradient})
        # Losses that layers add are discarded with the scope.
        losses = keras.StatelessScope(collect_losses=True)
        with default_strategy_scope(), functions_in_place(targets), instead, losses:
            return step(batch)

    failure: Exception | None = None
    try:
        kp.call_symbolically(tried, batch)
    except Exception as error:
        failure = error
    inner = [layer for layer in kp.flat_layers(model) if layer is not model]
    missing = [layer.name for layer in inner if not layer.built]
    if failure is not None and missing:
        raise TrainingError(
            f"{type(model).__name__} has layers without variables yet ({', '.join(missing)}), and"
            f" its {kind}_step, tried on a batch of {batch!r} to make them, fails:"
            f" {truncate_message(failure)} Build the layers in the function given to distribute():"
            " begin models with keras.Input(shape), or call build(shape)."
        ) from failure
    for optimizer, variables in applied.values():
        if not optimizer.built:
            optimizer.build(variables)
    compiled = None if kind == "predict" else model.optimizer
    if isinstance(compiled, keras.optimizers.Optimizer) and not compiled.built:
        # The step does not use it. Keras's fit builds it too under a strategy.
        compiled.build(model.trainable_variables)
    model.built = True


def _zero_gradient(
    original: object, tape: object, target: object, sources: Structure, *_: object, **__: object
) -> Structure:
    """Gradients of zero: outside of a replica's context, distributed variables have none."""

    def zeros(source: keras.Variable | tf.Variable | tf.Tensor) -> tf.Tensor:
        is_variable = isinstance(source, keras.Variable | tf.Variable)
        return tf.zeros(source.shape, source.dtype) if is_variable else tf.zeros_like(source)

    return tf.nest.map_structure(zeros, sources)


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
    given = kp.compile_arguments(source)
    metrics = keras.tree.flatten([given["metrics"], given["weighted_metrics"]])
    stateful = [each for each in metrics if isinstance(each, keras.metrics.Metric)]
    variables = [v for thing in [*stateful, *before.values()] for v in thing.variables]
    if source is target and all(belongs_to(variable, strategy) for variable in variables):
        return
    with creation_scope(strategy, created):
        if type(source).compile_from_config is not keras.Model.compile_from_config:
            config = source.get_compile_config()
            with custom_objects_of([source]):
                target.compile_from_config(config)
        else:
            _compile_again(source, target)
        after = optimizers_of(target)
        for name, old in before.items():
            if old.built:
                _copy_optimizer_state(old, after.get(name), source, target)


def _compile_again(source: keras.Model, target: keras.Model) -> None:
    arguments = _compile_arguments(source)
    target.compile(**keras.tree.map_structure(_stateless, arguments))
    if type(source).compile is not keras.Model.compile:  # which may keep something else
        for name, value in _compile_arguments(target).items():
            if _described(value) != _described(arguments[name]):
                raise _unknown_argument(source, name)


def _stateless(argument: Any) -> Any:
    """Clones an argument of compile that has variables, which two models must not share."""
    has_variables = hasattr(argument, "variables") and hasattr(argument, "get_config")
    return clone_from_config(argument) if has_variables else argument


def _compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of compile(): those that Keras keeps, and attributes of their names."""
    of_keras = kp.compile_arguments(model)
    _, *parameters = inspect.signature(type(model).compile).parameters.values()
    names = {each.name: None for each in parameters if each.kind is not each.VAR_KEYWORD}
    if len(names) < len(parameters):  # the keywords go to Keras
        names |= dict.fromkeys(of_keras)
    known = {**vars(model), **of_keras}
    for name in names:
        if name not in known:
            raise _unknown_argument(model, name)
    return {name: known[name] for name in names}


def _described(argument: Any) -> str:
    """Returns a text that is equal for two equal arguments of compile(); of objects, the class."""
    parts = keras.tree.flatten(argument)
    return repr([type(part) if hasattr(part, "get_config") else part for part in parts])


def _unknown_argument(model: keras.Model, name: str) -> TrainingError:
    return cannot_be_copied(model, f"the argument {name!r} of its own compile() is not known.")


def _copy_optimizer_state(
    old: keras.optimizers.Optimizer,
    new: keras.optimizers.Optimizer | None,
    source: keras.Model,
    target: keras.Model,
) -> None:
    """Builds an optimizer as an old one, and copies the state. Frozen weights keep theirs, too."""
    copies = {id(weight): copy for weight, copy in zip(source.weights, target.weights, strict=True)}
    weights = [copies[id(each)] for each in kp.trained_by(old) if id(each) in copies]
    if new is not None:
        new.build(weights)
    if (
        new is None
        or [*map(id, kp.trained_by(new))] != [*map(id, weights)]
        or len(new.variables) != len(old.variables)
    ):
        raise cannot_be_copied(
            old,
            "it must be built for weights of the model, and compile_from_config() must make one"
            " like it that is not built.",
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
