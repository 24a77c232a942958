"""Makes a Keras model with all its variables in a strategy, from a builder or a given model.

Every variable of the model, its optimizers and its metrics is made before a step is traced. A
`keras.Variable` holds a `tf.Variable`. To move a variable of a given model, a new `tf.Variable`
with the same value is created in the scope of the strategy. The `keras.Variable` stays the same
object, so layers, optimizers, metrics, callbacks and the user keep their references.
"""

from __future__ import annotations

import contextlib
import gc
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.pipelines import Specs, Structure, of_any_rows
from tfdist_ext.errors import PlacementError, TrainingError
from tfdist_ext.placement.live._keras_private import fresh_names
from tfdist_ext.placement.live.creating import pieces_of
from tfdist_ext.placement.live.learning import learn_specs
from tfdist_ext.strategies import PlacedStrategy, StrategyTemplate
from tfdist_ext.strategies.owned_sums import sums_of
from tfdist_ext.strategies.placed import PlacedParameterServers
from tfdist_ext.training import _keras_private
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
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.state import (
    broadcast_state,
    copies_of_piece,
    own_variables,
    owner_path,
    whole_slots,
    whole_value,
)
from tfdist_ext.training.steps import exact
from tfdist_ext.training.steps.scope import metrics_and_others
from tfdist_ext.training.steps.sharded_optimizer import ShardedOptimizer, deferring_builds
from tfdist_ext.training.variables import (
    SHARDED,
    copies_of_one_name,
    default_strategy,
    default_strategy_scope,
    optimizers_of,
    outside_of_scopes,
    sharded_optimizer_of,
    variables_of_steps,
    with_inner_optimizers,
)

_MIRRORED = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy


def adopt(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy,
    created: list[tf.Variable],
) -> keras.Model:
    """Returns the model, or the model that a builder makes in the scope of the strategy.

    Args:
        created: see `creation_scope`.

    Raises:
        TrainingError: neither a model nor a function that returns one.
        PlacementError: the strategy's placement does not fit the model.
    """
    if not isinstance(model_or_builder, keras.Model) and not callable(model_or_builder):
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
            strategy.placer.learn(specs)
    if isinstance(model_or_builder, keras.Model):
        return model_or_builder
    names_of_plan = fresh_names() if specs else contextlib.nullcontext()
    with creation_scope(strategy, created), names_of_plan:
        model = model_or_builder()
    if not isinstance(model, keras.Model):
        raise TrainingError(
            f"the function given to distribute() must return a keras.Model, got {model!r}."
        )
    return model


def input_signature(model: keras.Model, spec: Specs) -> dict[str, Any]:
    """Returns arguments of `keras.Model.export`, for a model that does not know its inputs.

    Args:
        spec: tf.TypeSpecs of the batch that the model was built for; None: unknown.
    """
    if spec is None or _keras_private.is_graph_of_layers(model):
        return {}
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
    return {"input_signature": [tf.nest.map_structure(of_any_rows, inputs)]}


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
    own_step = not _keras_private.uses_keras_step(model, kind)
    own_loss = _keras_private.overrides(model, "compute_loss")
    with creation_scope(strategy, created), warnings.catch_warnings():
        if kind == "train" and own_loss and not _has_all_layers(model):
            # compute_loss may use layers that the call does not use.
            with contextlib.suppress(TrainingError):
                _build_from_step(model, kind, batch)
        if own_step:  # it need not use the call, which Keras may fail to trace
            warnings.filterwarnings("ignore", ".*unbuilt state", UserWarning)
        try:
            if kind != "predict":
                _keras_private.symbolic_build(model, batch)
            elif not _has_all_layers(model):
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                _keras_private.call_symbolically(model, x, training=False)
        except Exception:
            if not own_step:
                raise
            _build_from_step(model, kind, batch)
        trains_itself = kind != "predict" and not _keras_private.uses_keras_step(model, "train")
        if trains_itself and not all(
            optimizer.built for optimizer in optimizers_of(model).values()
        ):
            _build_from_step(model, "train", batch)
    if isinstance(strategy, PlacedStrategy):
        strategy.placer.check_paths([variable.path for variable in model.variables])


def build_sharded_optimizers(model: keras.Model, reduction: Reduction) -> None:
    """Builds the optimizers that workers share; every worker must call, with the same weights."""
    deferred = deferred_builds(model)
    for sharded in deferred:
        with creation_scope(reduction.strategy):
            sharded.build(reduction.strategy)
    if any(sharded.initial for sharded in deferred):
        with whole_slots(reduction, model, restores=True):
            for sharded in deferred if reduction.is_chief else ():
                sharded.assign_initial()
            broadcast_state(reduction, model)


def deferred_builds(model: keras.Model) -> list[ShardedOptimizer]:
    """Returns the optimizers that `build_sharded_optimizers` has to build."""
    known = map(sharded_optimizer_of, optimizers_of(model).values())
    return [sharded for sharded in known if sharded is not None and not sharded.parts]


