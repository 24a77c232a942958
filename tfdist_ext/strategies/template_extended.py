"""What stands behind a StrategyTemplate: TensorFlow asks here, and the template's hooks answer.

`tf.distribute.StrategyExtended`, the public base, lacks what `Strategy.run`, variables and
checkpoints call (`call_for_each_replica`, `broadcast_to`, `read_var` and more), so it is here. The
methods with an underscore are those that the base calls and leaves to its descendants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies import _tf_private as tp
from tfdist_ext.strategies.reductions import OTHER, Reduced, takes_what
from tfdist_ext.strategies.template_checks import (
    check_created,
    check_dataset,
    check_number,
    check_read,
    check_reduced,
    check_updated,
)
from tfdist_ext.strategies.template_variables import Creation, made_on_each

if TYPE_CHECKING:
    from tfdist_ext.strategies.template import StrategyTemplate

__all__ = ["TemplateExtended"]

_ONE_PIPELINE_EACH = tf.distribute.InputReplicationMode.PER_REPLICA


class TemplateExtended(tf.distribute.StrategyExtended):
    """One replica for each device of a StrategyTemplate; its hooks decide, and are checked here."""

    # Batches may be of unequal size, and the last one may leave replicas without rows.
    experimental_enable_get_next_as_optional = True
    experimental_between_graph = False
    experimental_should_init = True
    should_checkpoint = True
    should_save_summary = True

    def __init__(self, strategy: StrategyTemplate, devices: Sequence[str]):
        """
        Args:
            devices: full names, one for each replica.
        """
        super().__init__(strategy)
        self._devices = tuple(devices)
        self._host = tp.full_name("/device:CPU:0")
        self._reducing: Sequence[Reduced] = ()  # what is reduced now, if somebody has told
        self._hook_takes_what = takes_what(strategy.reduce_values)
        self._asking = ""  # path of the variable that the hook is asked for

    # Replicas

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `fn` on each replica; to be called in cross-replica context, as `run` does."""
        strategy = self._container_strategy()
        with strategy.scope():
            return tp.call_for_each_replica(strategy, fn, args, kwargs or {})

    def _use_merge_call(self) -> bool:
        return True

    def _in_multi_worker_mode(self) -> bool:
        return False

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._devices

    @property
    def worker_devices_by_replica(self) -> list[list[str]]:
        return [[device] for device in self._devices]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self._devices

    def _get_local_replica_id(self, replica_id_in_sync_group: int | tf.Tensor) -> int | tf.Tensor:
        return replica_id_in_sync_group

    def _get_replica_id_in_sync_group(self, replica_id: int | tf.Tensor) -> int | tf.Tensor:
        return replica_id

    # Variables

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        strategy = self._container_strategy()
        beside = kwargs.pop("colocate_with", None)
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # The replicas' own values, aggregated when they are read: metrics.
            return made_on_each(strategy, self._devices, next_creator, kwargs)
        creation = Creation(strategy, self._devices, next_creator, kwargs)
        if creation.spec is None:
            return creation.create(self._devices)
        if self._asking:
            raise StrategyError(
                f"{type(strategy).__name__}.create_variable makes {self._asking!r} by creating a"
                " variable itself, which would come to the hook again, without an end. Return what"
                " create(devices) makes."
            )
        self._asking = creation.spec.path
        try:
            made = strategy.create_variable(creation.spec, creation.create, beside)
        finally:
            self._asking = ""
        check_created(strategy, made, creation.spec, creation.made, beside)
        return made

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        tp.validate_neighbour(colocate_with_variable, self)

    def value_container(self, value: Any) -> Any:
        return tp.container_of(value)

    def read_var(self, v: tf.Variable) -> tf.Tensor:
        """The value of a variable outside of replicas, also for a checkpoint."""
        if tp.is_synchronized_on_read(v):
            return tp.read_from_all(v)
        if not tp.is_copied(v):
            return tf.identity(v)
        strategy = self._container_strategy()
        value = strategy.read_variable(v, strategy.copies(v))
        return tf.identity(check_read(strategy, value, v))

    def _update(
        self, var: tf.Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        strategy = self._container_strategy()
        # One in pieces is assigned to as a whole, each piece where it is.
        copies = (var.get(),) if is_partitioned(var) else strategy.copies(var)

        def update(number: int) -> Any:
            check_number(strategy, number, var, len(copies))
            copy = copies[number]
            name = tf.name_scope(f"update_{number}")
            with tf.device(getattr(copy, "device", None)), tp.updating(number), name:
                mine = tp.of_replica(number, (tuple(args), kwargs))
                return fn(copy, *mine[0], **mine[1])

        if tp.is_synchronized_on_read(var):
            results = [update(number) for number in range(len(copies))]
        else:
            results = strategy.update_variable(var, copies, update)
            check_updated(strategy, results, var, len(copies))
        return tp.results_of_update(self, results, group)

    # Values

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """A tensor on all devices of `destinations`; a number of Python stays one."""
        if isinstance(tensor, int | float):
            return tensor  # it takes the dtype of the variable that it is added to
        return tf.distribute.ReductionToOneDevice().broadcast(tensor, destinations)

    @contextlib.contextmanager
    def reducing(self, what: Sequence[Reduced]) -> Iterator[None]:
        """Scope of a `batch_reduce_to` of these values, in cross-replica context."""
        before, self._reducing = self._reducing, what
        try:
            yield
        finally:
            self._reducing = before

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Any, destinations: Any, options: Any
    ) -> Any:
        def reduced(value: Any) -> Any:
            if not isinstance(value, tf.distribute.DistributedValues):
                return tp.reduced_plain(reduce_op, value, destinations, len(self._devices))
            if tp.is_mirrored(value):
                if reduce_op == tf.distribute.ReduceOp.MEAN:
                    return value
                raise StrategyError(
                    f"a sum over replicas must be of values that differ, got {value!r}, which is"
                    " the same on all of them. Read it, or use the MEAN."
                )
            return self._reduced(reduce_op, value.values, destinations, what)

        what = _what(value, destinations)
        return tf.nest.map_structure(reduced, value)

    def _batch_reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value_destination_pairs: Any, options: Any
    ) -> Any:
        results = []
        untold: list[Reduced | None] = [None] * len(value_destination_pairs)
        told = self._reducing or untold
        for (value, destinations), what in zip(value_destination_pairs, told, strict=True):
            if isinstance(value, tf.distribute.DistributedValues) and what is not None:
                results.append(self._reduced(reduce_op, value.values, destinations, what))
            elif isinstance(value, tf.distribute.DistributedValues):
                results.append(self._reduce_to(reduce_op, value, destinations, options))
            else:
                # The same tensor comes from every replica. It may be on no device, and the device
                # does not matter: it goes to where the replicas are.
                everywhere = tp.per_replica(
                    [tp.copied_to(device, value) for device in self._devices], always=True
                )
                what = OTHER if what is None else what
                results.append(self._reduced(reduce_op, everywhere.values, everywhere, what))
        return results

    def _reduced(
        self,
        op: tf.distribute.ReduceOp,
        parts: Sequence[tp.Value],
        destinations: Any,
        what: Reduced,
    ) -> Any:
        strategy = self._container_strategy()
        devices = tp.devices_of(destinations)
        parts = tuple(  # a copy of a variable is read where it is
            part if isinstance(part, tf.IndexedSlices) else tf.convert_to_tensor(part)
            for part in parts
        )
        told = {"what": what} if self._hook_takes_what else {}
        results = strategy.reduce_values(op, parts, devices, **told)
        check_reduced(strategy, results, parts, devices)
        there = [
            result if result.device == device else tp.copied_to(device, result)
            for device, result in zip(devices, results, strict=True)
        ]
        return there[0] if len(there) == 1 else tp.per_replica(there, mirrored=True)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        if not isinstance(value, tf.distribute.DistributedValues):
            if len(self._devices) == 1:
                return value
            value = tp.per_replica([value] * len(self._devices), always=True)
        return tp.gathered(value, destinations, axis)

    # Data

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None
    ) -> Any:
        strategy = self._container_strategy()
        made = strategy.distribute_dataset(dataset, options)
        check_dataset(strategy, made)
        return made

    def split(self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None) -> Any:
        """TensorFlow's own way: each batch is cut into one part for each replica."""
        if options is not None and options.experimental_replication_mode == _ONE_PIPELINE_EACH:
            raise NotImplementedError(
                "one pipeline for each replica (InputReplicationMode.PER_REPLICA) is for"
                " distribute_datasets_from_function."
            )
        return tp.distributed_dataset(
            self._container_strategy(), dataset, self._pipelines(options), options
        )

    def _distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: tf.distribute.InputOptions | None,
    ) -> Any:
        strategy = self._container_strategy()
        return tp.datasets_from_function(strategy, dataset_fn, self._pipelines(options), options)

    def _pipelines(
        self, options: tf.distribute.InputOptions | None
    ) -> list[tuple[str, tuple[str, ...]]]:
        """(device on which a pipeline runs, devices that its elements go to)."""
        if options is None:
            return [(self._host, self._devices)]
        if options.experimental_replication_mode == _ONE_PIPELINE_EACH:
            on_device = options.experimental_place_dataset_on_device
            return [(device if on_device else self._host, (device,)) for device in self._devices]
        if not options.experimental_fetch_to_device:
            return [(self._host, (self._host,) * len(self._devices))]
        return [(self._host, self._devices)]

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        count = len(self._devices)
        contexts = [tf.distribute.experimental.ValueContext(n, count) for n in range(count)]
        return tp.per_replica([value_fn(each) for each in contexts], always=True)


def _what(value: Any, destinations: Any) -> Reduced:
    """What is reduced where nobody has told."""
    if tp.is_synchronized_on_read(value):
        return Reduced(kind="metric", variable=value, path=value.name.removesuffix(":0"))
    if isinstance(destinations, tf.Variable):
        name = destinations.name.removesuffix(":0")
        return Reduced(kind="assignment", variable=destinations, path=name)
    return OTHER
