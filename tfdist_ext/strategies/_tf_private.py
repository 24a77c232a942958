"""The private names of TensorFlow that a custom strategy needs, each with the reason.

`tf.distribute.StrategyExtended` is public. The threads, containers of values and distributed
datasets of TensorFlow's synchronous strategies are private. A custom strategy inherits them from
MirroredStrategy, so that this package need not write them again.

`tests/strategies/test_tf_private.py` fails with the name and the reason when a release moves one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.placement.live._keras_private import optimizer_behind
from tfdist_ext.placement.live._tf_private import (
    as_counter,
    as_piece,
    is_summed_on_read,
    server_variable_class,
)
from tfdist_ext.placement.live.creating import with_each_piece
from tfdist_ext.placement.live.initial_values import with_known_rows
from tfdist_ext.placement.live.learning import updates_by_row
from tfdist_ext.private_names import PrivateNames

# A value of a replica, or the result of a reduction.
Value: TypeAlias = "tf.Tensor | tf.IndexedSlices"

_READ_ONLY = "framework.auto_control_deps_utils"

NAMES = PrivateNames(
    "tensorflow.python",
    StrategyError,
    {
        "distribute.cross_device_ops.get_devices_from": "the destinations of reductions",
        "distribute.cross_device_ops.validate_destinations": "the destinations of reductions",
        "distribute.cross_device_utils.copy_tensor_or_indexed_slices_to_device": "reductions",
        "distribute.device_util.canonicalize": "names of devices",
        "distribute.distribute_lib.UpdateContext": "updates of variables",
        "distribute.distribute_utils.regroup": "values per replica",
        "distribute.distribute_utils.select_replica": "values per replica",
        "distribute.distribute_utils.update_regroup": "the results of updates",
        "distribute.distribute_utils.value_container": "the variable behind a copy",
        "distribute.mirrored_strategy.MirroredExtended": "strategies on StrategyTemplate",
        "distribute.ps_values.AggregatingVariable": "variables that replicas share",
        "distribute.values.DistributedVariable": "float() and int() of variables",
        "distribute.values.Mirrored": "values that are equal on all replicas",
        "distribute.values.PerReplica": "values per replica",
        "distribute.values.SyncOnReadVariable": "metrics",
        "eager.context.DEVICE_PLACEMENT_SILENT": "copies from device to device",
        "eager.context.context": "functions that all replicas call",
        "eager.context.device_policy": "copies from device to device",
        "eager.polymorphic_function.atomic_function.AtomicFunction": "functions that replicas call",
        "eager.polymorphic_function.atomic_function.make_call_op_in_graph": "the same",
        "eager.record.could_possibly_record": "gradients of the global batch",
        "eager.record.stop_recording": "initial values that tapes do not see",
        f"{_READ_ONLY}.READ_ONLY_RESOURCE_INPUTS_ATTR": "calls of functions",
        f"{_READ_ONLY}.get_read_only_resource_input_indices_graph": "the same",
        "framework.ops.set_int_list_attr": "the same",
        "grappler.cluster.Cluster": "functions that replicas call, optimized once",
        "grappler.cluster.device_properties_pb2": "the same",
        "grappler.tf_optimizer.OptimizeGraph": "the same",
    },
)


def count_and_update_on_servers(strategy: tf.distribute.ParameterServerStrategy) -> None:
    """Lets a ParameterServerStrategy create counters, and update shards where they are.

    Private because TensorFlow's own update asks a variable in shards for the one device that it is
    on, and only `_update` and `_create_variable` can be replaced.
    """
    base: Any = type(strategy.extended)

    class ServersExtended(base):
        def _create_variable(self, next_creator: Any, **kwargs: Any) -> tf.Variable:
            return as_counter(super()._create_variable(next_creator, **kwargs), kwargs)

        def _update(self, var: tf.Variable, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
            if not isinstance(var, server_variable_class()):
                return super()._update(var, fn, args, kwargs, group)
            optimizer = optimizer_behind(fn)
            if optimizer is None or not updates_by_row(optimizer):
                with tf.device(var.device), updating(var.device):
                    return fn(var, *args, **kwargs)
            results = []
            for number, piece, own_args in with_each_piece(var, args):
                with tf.device(piece.device), updating(piece.device), as_piece(number):
                    results.append(fn(var, *own_args, **kwargs))
            return results

    strategy.extended.__class__ = ServersExtended


def workers_strategy(first_key: int, **arguments: Any) -> tf.distribute.Strategy:
    """Creates a MultiWorkerMirroredStrategy; the group keys of its collectives begin here.

    Private because TensorFlow gives the collectives of all strategies of a process the same keys.
    A step fails if its sum has another type or shape than the sum of an earlier strategy.
    """
    base = tf.distribute.MultiWorkerMirroredStrategy
    name = "_collective_key_base"
    members = {name: NAMES.of(base, name, "several strategies in a process") + first_key - 1}
    return type(base.__name__, (base,), {"__module__": base.__module__, **members})(**arguments)


def with_metrics_per_replica(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """The same CentralStorageStrategy, in which each replica has its own copy of a metric.

    Private because CentralStorageStrategy ignores `synchronization=ON_READ`, and only
    `_create_variable` can be replaced. Keras adds to a metric by `assign(self + x)`: on one shared
    variable, the old value counts once for each replica.
    """
    base: Any = type(strategy.extended)

    class CentralStorageExtended(base):
        def _create_variable(self, next_creator: Any, **kwargs: Any) -> tf.Variable:
            kwargs["initial_value"] = with_known_rows(kwargs)
            if not is_summed_on_read(kwargs) or len(self.worker_devices) == 1:
                return super()._create_variable(next_creator, **kwargs)
            kwargs.pop("colocate_with", None)
            copies: list[tf.Variable] = []
            for device in self.worker_devices:
                with across(device), outside_of_tapes():
                    copies.append(next_creator(**kwargs))
                kwargs["initial_value"] = lambda: tf.zeros(copies[0].shape, copies[0].dtype)
            counted = NAMES("distribute.values.SyncOnReadVariable")
            return counted(strategy, copies, kwargs["aggregation"])

    strategy.extended.__class__ = CentralStorageExtended
    return strategy


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


def all_reduce_in_replica(extended: tf.distribute.StrategyExtended) -> Callable[..., Any] | None:
    """The reduction of a strategy that does without `merge_call`; None for other strategies.

    Call the reduction in a replica, with the op, the values and CommunicationOptions.

    Private because the public `ReplicaContext.all_reduce` is a `tf.custom_gradient`. In a graph
    TensorFlow registers each of these for the life of the process, and with it the graph of the
    whole step: a model that is deleted would keep some megabytes.
    """
    use = "reductions without a gradient"
    if NAMES.of(extended, "_use_merge_call", use)():
        return None
    return NAMES.of(extended, "_replica_ctx_all_reduce", use)


@functools.cache
def mirrored_class(extended: type) -> Any:
    """A subclass of a strategy's `extended`, which inherits missing methods from MirroredStrategy.

    Private because the public base, StrategyExtended, lacks what `Strategy.run`, variables, data
    sets and checkpoints call.
    """
    base = NAMES("distribute.mirrored_strategy.MirroredExtended")
    return type(extended.__name__, (extended, base), {})


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


def is_recording() -> bool:
    """Whether any gradient tape records in this thread. Private: a tape knows no other tapes."""
    return NAMES("eager.record.could_possibly_record")()


@contextlib.contextmanager
def across(device: str) -> Iterator[None]:
    """Scope on a device that may silently take tensors of other devices.

    Private because the policy of this thread cannot be set publicly.
    """
    silent = NAMES("eager.context.DEVICE_PLACEMENT_SILENT")
    with tf.device(device), NAMES("eager.context.device_policy")(silent):
        yield


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
    """A replica's values of a structure of values per replica. Private as `per_replica` is."""
    return NAMES("distribute.distribute_utils.select_replica")(number, structure)


