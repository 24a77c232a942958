"""ParameterServerStrategy with variables where a placement says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.messages import shown
from tfdist_ext.placement import (
    Balanced,
    Placement,
    PlacementError,
    PlacementPlan,
    Sharded,
    VariableSpec,
)
from tfdist_ext.placement.live.creating import has_the_last_word, placing
from tfdist_ext.placement.placer import Placer
from tfdist_ext.strategies._tf_private import servers_extended
from tfdist_ext.strategies.serving import Servers

__all__ = ["PlacedParameterServers", "placer_for"]


class PlacedParameterServers(tf.distribute.ParameterServerStrategy):
    """ParameterServerStrategy, with a Placer that decides where its variables are created.

    A `tf.device("/job:ps/task:1")` scope in the user's code goes before everything.

    Attributes:
        placer: decides for each variable.
        servers: watched by this process.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        placer: Placer,
        servers: Servers,
    ):
        super().__init__(cluster_resolver)
        # Once more, with updates that know pieces; the first time has connected to the cluster.
        extended = servers_extended(type(self.extended))  # type: ignore[arg-type]  # it has a hash
        tf.distribute.Strategy.__init__(self, extended(self, cluster_resolver, None))
        self.placer = placer
        self.servers = servers

    @contextlib.contextmanager
    def scope(self) -> Iterator[tf.distribute.Strategy]:
        """As TensorFlow's, with the placement of variables."""
        with has_the_last_word(), super().scope() as strategy, placing(self.placer):
            yield strategy

    @property
    def placement_plan(self) -> PlacementPlan | None:
        """Where the variables of the last planned model are."""
        return self.placer.plan


def placer_for(placement: Any, partitioner: Callable[..., Any] | None, ps: int) -> Placer:
    """The Placer of a strategy's options.

    Raises:
        PlacementError: a placement that cannot be right for so many servers.
    """
    if partitioner is None:
        return Placer(placement, ps)
    if isinstance(placement, PlacementPlan | str) or callable(placement):
        raise PlacementError(
            "partitioner must come without a placement that cuts variables, too, got both"
            f" ({shown(placement)}). Leave one of them out."
        )

    def as_partitioned(spec: VariableSpec) -> Placement:
        if not spec.shape or not spec.rows:
            return Balanced()
        counts = partitioner(tf.TensorShape(spec.shape), tf.as_dtype(spec.dtype))
        pieces, *others = map(int, counts)
        if any(count != 1 for count in others):
            raise PlacementError(
                f"partitioner must cut {spec.path!r} of shape {spec.shape} along axis 0 only, got"
                f" {shown(counts)}."
            )
        return Sharded(min(pieces, spec.rows))

    return Placer(placement, ps, as_partitioned)
