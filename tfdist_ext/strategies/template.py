"""StrategyTemplate: the base class for custom strategies.

The template runs one replica on each device, keeps a copy of each variable on each device, and
computes sums and means on one device. A subclass overrides hooks, and calls `super()` for the cases
that it does not change. docs/custom_strategy.md explains the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.placement import VariableSpec
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies._tf_private import Value, full_name, mirrored_class, per_replica
from tfdist_ext.strategies.one_machine import pick_devices
from tfdist_ext.strategies.reductions import OTHER, Reduced
from tfdist_ext.strategies.template_extended import TemplateExtended
from tfdist_ext.user_frames import filter_traceback


@filter_traceback
class StrategyTemplate(tf.distribute.Strategy):
    """Base class for custom synchronous strategies on one machine.

    Subclasses override the hooks `create_variable`, `update_variable`, `reduce_values` and `owner`.
    Without a subclass, each device has a replica and a copy of each variable.

    Args:
        devices: names ("GPU:0") or a number of devices. A number counts GPUs if the machine has
            GPUs, and logical CPUs otherwise. None uses all devices.

    Raises:
        StrategyError: a device does not exist or is named twice. When a step is traced: a hook
            returned an invalid value.
    """

    def __init__(self, devices: int | str | Sequence[str] | None = None):
        self._names = tuple(pick_devices(type(self).__name__, devices))
        extended = mirrored_class(TemplateExtended)
        super().__init__(extended(self, [full_name(name) for name in self._names]))

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each replica."""
        return self._names

    def copies(self, variable: tf.Variable) -> tuple[tf.Variable, ...]:
        """Returns the copies of a variable as plain TensorFlow variables.

        A variable has one copy for each replica, or one copy that all replicas use. For a sharded
        variable, returns the shards in the order of their rows.
        """
        if is_partitioned(variable):
            return tuple(variable.get().variables)
        copies = self.experimental_local_results(variable)
        return tuple(copy.get() if hasattr(copy, "get") else copy for copy in copies)

    def owner(self, variable: tf.Variable) -> int:
        """Hook: returns the index of the copy that an optimizer updates. The default is 0.

        `tfd.distribute` calls this hook if replicas share variables, or if the subclass overrides
        `update_variable`. The gradient is reduced to the device of the owner. The optimizer updates
        the copy and its slots on that device, and the other copies get the result. If a slot has
        copies on all devices, the optimizer uses the copy with the index `owner(slot)`.
        """
        return 0

    @property
    def has_own_updates(self) -> bool:
        """Whether the subclass overrides `update_variable`.

        If True, `tfd.distribute` computes an update once, on the device of the owner, and calls the
        hook to assign the result to the other copies. If False, each replica updates its own copy.
        """
        return type(self).update_variable is not StrategyTemplate.update_variable

    def create_variable(
        self,
        spec: VariableSpec,
        create: Callable[..., tf.Variable],
        beside: tf.Variable | None = None,
    ) -> tf.Variable:
        """Hook: creates a variable on one or more devices.

        The strategy does not call this hook for variables with `synchronization=ON_READ`, such as
        the state of metrics. Each replica has its own value of these variables.

        Args:
            spec: the path, shape, dtype and bytes of the variable, and whether it is trainable. The
                path of a variable that is not from Keras is its name.
            create: a function that creates the variable. `create(self.devices)` creates a copy on
                each device. `create([device])` creates one copy that all replicas use.
                `create(devices, in_pieces=True)` splits the variable along axis 0 into even shards,
                one on each of these devices. Axis 0 needs at least one row for each shard.
            beside: for an optimizer slot, the variable of the slot; None for other variables. If
                `beside` is sharded and has as many rows, create the same shards.

        Returns:
            The result of `create`. By default, a variable has a copy on all devices, and a slot is
            on the devices of its variable.
        """
        if beside is None:
            return create(self.devices)
        devices = [copy.device for copy in self.copies(beside)]
        if not is_partitioned(beside):
            return create(devices)
        if spec.shape[:1] == tuple(beside.shape[:1]):
            return create(devices, in_pieces=True)
        return create(devices[:1])

    def update_variable(
        self, variable: tf.Variable, copies: Sequence[tf.Variable], update: Callable[[int], Any]
    ) -> Sequence[Any]:
        """Hook: applies an update to all copies of a variable.

        The strategy calls this hook for each assignment, and for each step of a Keras optimizer.
        The values of the update are already reduced. All copies must be equal when the hook
        returns.

        Args:
            variable: the variable of the strategy.
            copies: the copies of the variable: one for each replica, or one. A sharded variable
                counts as one copy.
            update: `update(index)` applies the update to the copy with this index, on its device.

        Returns:
            A list with the result of `update` for each copy. By default, every copy is updated.
        """
        return [update(number) for number in range(len(copies))]

    def reduce_values(
        self,
        op: tf.distribute.ReduceOp,
        values: Sequence[Value],
        devices: Sequence[str],
        what: Reduced = OTHER,
    ) -> Sequence[Value]:
        """Hook: computes the sum or the mean of the values of all replicas.

        `all_reduce`, `reduce`, `extended.reduce_to` and assignments with an aggregation call this
        hook.

        Args:
            op: `tf.distribute.ReduceOp.SUM` or `.MEAN`.
            values: a tensor or `tf.IndexedSlices` for each replica, on the device of the replica.
            devices: the full names of the devices that need the result.
            what: a `Reduced`, which describes the values.

        Returns:
            A list with the result for each device. A result on another device is moved to its
            device. By default, the values are reduced on the first device.
        """
        first = tf.distribute.ReductionToOneDevice(devices[0])
        total = first.reduce(op, per_replica(values, always=True), devices[0])
        return [total] * len(devices)
