"""The private names of TensorFlow that a strategy of one's own needs, each with the reason.

`tf.distribute.StrategyExtended` is public, but what every synchronous strategy of TensorFlow is
made of is not: its threads, its containers of values, its distributed datasets. They are used here
as MirroredStrategy uses them, so that nothing of it is written again.

`tests/strategies/test_tf_private.py` fails with the name and the reason when a release moves one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    cross_device_ops,
    cross_device_utils,
    device_util,
    distribute_lib,
    distribute_utils,
    input_lib,
    input_util,
    mirrored_run,
    parameter_server_strategy_v2,
    ps_values,
    values,
    values_util,
)
from tensorflow.python.eager import context, record

from tfdist_ext.placement.live._keras_private import optimizer_behind
from tfdist_ext.placement.live._tf_private import ServerVariable
from tfdist_ext.placement.live.updates import updates_by_row, with_each_piece

__all__ = [
    "CopiedVariable",
    "ServersExtended",
    "across",
    "all_reduce",
    "call_for_each_replica",
    "container_of",
    "copied_to",
    "copied_variable",
    "datasets_from_function",
    "devices_of",
    "distributed_dataset",
    "full_name",
    "gathered",
    "is_mirrored",
    "is_synchronized_on_read",
    "of_replica",
    "outside_of_tapes",
    "per_replica",
    "read_from_all",
    "reduced_on",
    "reduced_plain",
    "results_of_update",
    "shared_variable",
    "updating",
    "validate_neighbour",
]


class ServersExtended(parameter_server_strategy_v2.ParameterServerStrategyV2Extended):
    """What ParameterServerStrategy does, with updates of variables in pieces where the pieces are.

    Private because TensorFlow's strategy cannot be given another one publicly. Its own update
    asks a variable in pieces for the one device that it is on.
    """

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if not isinstance(var, ServerVariable):
            return super()._update(var, fn, args, kwargs, group)
        optimizer = optimizer_behind(fn)
        if optimizer is None or not updates_by_row(optimizer):
            with tf.device(var.device), distribute_lib.UpdateContext(var.device):
                return fn(var, *args, **kwargs)
        results = []
        for number, piece, mine in with_each_piece(var, args):
            with (
                tf.device(piece.device),
                distribute_lib.UpdateContext(piece.device),
                var.as_piece(number),
            ):
                results.append(fn(var, *mine, **kwargs))
        return results


def _give_scalar_conversions(variables: type) -> None:
    """Let `float`, `int` and `complex` read distributed variables, as they read a tf.Variable.

    Private because it adds methods that a class of TensorFlow lacks: `float(variable)` is a
    TypeError there, and so is Keras's `float(optimizer.learning_rate)`, which asks its tf.Variable.
    """
    for scalar in (float, int, complex):
        name = f"__{scalar.__name__}__"
        if not hasattr(variables, name):
            # numpy() raises what tf.Variable raises inside a tf.function.
            setattr(variables, name, lambda variable, scalar=scalar: scalar(variable.numpy()))


_give_scalar_conversions(values.DistributedVariable)


def all_reduce(op: tf.distribute.ReduceOp, values: Sequence[Any]) -> list[Any]:
    """`ReplicaContext.all_reduce` of a list of tensors or slices, without a gradient.

    Private because the public one is a `tf.custom_gradient`. In a graph TensorFlow registers each
    of these for the life of the process, and with it the graph of the whole step: a model that is
    deleted would keep some megabytes.
    """
    context = tf.distribute.get_replica_context()
    if not context.strategy.extended._use_merge_call():
        options = tf.distribute.experimental.CommunicationOptions()
        return list(context.strategy.extended._replica_ctx_all_reduce(op, list(values), options))

    def of_all(strategy: tf.distribute.Strategy, *parts: Any) -> Any:
        # With one replica a part is a tensor, and its destination is told by its device.
        pairs = [(part, part.device if isinstance(part, tf.Tensor) else part) for part in parts]
        return strategy.extended.batch_reduce_to(op, pairs)

    return list(context.merge_call(of_all, args=tuple(values)))


class CopiedVariable(values.MirroredVariable):
    """A MirroredVariable that is read outside of replicas as its strategy's `read_var` says.

    Private because the public tf.Variable has no containers of copies. Every way of reading one
    ends in these methods, most of them those that TensorFlow's SyncOnReadVariable overrides.
    """

    def _get(self) -> Any:
        if values_util.is_saving_non_distributed():
            return self._primary
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            return super()._get()

    def _get_cross_replica(self) -> Any:
        return self._distribute_strategy.extended.read_var(self)

    def value(self) -> Any:
        if values_util.is_saving_non_distributed():
            return self._primary.value()
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            if values_util.get_current_replica_id_as_int() is None:
                return self._get_cross_replica()
            return super().value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)


_VARIABLE_CLASSES = {
    tf.VariableSynchronization.ON_WRITE: CopiedVariable,
    tf.VariableSynchronization.ON_READ: values.SyncOnReadVariable,
}


def copied_variable(
    strategy: tf.distribute.Strategy, make_copies: Callable[..., list[Any]], **kwargs: Any
) -> Any:
    """One variable of copies: `make_copies(**kwargs)` gives a plain variable for each replica.

    Private because TensorFlow has no public way to put variables together as MirroredStrategy does.
    """
    return distribute_utils.create_mirrored_variable(
        strategy,
        make_copies,
        _VARIABLE_CLASSES,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        **kwargs,
    )


def shared_variable(strategy: tf.distribute.Strategy, variable: Any, aggregation: Any) -> Any:
    """One plain variable for all replicas, whose assignments in a replica are aggregated.

    Private because CentralStorageStrategy alone can make one.
    """
    return ps_values.AggregatingVariable(strategy, variable, aggregation)


def outside_of_tapes() -> Any:
    """Scope in which gradient tapes do not see what a variable's initial value reads.

    Private because `tape.stop_recording` needs the tape.
    """
    return record.stop_recording()


@contextlib.contextmanager
def across(device: str) -> Iterator[None]:
    """Scope on a device that may take tensors of other devices without a word.

    Private because the policy of this thread cannot be set publicly.
    """
    with tf.device(device), context.device_policy(context.DEVICE_PLACEMENT_SILENT):
        yield


def call_for_each_replica(
    strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run `fn` in a thread for each replica that `merge_call` can stop and go on with.

    Private because it is the runtime of MirroredStrategy.
    """
    return mirrored_run.call_for_each_replica(strategy, fn, args, kwargs)


