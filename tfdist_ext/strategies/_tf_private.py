"""The private names of TensorFlow that a strategy of one's own needs, each with the reason.

`tf.distribute.StrategyExtended` is public, but what every synchronous strategy of TensorFlow is
made of is not: its threads, its containers of values, its distributed datasets. They are used here
as MirroredStrategy uses them, so that nothing of it is written again.

`tests/strategies/test_tf_private.py` fails with the name and the reason when a release moves one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.placement.live._keras_private import optimizer_behind
from tfdist_ext.placement.live._tf_private import as_piece, server_variable_class
from tfdist_ext.placement.live.updates import updates_by_row, with_each_piece
from tfdist_ext.private_names import PrivateNames

__all__ = [
    "NAMES",
    "across",
    "all_reduce",
    "call_for_each_replica",
    "container_of",
    "copied_to",
    "copied_variable",
    "copied_variable_class",
    "datasets_from_function",
    "devices_of",
    "distributed_dataset",
    "full_name",
    "gathered",
    "is_copied",
    "is_mirrored",
    "is_synchronized_on_read",
    "of_replica",
    "outside_of_tapes",
    "per_replica",
    "read_from_all",
    "reduced_on",
    "reduced_plain",
    "results_of_update",
    "servers_extended",
    "shared_variable",
    "updating",
    "validate_neighbour",
    "with_scalar_conversions",
]

# What a replica has, or a reduction gives.
Value: TypeAlias = "tf.Tensor | tf.IndexedSlices"
# (device of the pipeline, devices that it feeds), one for each pipeline.
Pipelines: TypeAlias = Sequence[tuple[str, Sequence[str]]]

NAMES = PrivateNames(
    "tensorflow.python",
    StrategyError,
    {
        "distribute.cross_device_ops.get_devices_from": "the destinations of reductions",
        "distribute.cross_device_ops.reduce_non_distributed_value": "reductions of plain values",
        "distribute.cross_device_ops.validate_destinations": "the destinations of reductions",
        "distribute.distribute_lib.UpdateContext": "updates of variables",
        "distribute.distribute_utils.VARIABLE_POLICY_MAPPING": "variables with copies",
        "distribute.distribute_utils.create_mirrored_variable": "variables with copies",
        "distribute.distribute_utils.regroup": "values per replica",
        "distribute.distribute_utils.select_replica": "values per replica",
        "distribute.distribute_utils.update_regroup": "the results of updates",
        "distribute.distribute_utils.validate_colocate": "colocate_vars_with",
        "distribute.distribute_utils.value_container": "the variable behind a copy",
        "distribute.input_lib.InputWorkers": "distributed datasets",
        "distribute.input_util.get_distributed_dataset": "distributed datasets",
        "distribute.input_util.get_distributed_datasets_from_function": "distributed datasets",
        "distribute.mirrored_run.call_for_each_replica": "the threads of replicas",
        "distribute.ps_values.AggregatingVariable": "variables that replicas share",
        "distribute.values.DistributedVariable": "float() and int() of variables",
        "distribute.values.Mirrored": "values that are equal on all replicas",
        "distribute.values.MirroredVariable": "variables with copies",
        "distribute.values.PerReplica": "values per replica",
        "distribute.values.SyncOnReadVariable": "metrics",
        "distribute.values_util.get_current_replica_id_as_int": "reading variables with copies",
        "distribute.values_util.is_saving_non_distributed": "saving variables with copies",
        "eager.context.DEVICE_PLACEMENT_SILENT": "copies from device to device",
        "eager.context.device_policy": "copies from device to device",
        "eager.record.stop_recording": "initial values that tapes do not see",
    },
)


@functools.cache
def servers_extended(base: Any) -> Any:
    """What ParameterServerStrategy does, with updates of variables in shards where the shards are.

    Private because TensorFlow's own update asks a variable in shards for the one device that it is
    on, and only `_update` can be replaced.

    Args:
        base: the class of a ParameterServerStrategy's `extended`.
    """

    class ServersExtended(base):
        def _update(self, var: tf.Variable, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
            if not isinstance(var, server_variable_class()):
                return super()._update(var, fn, args, kwargs, group)
            optimizer = optimizer_behind(fn)
            if optimizer is None or not updates_by_row(optimizer):
                with tf.device(var.device), updating(var.device):
                    return fn(var, *args, **kwargs)
            results = []
            for number, piece, mine in with_each_piece(var, args):
                with tf.device(piece.device), updating(piece.device), as_piece(number):
                    results.append(fn(var, *mine, **kwargs))
            return results

    return ServersExtended


def with_scalar_conversions(variable: Any) -> Any:
    """The same variable, which `float`, `int` and `complex` read as they read a tf.Variable.

    Private because TensorFlow's distributed variables lack this: `float(variable)` is a TypeError,
    and so is Keras's `float(optimizer.learning_rate)`, which asks its tf.Variable. The variable
    gets a class of its own, and TensorFlow's stays as it is.
    """
    kind: type = type(variable)
    is_distributed = isinstance(variable, NAMES("distribute.values.DistributedVariable"))
    if is_distributed and not hasattr(kind, "__float__"):
        variable.__class__ = _class_with_scalar_conversions(kind)
    return variable


@functools.cache
def _class_with_scalar_conversions(kind: type) -> type:
    # numpy() raises what tf.Variable raises inside a tf.function.
    methods: dict[str, Any] = {
        f"__{scalar.__name__}__": lambda variable, scalar=scalar: scalar(variable.numpy())
        for scalar in (float, int, complex)
    }
    return type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def all_reduce(
    op: tf.distribute.ReduceOp, values: Sequence[Value], scope: Callable[[], Any]
) -> list[Value]:
    """`ReplicaContext.all_reduce` of a list of tensors or slices, without a gradient.

    `scope()` is entered in the thread that makes the collectives.

    Private because the public one is a `tf.custom_gradient`. In a graph TensorFlow registers each
    of these for the life of the process, and with it the graph of the whole step: a model that is
    deleted would keep some megabytes.
    """
    context = tf.distribute.get_replica_context()
    extended, use = context.strategy.extended, "reductions without a gradient"
    if not NAMES.of(extended, "_use_merge_call", use)():
        options = tf.distribute.experimental.CommunicationOptions()
        reduce = NAMES.of(extended, "_replica_ctx_all_reduce", use)
        with scope():
            return list(reduce(op, list(values), options))

    def of_all(strategy: tf.distribute.Strategy, *parts: Any) -> Any:
        # With one replica a part is a tensor, and its destination is told by its device.
        pairs = [(part, part.device if isinstance(part, tf.Tensor) else part) for part in parts]
        with scope():
            return strategy.extended.batch_reduce_to(op, pairs)

    return list(context.merge_call(of_all, args=tuple(values)))


@functools.cache
def copied_variable_class() -> Any:
    """A MirroredVariable that is read outside of replicas as its strategy's `read_var` says.

    Private because the public tf.Variable has no containers of copies. Every way of reading one
    ends in these methods, most of them those that TensorFlow's SyncOnReadVariable overrides.
    """
    base: Any = NAMES("distribute.values.MirroredVariable")

    class CopiedVariable(base):
        def _get(self) -> Any:
            if _saves_one_copy():
                return self._primary
            with _inside(self._distribute_strategy):
                return super()._get()

        def _get_cross_replica(self) -> Any:
            return self._distribute_strategy.extended.read_var(self)

        def value(self) -> Any:
            if _saves_one_copy():
                return self._primary.value()
            with _inside(self._distribute_strategy):
                if NAMES("distribute.values_util.get_current_replica_id_as_int")() is None:
                    return self._get_cross_replica()
                return super().value()

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return np.asarray(self.numpy(), dtype)

    return CopiedVariable


def _saves_one_copy() -> bool:
    return bool(NAMES("distribute.values_util.is_saving_non_distributed")())


def _inside(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[object]:
    """The strategy's scope, or nothing where it is open; inside of another one a RuntimeError."""
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return strategy.scope()


