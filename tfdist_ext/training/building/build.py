"""Makes a Keras model, its optimizers and its metrics inside a strategy's scope.

Every variable is made before a step is traced.
Layers that keep a state for each row of a batch are refused, because the state cannot follow its
row to a replica.
"""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.pipelines import Specs, Structure
from tfdist_ext.errors import PlacementError, TrainingError
from tfdist_ext.placement.live.learning import fresh_names, learn_specs
from tfdist_ext.strategies import PlacedStrategy
from tfdist_ext.strategies.placed import PlacedParameterServers
from tfdist_ext.training import _keras_private
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.building.moving import creation_scope
from tfdist_ext.training.state import broadcast_state, whole_slots
from tfdist_ext.training.steps.parts import OptimizerParts
from tfdist_ext.training.variables import (
    default_strategy_scope,
    optimizers_of,
    parts_of,
)


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
    return {"input_signature": [inputs]}


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
        if trains_itself and not all(each.built for each in optimizers_of(model).values()):
            _build_from_step(model, "train", batch)
    if isinstance(strategy, PlacedStrategy):
        strategy.placer.check_paths([variable.path for variable in model.variables])


def build_sharded_optimizers(model: keras.Model, reduction: Reduction) -> None:
    """Builds the optimizers that workers share; every worker must call, with the same weights."""
    deferred = deferred_builds(model)
    for parts in deferred:
        with creation_scope(reduction.strategy):
            parts.build(reduction.strategy)
    if any(parts.initial for parts in deferred):
        with whole_slots(reduction, model, restores=True):
            for parts in deferred if reduction.is_chief else ():
                parts.assign_initial()
            broadcast_state(reduction, model)


def deferred_builds(model: keras.Model) -> list[OptimizerParts]:
    """Returns the optimizers that `build_sharded_optimizers` has to build."""
    found = [parts_of(optimizer) for optimizer in optimizers_of(model).values()]
    return [each for each in found if each is not None and not each.parts]


def _has_all_layers(model: keras.Model) -> bool:
    return all(layer.built for layer in _keras_private.flat_layers(model))


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
        original: object,
        optimizer: keras.optimizers.Optimizer,
        grads: object,
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        if trainable_variables is not None:
            applied.setdefault(id(optimizer), (optimizer, list(trainable_variables)))

    def tried(batch: Structure) -> Structure:
        functions: dict[str, Callable[..., Any]] = {"apply": apply, "gradient": _zero_gradient}
        targets = [each for each in _keras_private.step_targets() if each.key in functions]
        instead = _keras_private.substitutes(functions)
        # Losses that layers add are discarded with the scope.
        losses = keras.StatelessScope(collect_losses=True)
        with default_strategy_scope(), _keras_private.replacing(targets), instead, losses:
            return step(batch)

    try:
        _keras_private.call_symbolically(tried, batch)
    except Exception as error:
        inner = [layer for layer in _keras_private.flat_layers(model) if layer is not model]
        if missing := [layer.name for layer in inner if not layer.built]:
            raise TrainingError(
                f"{type(model).__name__} has layers that are not built ({', '.join(missing)}), and"
                f" building them by a {kind}_step with a batch of {batch!r} failed:"
                f" {textwrap.shorten(str(error), 200)} Build the layers in the function given to"
                " distribute(): start models with keras.Input(shape), or call build(shape)."
            ) from error
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


def reject_stateful_rnns(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuses stateful RNN layers before anything of a model is traced or built.

    Raises:
        TrainingError: a recurrent layer is stateful, and several replicas or workers share the
            batches.
    """
    asynchronous = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if not asynchronous and strategy.num_replicas_in_sync == 1:
        return
    layers = _keras_private.layers_of(model, keras.layers.RNN)
    if stateful := [repr(layer.name) for layer in layers if layer.stateful]:
        raise TrainingError(
            f"{', '.join(stateful)} must not be stateful on {type(strategy).__name__}: a stateful"
            " layer continues row i of a batch with row i of the next batch, which another replica"
            " or worker may get. Make the layers with stateful=False, or train on one replica:"
            ' create_strategy("one_device").'
        )