def per_replica(parts: Sequence[Any], *, mirrored: bool = False, always: bool = False) -> Any:
    """Structures of replicas as one structure of values per replica.

    Private because the classes of these values have no public constructor.

    Args:
        mirrored: the values are known to be equal.
        always: also where all replicas have the very same object.
    """
    wrap = values.Mirrored if mirrored else values.PerReplica
    return distribute_utils.regroup(tuple(parts), wrap, always)


def of_replica(number: int, structure: Any) -> Any:
    """What a replica sees of a structure of values per replica. Private as `per_replica` is."""
    return distribute_utils.select_replica(number, structure)


def updating(number: int) -> Any:
    """Scope in which other variables, too, stand for their copy of this number.

    Private: it is what `extended.update` opens.
    """
    return distribute_lib.UpdateContext(number)


def results_of_update(extended: Any, results: Sequence[Any], group: bool) -> Any:
    """What `extended.update` returns for the results of each copy. Private as `updating` is."""
    return distribute_utils.update_regroup(extended, tuple(results), group)


def container_of(value: Any) -> Any:
    """The variable whose copy this is; anything else as it is. Private: copies do not tell."""
    if isinstance(value, ps_values.AggregatingVariable):
        return value
    shared = getattr(value, "_aggregating_container", lambda: None)()
    return distribute_utils.value_container(value) if shared is None else shared


def is_mirrored(value: Any) -> bool:
    """Whether values are known to be equal on all replicas. Private: the type is."""
    return bool(distribute_utils.is_mirrored(value))


def is_synchronized_on_read(variable: Any) -> bool:
    """Whether each replica has a value of its own, as in a metric. Private: the type is."""
    return isinstance(variable, values.SyncOnReadVariable)


def read_from_all(variable: Any) -> Any:
    """The aggregate of a variable synchronized on read. Private: `value()` asks the context."""
    return variable._get_cross_replica()


def validate_neighbour(variable: Any, extended: Any) -> None:
    """Raise ValueError where `colocate_vars_with` is given what is none of the strategy's.

    Private because a variable does not tell its strategy publicly.
    """
    distribute_utils.validate_colocate(variable, extended)


def full_name(device: str) -> str:
    """ "/job:localhost/replica:0/task:0/device:CPU:0" of "CPU:0".

    Private: TensorFlow compares devices by such names, and only lists them publicly.
    """
    return str(device_util.canonicalize(device))


def devices_of(destinations: Any) -> tuple[str, ...]:
    """Full names of the devices of a value, a variable or a name.

    Private: the argument `destinations` of reductions is one of many types.

    Raises:
        ValueError: a tensor that is on no device.
    """
    cross_device_ops.validate_destinations(destinations)
    return tuple(cross_device_ops.get_devices_from(destinations))


def reduced_on(device: str, op: Any, parts: Sequence[Any]) -> Any:
    """Sum or mean of tensors or slices, computed on a device.

    Private: adding slices is concatenating them, which tf.add_n does not know.
    """
    with across(device):
        total = cross_device_utils.aggregate_tensors_or_indexed_slices(list(parts))
        if op == tf.distribute.ReduceOp.MEAN:
            total = cross_device_utils.divide_by_n_tensors_or_indexed_slices(total, len(parts))
    return total


def reduced_plain(op: Any, value: Any, destinations: Any, replicas: int) -> Any:
    """The reduction of what is no value per replica, as TensorFlow's strategies define it.

    Private because they share it.
    """
    return cross_device_ops.reduce_non_distributed_value(op, value, destinations, replicas)


def copied_to(device: str, value: Any) -> Any:
    """A tensor or slices on a device. Private: tf.identity does not take slices."""
    return cross_device_utils.copy_tensor_or_indexed_slices_to_device(value, device)


def gathered(value: Any, destinations: Any, axis: Any) -> Any:
    """Values of all replicas along an axis. Private: only `reduce` of these classes is public."""
    return tf.distribute.ReductionToOneDevice()._gather(value, destinations=destinations, axis=axis)


def distributed_dataset(
    strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, workers: Any, options: Any
) -> Any:
    """A dataset whose batches are cut for the replicas. Private: the class cannot be made publicly.

    Args:
        workers: (device of the pipeline, devices that it feeds), one for each pipeline.
    """
    return input_util.get_distributed_dataset(
        dataset,
        input_lib.InputWorkers(workers),
        strategy,
        num_replicas_in_sync=strategy.num_replicas_in_sync,
        options=options,
    )


def datasets_from_function(
    strategy: tf.distribute.Strategy, function: Callable[..., Any], workers: Any, options: Any
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
    return input_util.get_distributed_datasets_from_function(
        function, input_lib.InputWorkers(workers), contexts, strategy, options
    )