def is_copied(variable: tf.Variable) -> bool:
    """Whether `copied_variable` made it, with a copy on each replica that is equal to the others'.

    Private: the type is.
    """
    return isinstance(variable, copied_variable_class())


def copied_variable(
    strategy: tf.distribute.Strategy, make_copies: Callable[..., list[tf.Variable]], **kwargs: Any
) -> tf.Variable:
    """One variable of copies: `make_copies(**kwargs)` gives a plain variable for each replica.

    Private because TensorFlow has no public way to put variables together as MirroredStrategy does.
    """
    classes = {
        tf.VariableSynchronization.ON_WRITE: copied_variable_class(),
        tf.VariableSynchronization.ON_READ: NAMES("distribute.values.SyncOnReadVariable"),
    }
    policies = NAMES("distribute.distribute_utils.VARIABLE_POLICY_MAPPING")
    create = NAMES("distribute.distribute_utils.create_mirrored_variable")
    return create(strategy, make_copies, classes, policies, **kwargs)


def shared_variable(
    strategy: tf.distribute.Strategy, variable: tf.Variable, aggregation: tf.VariableAggregation
) -> tf.Variable:
    """One plain variable for all replicas, whose assignments in a replica are aggregated.

    Private because CentralStorageStrategy alone can make one.
    """
    return NAMES("distribute.ps_values.AggregatingVariable")(strategy, variable, aggregation)