def _has_all_layers(model: keras.Model) -> bool:
    return all(layer.built for layer in flat_layers(model))


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
    step = _keras_private.step_of(model, kind)
    applied: dict[int, tuple[keras.optimizers.Optimizer, list[keras.Variable]]] = {}

    def apply(
        original: Callable[..., Any],
        optimizer: keras.optimizers.Optimizer,
        grads: Iterable[Any],
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        if original.__name__ == "apply_gradients":
            trainable_variables = [variable for _, variable in grads]
        if trainable_variables is not None:
            applied.setdefault(id(optimizer), (optimizer, list(trainable_variables)))

    def tried(batch: Structure) -> Structure:
        instead: dict[Any, Callable[..., Any]] = {
            exact.optimizer_apply: apply,
            exact.tape_gradient: _zero_gradient,
        }
        # Losses that layers add are discarded with the scope.
        losses = keras.StatelessScope(collect_losses=True)
        with default_strategy_scope(), _keras_private.substitutes(instead), losses:
            return step(batch)

    try:
        _keras_private.call_symbolically(tried, batch)
    except Exception as error:
        inner = [layer for layer in flat_layers(model) if layer is not model]
        if missing := [layer.name for layer in inner if not layer.built]:
            raise TrainingError(
                f"{type(model).__name__} has layers that are not built ({', '.join(missing)}), and"
                f" building them by a {kind}_step with a batch of {batch!r} failed:"
                f" {textwrap.shorten(str(error), 200)} Build the layers in the function given to"
                " distribute(): start models with keras.Input(shape), or call build(shape)."
            ) from error
    compiled = None if kind == "predict" else model.optimizer
    if isinstance(compiled, keras.optimizers.Optimizer):  # Keras's fit builds it if it is not used
        applied.setdefault(id(compiled), (compiled, model.trainable_variables))
    for optimizer, variables in applied.values():
        if not optimizer.built:
            with _keras_private.unbuilt_after_error(optimizer):
                optimizer.build(variables)
    model.built = True


def _zero_gradient(
    original: object, tape: object, target: object, sources: Structure, *_: object, **__: object
) -> Structure:
    """Gradients of zero: outside of a replica's context, distributed variables have none."""

    def zeros(source: keras.Variable | tf.Variable | tf.Tensor) -> tf.Tensor:
        is_variable = isinstance(source, keras.Variable | tf.Variable)
        return tf.zeros(source.shape, source.dtype) if is_variable else tf.zeros_like(source)

    return tf.nest.map_structure(zeros, sources)


def reject_stateful_rnns(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuses stateful RNN layers before anything of a model is traced or built.

    Raises:
        TrainingError: a recurrent layer is stateful, and several replicas or workers share the
            batches.
    """
    asynchronous = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if not asynchronous and strategy.num_replicas_in_sync == 1:
        return
    layers = layers_of(model, keras.layers.RNN)
    if stateful := [repr(layer.name) for layer in layers if layer.stateful]:
        raise TrainingError(
            f"{', '.join(stateful)} must not be stateful on {type(strategy).__name__}: a stateful"
            " layer continues row i of a batch with row i of the next batch, which another replica"
            " or worker may get. Make the layers with stateful=False, or train on one replica:"
            ' create_strategy("one_device").'
        )


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
    if sums_of(strategy).owned is not None:
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
    share the optimizers, a built optimizer gives its state to `ShardedOptimizer`, which builds it
    again.

    Args:
        created: see `creation_scope`.

    Returns:
        Whether a variable has moved.

    Raises:
        TrainingError: a layer holds a tf.Variable that was created outside of the strategy, or
            workers share an optimizer that has to move to another strategy.
    """
    shares_optimizers = sums_of(strategy).owned is not None
    weights = [variable for variable in _variables(model) if not is_in(variable, strategy)]
    optimizers = [
        optimizer
        for optimizer in optimizers_of(model).values()
        if sharded_optimizer_of(optimizer) is None
    ]
    slots = [
        [variable for variable in optimizer.variables if not is_in(variable, strategy)]
        for optimizer in optimizers
    ]
    if not weights and not any(slots):
        return False
    _check_can_move(model, strategy)
    _forget_functions(weights)
    keys = keys_of(optimizers, weights)
    for optimizer in optimizers:
        if shares_optimizers and optimizer.built:
            vars(optimizer)[SHARDED] = new = ShardedOptimizer(optimizer, trained_by(optimizer))
            new.initial = [variable.numpy() for variable in optimizer.variables]
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
    metrics, others = metrics_and_others(model)
    variables = [*others, *metrics]
    for part in layers_of(model, keras.Model):
        if part.compiled:
            variables += _variables_of_compile(part)
    for optimizer in optimizers_of(model).values():  # it may train variables of another model
        if optimizer.built and sharded_optimizer_of(optimizer) is None:
            variables += trained_by(optimizer)
    return list({id(variable): variable for variable in variables}.values())


def _variables_of_compile(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the metrics that are arguments of `compile`."""
    try:
        arguments = compile_arguments(model)
    except (AttributeError, TypeError, TrainingError):  # the model has a compile() of its own
        return []
    settings = keras.tree.flatten([arguments.get("metrics"), arguments.get("weighted_metrics")])
    metrics = [metric for metric in settings if isinstance(metric, keras.metrics.Metric)]
    return [variable for metric in metrics for variable in metric.variables]


def is_in(variable: keras.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a variable was created in the strategy's scope, or is not created yet."""
    value = raw_value(variable)
    return value is None or strategy.extended.variable_created_in_scope(value)


def _check_can_move(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    sharded = filter(sharded_optimizer_of, optimizers_of(model).values())
    slots = [variable for optimizer in sharded for variable in optimizer.variables]
    if not all(is_in(variable, strategy) for variable in slots):
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


def _forget_functions(weights: list[keras.Variable]) -> None:
    """Lets Keras trace the steps of other models again, which would use a single copy.

    Variables and layers have no list of the models that they are in.
    """
    moved = {*map(id, weights)}
    functions = "train_function", "test_function", "predict_function"
    for thing in gc.get_objects():
        is_traced = issubclass(type(thing), keras.Model) and any(map(vars(thing).get, functions))
        if is_traced and not moved.isdisjoint(map(id, thing.weights)):
            vars(thing).update(dict.fromkeys(functions))


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
