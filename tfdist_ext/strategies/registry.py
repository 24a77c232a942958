"""The table of strategies: name -> what makes it, and what it is for."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies import makers

__all__ = ["Entry", "available_strategies", "lookup", "register_strategy"]


@dataclass(frozen=True)
class Entry:
    """One strategy of the table; its options are the parameters of its factory."""

    name: str
    factory: Callable[..., tf.distribute.Strategy]
    description: str

    def check(self, given: dict[str, Any]) -> None:
        """Raise StrategyError for an option that the factory does not take."""
        parameters = inspect.signature(self.factory).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        for option, value in given.items():
            if option not in parameters:
                near = difflib.get_close_matches(option, parameters, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                takes = ", ".join(parameters) or "no options"
                raise StrategyError(
                    f"the strategy {self.name!r} does not take {option}={value!r}.{hint}"
                    f" It takes: {takes}."
                )

    def takes(self, option: str) -> bool:
        return option in inspect.signature(self.factory).parameters


_TABLE: dict[str, Entry] = {}


def register_strategy(
    name: str, factory: Callable[..., tf.distribute.Strategy], description: str
) -> None:
    """Make `create_strategy(name, ...)` call `factory`.

    Args:
        name: a new name; not "auto".
        factory: returns a `tf.distribute.Strategy`. It is called with keyword arguments: its
            parameters are the strategy's options, and one named `cluster` gets the cluster
            that was given or found.
        description: one line, shown where strategies are listed.

    Raises:
        StrategyError: the name is taken, or is no name.
    """
    if name in _TABLE or name == "auto":
        raise StrategyError(
            f"a strategy named {name!r} is there already ({', '.join(_TABLE)}): choose another name"
        )
    if not name.isidentifier():
        raise StrategyError(f"a strategy's name is a word like 'my_strategy'; {name!r} arrived")
    if not callable(factory):
        raise StrategyError(f"the factory of strategy {name!r} cannot be called: {factory!r}")
    _TABLE[name] = Entry(name, factory, description)


def available_strategies() -> dict[str, str]:
    """Name -> description of every strategy that `create_strategy` knows."""
    return {name: entry.description for name, entry in _TABLE.items()}


def lookup(name: str) -> Entry:
    """The entry of a name; StrategyError lists the known ones."""
    if name not in _TABLE:
        near = difflib.get_close_matches(str(name), _TABLE, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise StrategyError(
            f"there is no strategy {name!r}.{hint} Known: auto, {', '.join(_TABLE)}."
        )
    return _TABLE[name]


for _name, _factory, _description in (
    ("default", makers.default, "no distribution: TensorFlow's default, one device"),
    ("one_device", makers.one_device, "everything on one named device"),
    ("mirrored", makers.mirrored, "a copy of the model on each device of this machine"),
    ("multi_worker_mirrored", makers.multi_worker_mirrored, "a copy on each worker of a cluster"),
    ("central_storage", makers.central_storage, "variables on one device, computing on all"),
    ("parameter_server", makers.parameter_server, "variables on parameter servers, asynchronous"),
    ("tpu", makers.tpu, "a copy on each core of a TPU"),
):
    register_strategy(_name, _factory, _description)
