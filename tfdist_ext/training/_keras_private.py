"""The one place where Keras's private names are used, each with the reason.

`REPLACED` lists the functions of Keras and TensorFlow, private and public, that do something else
while a step runs; `replaced.py` does it. `tests/training/test_keras_private.py` fails with the name
and the reason when a release moves one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.tensorflow.trainer import (
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
)
from keras.src.losses import loss as loss_module
from keras.src.models.functional import Functional
from keras.src.saving import object_registration
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.trainers.data_adapters import array_slicing, get_data_adapter, is_tf_dataset
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

__all__ = [
    "REPLACED",
    "ArrayDataAdapter",
    "Replaced",
    "array_parts",
    "batches_of",
    "call_symbolically",
    "compile_arguments",
    "convert_to_np_if_not_ragged",
    "distribution_strategy_of",
    "find",
    "flat_layers",
    "get_data_adapter",
    "global_seed_generator",
    "has_own_config",
    "inner_layers",
    "inputs_from",
    "is_graph_of_layers",
    "is_tf_dataset",
    "loss_ids",
    "loss_weights",
    "metrics_in_order",
    "metrics_in_use",
    "named_as",
    "potentially_ragged_concat",
    "raw_value",
    "restored_epoch",
    "set_restored_epoch",
    "stateless_scope",
    "step_variables",
    "symbolic_build",
    "symbolic_call",
    "take",
    "traces_batches",
    "train_validation_split",
    "trained_by",
    "trusted",
    "write",
]

train_validation_split = array_slicing.train_validation_split


class Replaced(NamedTuple):
    """A function, or a property, that does something else while a step runs.

    Attributes:
        key: what a step knows it by; several functions may do the same job.
        module: its module.
        owner: the class in the module, as "losses.Loss"; "" for a function of the module itself.
        name: its name there.
        why: what it does in a step, and why there is no other way in.
    """

    key: str
    module: str
    owner: str
    name: str
    why: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.name)))


REPLACED = (
    Replaced(
        "apply",
        "keras",
        "optimizers.Optimizer",
        "apply",
        "gets the gradients of the global batch, before it clips, accumulates or applies them",
    ),
    Replaced(
        "apply",
        "keras",
        "optimizers.LossScaleOptimizer",
        "apply",
        "the same: it looks for overflow before it calls the optimizer inside of it",
    ),
    Replaced(
        "apply_gradients",
        "keras",
        "optimizers.Optimizer",
        "apply_gradients",
        "the same: an optimizer object may have an `apply` of its own, which it calls",
    ),
    Replaced(
        "gradient",
        "tensorflow",
        "GradientTape",
        "gradient",
        "gradients of variables are those of the global batch. All losses pass here, and here"
        " alone is it known that nothing reduces a loss of many numbers any more",
    ),
    Replaced(
        "loss",
        "keras",
        "losses.Loss",
        "__call__",
        "Dice and Tversky are ratios of sums over the global batch",
    ),
    Replaced(
        "reduce_loss",
        "keras.src.losses.loss",
        "",
        "reduce_weighted_values",
        "a loss over a part counts with the part's share of what the whole sums or divides by."
        " The public `Loss.__call__` tells neither the mask nor the divisor",
    ),
    Replaced(
        "added_loss",
        "keras",
        "Model",
        "_aggregate_additional_loss",
        "Keras sums what a layer gives to add_loss. A sum over a part's rows is no mean",
    ),
    Replaced(
        "clear_losses",
        "keras",
        "Layer",
        "_clear_losses",
        "all replicas share a layer, which remembers the losses of its last call: those of another"
        " replica must not be forgotten",
    ),
    Replaced(
        "update_mean",
        "keras",
        "metrics.Mean",
        "update_state",
        "a single number is the mean over a part, and counts with the part's share",
    ),
    Replaced(
        "moments",
        "keras.src.backend.tensorflow.nn",
        "",
        "_compute_moments_sync",
        "statistics over all replicas. Keras's own have a gradient that does not weigh the"
        " replicas, and count a part of 0 rows",
    ),
    Replaced(
        "moments_of_layer",
        "keras",
        "layers.BatchNormalization",
        "_moments",
        "the same with a mask, where Keras forgets `synchronized`",
    ),
    Replaced(
        "replicas",
        "tensorflow",
        "distribute.Strategy",
        "num_replicas_in_sync",
        "is 1 in a step: Keras and users divide a mean loss by it, and the shares do that",
    ),
    Replaced(
        "take",
        "keras.src.backend.tensorflow.numpy",
        "",
        "take",
        "rows of a table that replicas share, or that is in shards, are gathered where they are."
        " Keras makes a tensor of the whole table first",
    ),
    Replaced(
        "variable_key",
        "keras",
        "optimizers.Optimizer",
        "_var_key",
        "finds the slots of a shard, which are those of its variable",
    ),
    Replaced(
        "collective_key",
        "tensorflow.python.distribute.cross_device_utils",
        "CollectiveReplicaLauncher",
        "_next_instance_key",
        "each turn of a loop in the graph has collectives of its own: what is gathered may have"
        " another size in the last one",
    ),
)


def find(module: str, owner: str) -> Any:
    """A module, or a class in it; None where this release has none."""
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for name in filter(None, owner.split(".")):
        found = getattr(found, name, None)
    return found


@contextlib.contextmanager
def named_as(kind: type, original: type) -> Iterator[None]:
    """Scope in which objects of a class are saved under the registered name of another.

    Private because the public way to register a class makes the name mean that class.
    """
    names = object_registration.GLOBAL_CUSTOM_NAMES
    names[kind] = keras.saving.get_registered_name(original)
    try:
        yield
    finally:
        names.pop(kind, None)


def loss_ids(layer: Any) -> set[int]:
    """The ids of the losses that a layer gave to add_loss. Private: Keras keeps them to itself."""
    ids: set[int] = layer._loss_ids
    return ids


def raw_value(variable: Any) -> Any:
    """The tf.Variable behind a Keras variable, whatever stateless scope is open.

    Private because `.value` asks the open scope first, and the scope asks us.
    """
    return variable._value


def write(variable: Any, value: Any) -> None:
    """Assign for real, whatever stateless scope is open; private as `raw_value` is."""
    variable._direct_assign(value)


def array_parts(adapter: ArrayDataAdapter) -> tuple[Any, int, int]:
    """(arrays as tensors, rows, global batch) of an adapter that has checked its arguments.

    Private because the adapter's own dataset shuffles with an unseeded order, and a cluster
    needs one order for all workers; its conversions and checks are kept.
    """
    parts = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    parts = keras.tree.map_structure(
        lambda part: part if part is None or tf.is_tensor(part) else tf.convert_to_tensor(part),
        keras.tree.lists_to_tuples(parts),
    )
    return parts, adapter._num_samples, adapter._batch_size


def batches_of(adapter: Any) -> Iterator[Any]:
    """The batches of one pass as the adapter gives them to tf.data.

    Private because its public iterators turn batches into NumPy arrays, or go round by themselves.
    """
    return adapter._get_iterator()


def take(parts: Any, indices: Any) -> Any:
    """The given rows of `parts`, dense or sparse. Private for the sparse wrapper's slicing."""

    def rows(part: Any) -> Any:
        if isinstance(part, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(part, indices)
        if isinstance(part, list | tuple | dict):
            return None  # a structure: look inside
        return tf.gather(part, indices) if tf.is_tensor(part) else part

    return keras.tree.traverse(rows, parts)


def symbolic_build(model: keras.Model, batch: Any) -> None:
    """Build model, metrics, losses and optimizer from the shapes of one batch.

    Private because Keras offers no public way to build metrics before the first step, and
    variables must exist before a step is traced.
    """
    model._symbolic_build(data_batch=batch)


def symbolic_call(model: keras.Model, batch: Any) -> None:
    """Build the model alone, where there are no targets. Private: public ways need real data."""
    if not all(layer.built for layer in flat_layers(model)):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        keras.src.backend.compute_output_spec(model, x, training=False)


def call_symbolically(function: Callable[..., Any], *args: Any) -> Any:
    """Trace a function for the variables it makes. Private: public ways trace a model's call."""
    return keras.src.backend.compute_output_spec(function, *args)


def flat_layers(model: keras.Model) -> list[Any]:
    """The model and every layer inside it. Private: the public list has one level only."""
    return list(model._flatten_layers())


def inner_layers(layer: Any) -> list[Any]:
    """The layers directly inside a layer or model. Private: the public list is of models alone."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def inputs_from(operation: Any) -> list[Any]:
    """The operations of a functional model that one takes its inputs from, call by call.

    Private because only a config tells it, and a config of all layers takes long to make.
    """
    return [
        before.operation
        for node in getattr(operation, "_inbound_nodes", ())
        for before in node.parent_nodes
    ]


def is_graph_of_layers(model: keras.Model) -> bool:
    """Whether it is Functional or Sequential, and can be cloned layer by layer.

    Private because Keras exports no name for the class of functional models.
    """
    return isinstance(model, keras.Sequential | Functional)


def has_own_config(model: keras.Model) -> bool:
    """Whether a graph of layers is told by a get_config of its class, as tasks of KerasHub are.

    Private because Keras exports no name for the class of functional models.
    """
    of_keras = (Functional.get_config, keras.Sequential.get_config, keras.Model.get_config)
    return type(model).get_config not in of_keras


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """What `compile` was called with, as the live objects: losses may be plain functions."""
    arguments = dict(model._compile_config.config)
    arguments["optimizer"] = model.optimizer  # with its loss scaling, where compile added it
    arguments["auto_scale_loss"] = False
    return arguments


def metrics_in_use(model: keras.Model) -> list[Any]:
    """The metric objects that the user gave to `compile`, before and after they are built."""
    if model._compile_metrics is None:
        return []
    given = (model._compile_metrics._user_metrics, model._compile_metrics._user_weighted_metrics)
    return [m for m in keras.tree.flatten(given) if isinstance(m, keras.metrics.Metric)]


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """The values of `logs` in the order in which Keras's `evaluate` returns them."""
    return model._flatten_metrics_in_order(logs)


def restored_epoch(model: keras.Model) -> int | None:
    """The epoch that BackupAndRestore found; it tells Keras's own fit in this private way."""
    return model._initial_epoch


def set_restored_epoch(model: keras.Model, epoch: int) -> None:
    """The same on a task that was told by the chief."""
    model._initial_epoch = epoch


def traces_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether it profiles single batches. Private: the argument itself is not kept."""
    return bool(callback._should_trace)


@contextlib.contextmanager
def global_seed_generator(generator: keras.random.SeedGenerator) -> Iterator[None]:
    """Scope in which this thread draws from `generator` where no seed is given.

    Private because Keras makes the one it uses by itself, one in each thread.
    """
    # The name as such: only Keras 3.13 and later have a constant for it.
    name = "global_seed_generator"
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


def trusted() -> Any:
    """A scope in which lambdas may be deserialized: for objects alive in this process only."""
    return SafeModeScope(safe_mode=False)


def trained_by(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for. Private: there is no public list."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(inner._trainable_variables)


@contextlib.contextmanager
def distribution_strategy_of(
    optimizers: Sequence[Any], strategy: tf.distribute.Strategy
) -> Iterator[None]:
    """Scope in which optimizers work under `strategy`.

    Private because an optimizer keeps the strategy that was current when it was made.
    """
    before = [optimizer._distribution_strategy for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer._distribution_strategy = strategy
        # There is nothing to sum. Keras would ask TensorFlow to, which registers the gradient of
        # that sum, and with it the graph of the step, for the life of the process.
        vars(optimizer)["_all_reduce_sum_gradients"] = lambda grads_and_vars: grads_and_vars
    try:
        yield
    finally:
        for optimizer, original in zip(optimizers, before, strict=True):
            optimizer._distribution_strategy = original
            vars(optimizer).pop("_all_reduce_sum_gradients", None)


def loss_weights(sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Sample weights and mask as the one tensor by whose sum Keras's reduction divides, or None.

    Private because the reduction does not tell.
    """
    if sample_weight is not None:
        sample_weight = tf.convert_to_tensor(sample_weight, dtype)
    return loss_module.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


def stateless_scope() -> keras.StatelessScope | None:
    """The open keras.StatelessScope, None without one.

    Private because Keras does not tell which one is open.
    """
    scope: keras.StatelessScope | None = get_stateless_scope()
    return scope


def step_variables(optimizer: Any) -> tuple[Any, Any]:
    """(the variable that counts steps, that of the learning rate, or None under a schedule).

    Private because `iterations` and `learning_rate` give values computed from them.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    return inner._iterations, rate if isinstance(rate, keras.Variable) else None
