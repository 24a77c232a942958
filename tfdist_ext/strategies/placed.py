"""Strategies with a placement for each variable: on devices, or on parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.cluster.liveness.watching import Servers
from tfdist_ext.errors import PlacementError, StrategyError
from tfdist_ext.placement import (
    OnDevice,
    Owned,
    Placement,
    PlacementPlan,
    Rule,
    Sharded,
    VariableSpec,
)
from tfdist_ext.placement.live.creating import override_device_scope, placing
from tfdist_ext.placement.placer import DevicePlacer, ServerPlacer
from tfdist_ext.strategies._tf_private import count_and_update_on_servers
from tfdist_ext.strategies.template import StrategyTemplate
from tfdist_ext.user_frames import filter_traceback

_OWNER = "number_of_owner"  # attribute that stores the owner's index


@filter_traceback
class PlacedStrategy(StrategyTemplate):
    """A synchronous strategy on one machine that places each variable by rules.

    - `Mirrored()`: each device has a copy of the variable and its slots.
    - `OnDevice("CPU:0")`: one device has the variable and its slots. `tfd.distribute` moves only
      the rows that an Embedding looks up.
    - `Owned()`: each device has a copy of the variable. Only one device, the owner, has the
      optimizer slots. The gradient is reduced to the owner, which computes the update and sends
      the new value to the other devices. This partitions the optimizer state as in ZeRO stage 1
      (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), by whole variables.
    - `Sharded(n)`: n devices have even shards of the rows, with their slots. `Sharded()` uses all
      devices. Each shard is updated on its device. `tfd.distribute` moves only the rows that an
      Embedding looks up.

    A trainable variable without a rule is owned if it has at least `owned_from` bytes, and mirrored
    otherwise. The owners hold nearly equal numbers of bytes, unless one variable is larger than a
    fair share.

    Args:
        devices: names or a number of devices, as in `StrategyTemplate`.
        rules: a list of `Rule(pattern, placement)`, or a dict such as
            {"embedding/.*": "device CPU:0"}. A pattern matches the path of a Keras variable.
        owned_from: the smallest size of an owned variable, without slots: a number of bytes, or a
            string such as "64KiB".

    Attributes:
        placer: chooses the placement of each variable.

    Raises:
        StrategyError: a device does not exist or is named twice, or a rule is not possible on these
            devices.
    """

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        rules: Iterable[Rule] | Mapping[str, str | Placement] = (),
        *,
        owned_from: int | str = "16KiB",
    ):
        super().__init__(devices)
        try:
            self.placer = DevicePlacer(self.devices, rules, owned_from=owned_from)
        except PlacementError as error:
            raise StrategyError(f"{type(self).__name__}: {error}") from error

    @property
    def placement_plan(self) -> PlacementPlan | None:
        """The placement plan of the last model that `tfd.distribute` created."""
        return self.placer.plan

    def owner(self, variable: tf.Variable) -> int:
        """Returns the index of the device that owns a variable, or 0 without an owner."""
        return getattr(variable, _OWNER, 0)

    def create_variable(
        self,
        spec: VariableSpec,
        create: Callable[..., tf.Variable],
        beside: tf.Variable | None = None,
    ) -> tf.Variable:
        if beside is not None:
            if self._is_owned(beside):
                return create([self.devices[self.owner(beside)]])
            return super().create_variable(spec, create, beside)
        placement = self.placer.placement_of(spec)
        if isinstance(placement, OnDevice):
            return create([placement.name])
        if isinstance(placement, Sharded):
            return create(self.placer.devices_of_pieces(spec, placement), in_pieces=True)
        made = super().create_variable(spec, create)
        if isinstance(placement, Owned) and len(self.devices) > 1:
            setattr(made, _OWNER, self.placer.choose_owner(spec))
        return made

    def update_variable(
        self, variable: tf.Variable, copies: Sequence[tf.Variable], update: Callable[[int], Any]
    ) -> Sequence[Any]:
        if not self._is_owned(variable):
            return super().update_variable(variable, copies, update)
        number = self.owner(variable)
        done = update(number)
        for copy in copies:
            if copy is not copies[number]:
                with tf.device(copy.device):
                    copy.assign(copies[number])
        return [done] * len(copies)

    def _is_owned(self, variable: tf.Variable) -> bool:
        return hasattr(variable, _OWNER)


def placed(
    *,
    devices: int | str | Sequence[str] | None = None,
    placement: Iterable[Rule] | Mapping[str, str | Placement] = (),
    owned_from: int | str = "16KiB",
) -> PlacedStrategy:
    """Places each variable on the devices that its rule names."""
    return PlacedStrategy(devices, placement, owned_from=owned_from)


class PlacedParameterServers(tf.distribute.ParameterServerStrategy):
    """ParameterServerStrategy with a ServerPlacer that decides where its variables are created.

    A `tf.device("/job:ps/task:1")` scope in the user's code takes precedence over the placer.

    Attributes:
        placer: decides for each variable.
        servers: the servers of the cluster, watched by this process.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        placer: ServerPlacer,
        servers: Servers,
    ):
        super().__init__(cluster_resolver)
        count_and_update_on_servers(self)
        self.placer = placer
        self.servers = servers

    @contextlib.contextmanager
    def scope(self) -> Iterator[tf.distribute.Strategy]:
        """As TensorFlow's, with the placement of variables."""
        with override_device_scope(), super().scope() as strategy, placing(self.placer):
            yield strategy

    @property
    def placement_plan(self) -> PlacementPlan | None:
        """Where the variables of the last planned model are."""
        return self.placer.plan
