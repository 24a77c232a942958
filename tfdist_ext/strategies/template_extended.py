"""The `extended` of a StrategyTemplate: TensorFlow calls it, and it calls the template's hooks.

What no hook decides, MirroredStrategy's own methods do: threads of replicas, datasets, collections
of values. The methods with an underscore are those that TensorFlow leaves to each strategy.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies import _tf_private as tp
from tfdist_ext.strategies.reductions import OTHER, Reduced
from tfdist_ext.strategies.template_checks import (
    check_created,
    check_dataset,
    check_read,
    check_reduced,
    check_updated,
)
from tfdist_ext.strategies.template_variables import Creation

__all__ = ["TemplateExtended"]


class TemplateExtended(tf.distribute.StrategyExtended):
    """One replica for each device of a StrategyTemplate; its hooks decide, and are checked here.

    `mirrored_class` puts it over the methods of MirroredStrategy.
    """

    # Batches may be of unequal size, and the last one may leave replicas without rows.
    experimental_enable_get_next_as_optional = True

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]):
        """
        Args:
            devices: full names, one for each replica.
        """
        # Not MirroredStrategy's: it reads TF_CONFIG, and makes collectives that nothing uses.
        tf.distribute.StrategyExtended.__init__(self, strategy)
        self._devices = tuple(devices)
        self._input_workers_devices = ((tp.full_name("/device:CPU:0"), self._devices),)
        self._communication_options = tf.distribute.experimental.CommunicationOptions()
        self._reducing: Sequence[Reduced] = ()  # what is reduced now, if somebody has told
        self._hook_takes_what = "what" in inspect.signature(strategy.reduce_values).parameters
        self._asking = ""  # path of the variable that the hook is asked for

    def _use_merge_call(self) -> bool:
        return True  # the hooks are asked outside of replicas

    def _get_cross_device_ops(self, value: Any) -> tf.distribute.CrossDeviceOps:
        return tf.distribute.ReductionToOneDevice()

    # Variables

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        strategy = self._container_strategy()
        beside = kwargs.pop("colocate_with", None)
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # The replicas' own values, aggregated when they are read: metrics.
            return self.made_on_each(next_creator, **kwargs)
        creation = Creation(strategy, next_creator, kwargs)
        if creation.spec is None:
            return creation.create(self._devices)
        if self._asking:
            raise StrategyError(
                f"{type(strategy).__name__}.create_variable must return what create(devices) makes,"
                f" got {self._asking!r} created by itself, which would call the hook again without"
                " end."
            )
        self._asking = creation.spec.path
        try:
            made = strategy.create_variable(creation.spec, creation.create, beside)
        finally:
            self._asking = ""
        check_created(strategy, made, creation.spec, creation.made, beside)
        return made

    def made_on_each(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """One variable with a copy on each device, which begin equal."""
        return tp.with_own_reading(super()._create_variable(next_creator, **kwargs))

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        tp.validate_colocated(colocate_with_variable, self)

    def value_container(self, value: Any) -> Any:
        return tp.container_of(value)

    def read_var(self, v: tf.Variable) -> tf.Tensor:
        """The value of a variable outside of replicas, also for a checkpoint."""
        if tp.is_synchronized_on_read(v):
            return super().read_var(v)
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
        inherited = super()._reduce_to

        def reduced(value: Any) -> Any:
            mirrored = tp.is_mirrored(value)
            if mirrored and reduce_op != tf.distribute.ReduceOp.MEAN:
                raise StrategyError(
                    f"a sum over replicas must be of values that differ, got {value!r}, which is"
                    " the same on all of them. Read it, or use the MEAN."
                )
            if mirrored or not isinstance(value, tf.distribute.DistributedValues):
                return inherited(reduce_op, value, destinations, options)
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
            if not isinstance(value, tf.distribute.DistributedValues):
                # The same tensor comes from every replica. It may be on no device, and the device
                # does not matter: it goes to where the replicas are.
                copies = [tp.copied_to(device, value) for device in self._devices]
                value = destinations = tp.per_replica(copies, always=True)
                what = what or OTHER
            if what is None:
                results.append(self._reduce_to(reduce_op, value, destinations, options))
            else:
                results.append(self._reduced(reduce_op, value.values, destinations, what))
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
        return super()._experimental_distribute_dataset(dataset, options)


def _what(value: Any, destinations: Any) -> Reduced:
    """The description of a reduction that was not given."""
    if tp.is_synchronized_on_read(value):
        return Reduced(kind="metric", variable=value, path=value.name.removesuffix(":0"))
    if isinstance(destinations, tf.Variable):
        name = destinations.name.removesuffix(":0")
        return Reduced(kind="assignment", variable=destinations, path=name)
    return OTHER