def updating(number: int | str) -> contextlib.AbstractContextManager[None]:
    """Scope in which each variable stands for its copy of this number, or on this device.

    Private: it is what `extended.update` opens.
    """
    return NAMES("distribute.distribute_lib.UpdateContext")(number)


def results_of_update(
    extended: tf.distribute.StrategyExtended, results: Sequence[Any], group: bool
) -> Any:
    """What `extended.update` returns for the results of each copy. Private as `updating` is."""
    return NAMES("distribute.distribute_utils.update_regroup")(extended, tuple(results), group)


def container_of(value: Any) -> Any:
    """The variable of a copy; any other value unchanged. Private: copies do not tell."""
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


def full_name(device: str) -> str:
    """ "/job:localhost/replica:0/task:0/device:CPU:0" of "CPU:0", as in `tensor.device`.

    Private because the public names of devices lack the job and the task of this process.
    """
    return str(NAMES("distribute.device_util.canonicalize")(device))


def devices_of(destinations: Any) -> tuple[str, ...]:
    """Full names of the devices of a value, a variable or a name.

    Private: the argument `destinations` of reductions is one of many types.

    Raises:
        ValueError: a tensor that is on no device.
    """
    NAMES("distribute.cross_device_ops.validate_destinations")(destinations)
    return tuple(NAMES("distribute.cross_device_ops.get_devices_from")(destinations))


def copied_to(device: str, value: Value) -> Value:
    """A tensor or slices on a device. Private: there is no public function for slices."""
    copy = "distribute.cross_device_utils.copy_tensor_or_indexed_slices_to_device"
    return NAMES(copy)(value, device)


