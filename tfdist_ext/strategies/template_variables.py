"""Variables of a StrategyTemplate: a copy for each replica, or one for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.placement import VariableSpec
from tfdist_ext.placement.live.initial_values import InitialValue
from tfdist_ext.strategies import _tf_private as tp
from tfdist_ext.strategies.devices import pick_devices

__all__ = ["Creation", "made_on_each"]


class Creation:
    """A variable that is about to be created.

    Args:
        devices: full names, one for each replica.
        next_creator: makes a plain variable from `kwargs`, where it is called.

    Attributes:
        spec: what is known of it: Keras's path, else its name; shape, dtype and bytes. None where
            the shape is not known before it is created.
    """

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[str],
        next_creator: Callable[..., Any],
        kwargs: dict[str, Any],
    ):
        self._strategy = strategy
        self._devices = tuple(devices)
        self._next_creator = next_creator
        self._kwargs = dict(kwargs)
        self.spec = _spec(self._kwargs, devices[0])

    def create(self, devices: Sequence[str], **instead: Any) -> Any:
        """The variable on these devices: those of all replicas, or one for all replicas.

        Args:
            instead: other arguments for the variable, such as `initial_value` and `shape`.
        """
        kwargs = {**self._kwargs, **instead}
        names = self._checked(devices)
        if len(names) == len(self._devices):
            return made_on_each(self._strategy, names, self._next_creator, kwargs)
        aggregation = kwargs.pop("aggregation", None) or tf.VariableAggregation.NONE
        with tp.across(names[0]), tp.outside_of_tapes():
            plain = self._next_creator(**kwargs)
        return tp.shared_variable(self._strategy, plain, aggregation)

    def _checked(self, devices: Sequence[str]) -> tuple[str, ...]:
        of = f"{type(self._strategy).__name__}.create_variable"
        of += "" if self.spec is None else f", for {self.spec.path!r}"
        picked = pick_devices(of, devices if isinstance(devices, str) else list(devices))
        if picked == list(self._strategy.devices):
            return self._devices
        if len(picked) != 1:
            raise StrategyError(
                f"{of}: create() takes one device for all replicas, or the devices of all replicas"
                f" in their order, {list(self._strategy.devices)}; {picked} arrived."
            )
        return (tp.full_name(picked[0]),)


def made_on_each(
    strategy: Any, devices: Sequence[str], next_creator: Callable[..., Any], kwargs: dict[str, Any]
) -> Any:
    """One variable with a copy on each device, which begin equal."""

    def make_copies(**kwargs: Any) -> list[Any]:
        copies: list[Any] = []
        for number, device in enumerate(devices):
            with tp.across(device), tp.outside_of_tapes():
                if copies:
                    first = copies[0]
                    kwargs["initial_value"] = lambda first=first: _initial_value_of(first)
                    # The slash at the end: this is the whole name, whatever scope is open.
                    kwargs["name"] = f"{first.name.split(':')[0]}/replica_{number}/"
                copies.append(next_creator(**kwargs))
        return copies

    return tp.copied_variable(strategy, make_copies, **kwargs)


def _initial_value_of(copy: Any) -> tf.Tensor:
    in_session = not tf.executing_eagerly() and not tf.inside_function()
    return tf.identity(copy.initial_value if in_session else copy.value())


def _spec(kwargs: dict[str, Any], device: str) -> VariableSpec | None:
    """What `kwargs` say of a variable; its initial value is made here if nothing else tells."""
    value = kwargs["initial_value"]
    if hasattr(value, "checkpoint_position"):  # read from a checkpoint that was restored before
        value = value() if callable(value) else value
        kwargs["initial_value"] = value = value.wrapped_value
    if value is None:  # its value comes from a SavedModel
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