def outside_of_tapes() -> contextlib.AbstractContextManager[None]:
    """Scope in which gradient tapes do not see what a variable's initial value reads.

    Private because `tape.stop_recording` needs the tape.
    """
    return NAMES("eager.record.stop_recording")()


@contextlib.contextmanager
def across(device: str) -> Iterator[None]:
    """Scope on a device that may take tensors of other devices without a word.

    Private because the policy of this thread cannot be set publicly.
    """
    silent = NAMES("eager.context.DEVICE_PLACEMENT_SILENT")
    with tf.device(device), NAMES("eager.context.device_policy")(silent):
        yield


def call_for_each_replica(
    strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run `fn` in a thread for each replica that `merge_call` can stop and go on with.

    Private because it is the runtime of MirroredStrategy.
    """
    return NAMES("distribute.mirrored_run.call_for_each_replica")(strategy, fn, args, kwargs)


def per_replica(parts: Sequence[Any], *, mirrored: bool = False, always: bool = False) -> Any:
    """Structures of replicas as one structure of values per replica.

    Private because the classes of these values have no public constructor.

    Args:
        mirrored: the values are known to be equal.
        always: also where all replicas have the very same object.
    """
    wrap = NAMES(f"distribute.values.{'Mirrored' if mirrored else 'PerReplica'}")
    return NAMES("distribute.distribute_utils.regroup")(tuple(parts), wrap, always)


def of_replica(number: int, structure: Any) -> Any:
    """What a replica sees of a structure of values per replica. Private as `per_replica` is."""
    return NAMES("distribute.distribute_utils.select_replica")(number, structure)


def updating(number: int | str) -> contextlib.AbstractContextManager[None]:
    """Scope in which other variables, too, stand for their copy of this number, or on this device.

    Private: it is what `extended.update` opens.
    """
    return NAMES("distribute.distribute_lib.UpdateContext")(number)


def results_of_update(
    extended: tf.distribute.StrategyExtended, results: Sequence[Any], group: bool
) -> Any:
    """What `extended.update` returns for the results of each copy. Private as `updating` is."""
    return NAMES("distribute.distribute_utils.update_regroup")(extended, tuple(results), group)


def container_of(value: Any) -> Any:
    """The variable whose copy this is; anything else as it is. Private: copies do not tell."""
    if isinstance(value, NAMES("distribute.ps_values.AggregatingVariable")):
        return value
    shared = getattr(value, "_aggregating_container", lambda: None)()
    if shared is not None:
        return shared
    return NAMES("distribute.distribute_utils.value_container")(value)


def is_mirrored(value: Any) -> bool:
    """Whether values are known to be equal on all replicas. Private: the type is."""
    return isinstance(value, NAMES("distribute.values.Mirrored"))


def is_synchronized_on_read(variable: tf.Variable) -> bool:
    """Whether each replica has a value of its own, as in a metric. Private: the type is."""
    return isinstance(variable, NAMES("distribute.values.SyncOnReadVariable"))


def read_from_all(variable: tf.Variable) -> tf.Tensor:
    """The aggregate of a variable synchronized on read. Private: `value()` asks the context."""
    return NAMES.of(variable, "_get_cross_replica", "reading metrics")()


def validate_neighbour(variable: tf.Variable, extended: tf.distribute.StrategyExtended) -> None:
    """Raise ValueError where `colocate_vars_with` is given what is none of the strategy's.

    Private because a variable does not tell its strategy publicly.
    """
    NAMES("distribute.distribute_utils.validate_colocate")(variable, extended)


def full_name(device: str) -> str:
    """ "/job:localhost/replica:0/task:0/device:CPU:0" of "CPU:0"; tensors have such names."""
    # Of a process that is a task of a cluster, a list of its devices names job and task.
    here = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    local = tf.DeviceSpec("localhost", 0, 0, "CPU", 0)
    full = local.make_merged_spec(here).make_merged_spec(tf.DeviceSpec.from_string(device))
    return str(full.to_string())


def devices_of(destinations: Any) -> tuple[str, ...]:
    """Full names of the devices of a value, a variable or a name.

    Private: the argument `destinations` of reductions is one of many types.

    Raises:
        ValueError: a tensor that is on no device.
    """
    NAMES("distribute.cross_device_ops.validate_destinations")(destinations)
    return tuple(NAMES("distribute.cross_device_ops.get_devices_from")(destinations))


def reduced_on(device: str, op: tf.distribute.ReduceOp, parts: Sequence[Value]) -> Value:
    """Sum or mean of tensors or slices, computed on a device; slices become one of all rows."""
    mean = op == tf.distribute.ReduceOp.MEAN
    with across(device):
        if not all(isinstance(part, tf.IndexedSlices) for part in parts):
            total = tf.add_n([tf.convert_to_tensor(part) for part in parts])
            return total / len(parts) if mean else total
        rows = tf.concat([part.values for part in parts], axis=0)
        # One replica's indices may be int32 where another's are int64.
        kinds = {part.indices.dtype for part in parts}
        kind = kinds.pop() if len(kinds) == 1 else tf.int64
        indices = tf.concat([tf.cast(part.indices, kind) for part in parts], axis=0)
        return tf.IndexedSlices(rows / len(parts) if mean else rows, indices, parts[0].dense_shape)


def reduced_plain(op: tf.distribute.ReduceOp, value: Any, destinations: Any, replicas: int) -> Any:
    """The reduction of what is no value per replica, as TensorFlow's strategies define it.

    Private because they share it.
    """
    reduce = NAMES("distribute.cross_device_ops.reduce_non_distributed_value")
    return reduce(op, value, destinations, replicas)


def copied_to(device: str, value: Value) -> Value:
    """A tensor or slices on a device."""
    with tf.device(device):
        if not isinstance(value, tf.IndexedSlices):
            return tf.identity(value)
        shape = None if value.dense_shape is None else tf.identity(value.dense_shape)
        return tf.IndexedSlices(tf.identity(value.values), tf.identity(value.indices), shape)


def gathered(value: Any, destinations: Any, axis: Any) -> Any:
    """Values of all replicas along an axis. Private: only `reduce` of these classes is public."""
    gather = NAMES.of(tf.distribute.ReductionToOneDevice(), "_gather", "gathering values")
    return gather(value, destinations=destinations, axis=axis)


def distributed_dataset(
    strategy: tf.distribute.Strategy,
    dataset: tf.data.Dataset,
    workers: Pipelines,
    options: tf.distribute.InputOptions | None,
) -> Any:
    """A dataset whose batches are cut for the replicas. Private: the class cannot be made publicly.

    Args:
        workers: (device of the pipeline, devices that it feeds), one for each pipeline.
    """
    return NAMES("distribute.input_util.get_distributed_dataset")(
        dataset,
        NAMES("distribute.input_lib.InputWorkers")(workers),
        strategy,
        num_replicas_in_sync=strategy.num_replicas_in_sync,
        options=options,
    )


def datasets_from_function(
    strategy: tf.distribute.Strategy,
    function: Callable[..., Any],
    workers: Pipelines,
    options: tf.distribute.InputOptions | None,
) -> Any:
    """The datasets that a function of the input context returns, one for each pipeline.

    Private as `distributed_dataset` is.
    """
    contexts = [
        tf.distribute.InputContext(
            num_input_pipelines=len(workers),
            input_pipeline_id=number,
            num_replicas_in_sync=strategy.num_replicas_in_sync,
        )
        for number in range(len(workers))
    ]
    distributed = NAMES("distribute.input_util.get_distributed_datasets_from_function")
    workers = NAMES("distribute.input_lib.InputWorkers")(workers)
    return distributed(function, workers, contexts, strategy, options)