def unchanged_by_calls(
    function: tf.types.experimental.ConcreteFunction, library: tf.compat.v1.GraphDef
) -> Any:
    """A copy of the function for `call_in_graph`, which TensorFlow uses unchanged in every call.

    Private because `tf.function` does not take the attribute: TensorFlow would make another
    function of it for each call whose results are not all used, and optimize and place each.

    Args:
        library: the graph it was made from, with functions that it may call.
    """
    known = function.inference_fn
    definition = type(known.definition)()
    definition.CopyFrom(known.definition)
    definition.signature.name += "_unchanged"
    definition.attr["_nospecialize"].b = True
    runtime = NAMES("eager.context.context")()
    runtime.add_function_def(definition)
    new = [f for f in library.library.function if not runtime.has_function(f.signature.name)]
    for callee in new:
        runtime.add_function_def(callee)
    made = NAMES("eager.polymorphic_function.atomic_function.AtomicFunction")(
        definition.signature.name,
        runtime,
        known.function_type,
        list(known.children),
        known.call_options,
        function.graph,
    )
    for callee in new:
        weakref.finalize(made, runtime.remove_function, callee.signature.name)
    return made


def call_in_graph(function: Any, args: Sequence[tf.Tensor]) -> tf.Operation:
    """The call of a function with all of its inputs, captured ones too.

    Private because a concrete function captures variables once, and the operation
    `tf.raw_ops.StatefulPartitionedCall` does not say which of them are only read: calls that share
    one would wait for each other.

    Args:
        function: from `unchanged_by_calls`; TensorFlow does not optimize it for each call.
    """
    call = NAMES("eager.polymorphic_function.atomic_function.make_call_op_in_graph")
    outputs = call(function, args, {"config_proto": _not_optimized(), "executor_type": ""})
    graph = tf.compat.v1.get_default_graph()
    return outputs[0].op if outputs else graph.get_operations()[-1]


def call_on_device(function: Any, args: Sequence[tf.Tensor], device: str) -> tf.Operation:
    """The call of a function that runs on one CPU of this process, as by `call_in_graph`.

    If the function fails, its error is raised. If a function of `call_in_graph` fails, TensorFlow
    often reports only that operations on other devices were cancelled.

    Private because the operation does not say which variables are only read.

    Args:
        function: from `unchanged_by_calls`, with at least one output.
        device: the full name of the CPU.
    """
    only_read = NAMES(f"{_READ_ONLY}.get_read_only_resource_input_indices_graph")
    attribute = NAMES(f"{_READ_ONLY}.READ_ONLY_RESOURCE_INPUTS_ATTR")
    set_attribute = NAMES("framework.ops.set_int_list_attr")
    called = tf.compat.v1.NameAttrList(name=function.name.decode())
    types = [output.dtype for output in function.function_type.flat_outputs]
    target = tf.constant(device)
    outputs = tf.raw_ops.RemoteCall(target=target, args=list(args), Tout=types, f=called)
    operation = outputs[0].op
    # The target is the first input.
    set_attribute(operation, attribute, [number + 1 for number in only_read(function.graph)])
    return operation


@functools.cache
def _not_optimized() -> bytes:
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()


def optimized(
    graph: tf.compat.v1.GraphDef, wanted: Sequence[str], device: str
) -> tf.compat.v1.GraphDef:
    """A graph as TensorFlow optimizes it for a device.

    Private because TensorFlow optimizes a function that is not inlined for each call, or never.

    Args:
        wanted: the tensors and nodes that must stay.

    Raises:
        ValueError: TensorFlow cannot optimize it alone.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(NAMES("eager.context.context")().config)
    config.graph_options.rewrite_options.min_graph_nodes = -1
    # Loops and conds stay operations on functions: others cannot be put into a function.
    config.experimental.executor_type = "SINGLE_THREADED_EXECUTOR"
    meta = tf.compat.v1.MetaGraphDef(graph_def=graph)
    meta.collection_def["train_op"].node_list.value.extend(wanted)
    described = NAMES("grappler.cluster.device_properties_pb2").NamedDevice(name=device)
    described.properties.type = tf.DeviceSpec.from_string(device).device_type
    cluster = NAMES("grappler.cluster.Cluster")(devices=[described])
    try:
        return NAMES("grappler.tf_optimizer.OptimizeGraph")(config, meta, False, b"step", cluster)
    finally:
        cluster.Shutdown()


@contextlib.contextmanager
def lightly_optimized() -> Iterator[None]:
    """Scope in which TensorFlow optimizes less: for calls of functions that are optimized already.

    Private because the public options are for all functions of a process.
    """
    runtime = NAMES("eager.context.context")()
    before = runtime.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.meta_optimizer_iterations = rewriting.ONE
    rewriting.optimizers.extend(["pruning", "constfold", "dependency"])
    runtime.function_call_options = type(before)(before.executor_type, config)
    try:
        yield
    finally:
        runtime.function_call_options = before
