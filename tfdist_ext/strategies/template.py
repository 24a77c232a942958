"""StrategyTemplate: the base class for custom strategies.

It works without a subclass: one replica for each device, a copy of each variable on each device,
sums and means computed on one device. A subclass overrides the hooks whose decision it changes and
calls `super()` for the rest. `docs/custom_strategy.md` builds one.
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

__all__ = ["StrategyTemplate"]


@filter_traceback
class StrategyTemplate(tf.distribute.Strategy):
    """A synchronous strategy on the devices of one machine, with hooks.

    Args:
        devices: names ("GPU:0"), or a number of devices (GPUs where there are any, else logical
            CPUs), or None for all of them.

    Raises:
        StrategyError: a device does not exist or is named twice. At the first trace: a hook, named
            in the message, has returned a wrong value.
    """

    def __init__(self, devices: int | str | Sequence[str] | None = None):
        self._names = tuple(pick_devices(type(self).__name__, devices))
        extended = mirrored_class(TemplateExtended)
        super().__init__(extended(self, [full_name(name) for name in self._names]))

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the replicas' devices, in the order of replicas."""
        return self._names

    def copies(self, variable: tf.Variable) -> tuple[tf.Variable, ...]:
        """The plain variables behind a variable of this strategy: one for each replica, or one.

        For a variable in pieces, the pieces in the order of their rows.
        """
        if is_partitioned(variable):
            return tuple(variable.get().variables)
        copies = self.experimental_local_results(variable)
        return tuple(copy.get() if hasattr(copy, "get") else copy for copy in copies)

    def owner(self, variable: tf.Variable) -> int:
        """Hook: the index of the copy whose device computes an update once; 0 by default.

        `tfd.distribute` calls this if replicas share variables or the subclass overrides
        `update_variable`. The gradient is reduced to that copy's device, the optimizer works there
        on the variable's slots, and the other copies get the result. If a slot has copies on all
        devices, the optimizer uses the copy of number `owner(slot)`.
        """
        return 0

    @property
    def has_own_updates(self) -> bool:
        """Whether the subclass overrides `update_variable`.

        `tfd.distribute` then computes an update once, on the owner's copies, and assigns the result
        to the other copies through the hook. Otherwise each replica updates its own copies.
        """
        return type(self).update_variable is not StrategyTemplate.update_variable

    def create_variable(
        self,
        spec: VariableSpec,
        create: Callable[..., tf.Variable],
        beside: tf.Variable | None = None,
    ) -> tf.Variable:
        """Hook: where a variable is created.

        Called for every variable except those with `synchronization=ON_READ`, as those of metrics,
        of which each replica has its own value.

        Args:
            spec: the variable's path (its name, if it is not a Keras variable), shape, dtype, bytes
                and whether it is trained.
            create: `create(devices)` with the devices of all replicas makes a copy on each device;
                with one device it makes one copy that all replicas use.
                `create(devices, in_pieces=True)` cuts the variable along axis 0 into even pieces,
                one on each of these devices, which all replicas use. There can be no more pieces
                than rows.
            beside: the variable that the new variable belongs to, as an optimizer's slot does; or
                None. If `beside` is in pieces and has as many rows, create the same pieces.

        Returns:
            What `create` returned. By default copies on all devices, or where `beside` is.
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
        """Hook: how an update is applied.

        Called for each assignment and each step of a Keras optimizer, with values that are already
        reduced. All copies must be equal afterwards.

        Args:
            copies: the plain variables, one for each replica, or one. A variable in pieces counts
                as one, because it is updated as a whole.
            update: `update(number)` applies the update to the copy of that number, on its device.

        Returns:
            A list of what `update` returned for each copy. By default every copy is updated.
        """
        return [update(number) for number in range(len(copies))]

    def reduce_values(
        self,
        op: tf.distribute.ReduceOp,
        values: Sequence[Value],
        devices: Sequence[str],
        what: Reduced = OTHER,
    ) -> Sequence[Value]:
        """Hook: how values are reduced.

        Called by `all_reduce`, `reduce`, `extended.reduce_to` and aggregated assignments.

        Args:
            op: `tf.distribute.ReduceOp.SUM` or `.MEAN`.
            values: a tensor, or tf.IndexedSlices, of each replica, on the replica's device.
            devices: the full names of the devices that need the result.
            what: a `Reduced`: whether the values are gradients of a variable, a metric, a statistic
                or the user's own values.

        Returns:
            A list with the result for each device. Results on other devices are moved. By default
            the values are reduced on the first device.
        """
        first = tf.distribute.ReductionToOneDevice(devices[0])
        total = first.reduce(op, per_replica(values, always=True), devices[0])
        return [total] * len(devices)
