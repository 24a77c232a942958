"""How a StrategyTemplate creates variables: one copy per replica, one shared, or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.placement import VariableSpec
from tfdist_ext.placement.live._tf_private import partitioned_variable_class
from tfdist_ext.placement.live.creating import Where, made_in_pieces
from tfdist_ext.placement.live.initial_values import InitialValue
from tfdist_ext.placement.specs import piece_rows
from tfdist_ext.strategies import _tf_private as tp
from tfdist_ext.strategies.devices import pick_devices

__all__ = ["Creation"]


class Creation:
    """A variable that is about to be created.

    Args:
        next_creator: makes a plain variable from `kwargs` on the current device.

    Attributes:
        spec: the path (Keras's, else the name), shape, dtype and bytes. None if the shape is not
            known before the variable is created.
        made: the variables that `create` has returned.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        next_creator: Callable[..., tf.Variable],
        kwargs: dict[str, Any],
    ):
        self._strategy = strategy
        self._next_creator = next_creator
        self._kwargs = dict(kwargs)
        self.spec = _spec(self._kwargs, strategy.extended.worker_devices[0])
        self.made: list[tf.Variable] = []

    def create(self, devices: Sequence[str], *, in_pieces: bool = False) -> tf.Variable:
        """Create the variable on the devices of all replicas, or on one device for all replicas.

        Args:
            in_pieces: cut it along axis 0 into even pieces, one on each of these devices, which all
                replicas share.
        """
        self.made.append(self._created(devices, in_pieces))
        return self.made[-1]

    def _created(self, devices: Sequence[str], in_pieces: bool) -> tf.Variable:
        of = f"{type(self._strategy).__name__}.create_variable"
        of += "" if self.spec is None else f", for {self.spec.path!r}"
        picked = pick_devices(of, devices)
        if in_pieces and len(picked) > 1:
            return self._made_in_pieces([tp.full_name(name) for name in picked], of)
        if picked == list(self._strategy.devices):
            return self._strategy.extended.made_on_each(self._next_creator, **self._kwargs)
        if len(picked) == 1:
            return self._shared(tp.full_name(picked[0]), **self._kwargs)
        raise StrategyError(
            f"{of}: create() must get one device for all replicas, or the devices of all replicas"
            f" in their order, {list(self._strategy.devices)}, got {picked}. With in_pieces=True it"
            " takes the device of each piece."
        )

    def _shared(
        self, device: str, *, aggregation: tf.VariableAggregation | None = None, **kwargs: Any
    ) -> tf.Variable:
        """One plain variable on a device, for all replicas.

        Without an aggregation it takes the value that the first replica writes.
        """
        with tp.across(device), tp.outside_of_tapes():
            plain = self._next_creator(**kwargs)
        if aggregation in (None, tf.VariableAggregation.NONE):
            aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return tp.shared_variable(self._strategy, plain, aggregation)

    def _made_in_pieces(self, devices: list[str], of: str) -> tf.Variable:
        rows = self.spec.shape[0] if self.spec and self.spec.shape else 0
        if self.spec is None or self._kwargs["initial_value"] is None or rows < len(devices):
            shape = "unknown" if self.spec is None else list(self.spec.shape)
            raise StrategyError(
                f"{of}: create() cannot cut a variable into more pieces than it has rows, and"
                f" cannot cut one that is loaded from a SavedModel. Got {len(devices)} devices for"
                f" a variable of shape {shape}. Give it fewer devices."
            )
        initial = InitialValue(self._kwargs, where=devices[0])
        where: Where = []
        start = 0
        for device, count in zip(devices, piece_rows(rows, len(devices)), strict=True):
            where.append((device, start, start + count, {"device": device}))
            start += count
        pieces = made_in_pieces(self._shared, self._kwargs, initial, where)
        name = self._kwargs.get("name") or "Variable"
        return partitioned_variable_class()(pieces, name, self.spec.path)


def _spec(kwargs: dict[str, Any], device: str) -> VariableSpec | None:
    """The description of a variable; makes its initial value if `kwargs` have no shape."""
    value = kwargs["initial_value"]
    if hasattr(value, "checkpoint_position"):  # from a checkpoint that was restored before
        value = value() if callable(value) else value
        kwargs["initial_value"] = value = value.wrapped_value
    if value is None:  # the value comes from a SavedModel
        shape = tf.TensorShape(kwargs["shape"])
        if not shape.is_fully_defined():
            return None
        dtype = tf.as_dtype(kwargs["dtype"]).name
        return VariableSpec(kwargs.get("name") or "Variable", tuple(shape), dtype)
    if tf.is_tensor(value) and not value.shape.is_fully_defined():
        return None
    initial = InitialValue(kwargs, where=device)
    kwargs["initial_value"] = initial.given
    return initial.spec
