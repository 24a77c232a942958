"""The table of strategies: a name, the function that makes the strategy, and its description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import nearest, shown
from tfdist_ext.strategies import one_machine, several_machines
from tfdist_ext.strategies.placed import placed
from tfdist_ext.user_frames import filter_traceback


@dataclass(frozen=True)
class Entry:
    """One strategy of the table; its options are the parameters of its factory."""

    name: str
    factory: Callable[..., tf.distribute.Strategy]
    description: str

    @property
    def options(self) -> list[str]:
        """The names of the options that the strategy takes."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(self.factory).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind not in variadic]

    def make(self, options: Mapping[str, Any]) -> tf.distribute.Strategy:
        """Make the strategy with these options.

        Raises:
            StrategyError: an option is not known or is missing, or the factory does not return a
                strategy.
        """
        try:
            inspect.signature(self.factory).bind(**options)
        except TypeError as error:
            unknown = next((key for key in options if key not in self.options), None)
            if unknown is None:
                message = f"the strategy {self.name!r} cannot be created: {error}."
                raise StrategyError(message) from None
            others = [entry.name for entry in _TABLE.values() if unknown in entry.options]
            advice = [f"It is an option of {', '.join(others)}."] if others else []
            if unknown in _INSTEAD_OF:
                advice = [f"Use {_INSTEAD_OF[unknown]}."]
            elif self.options or not others:
                advice.append(nearest(unknown, [*self.options, "name"]))
            raise StrategyError(
                f"the strategy {self.name!r} has no option {unknown}={shown(options[unknown])}."
                f" {' '.join(advice)}"
            ) from None
        strategy = self.factory(**options)
        if not isinstance(strategy, tf.distribute.Strategy):
            raise StrategyError(
                f"the factory of the strategy {self.name!r} returned {strategy!r}, which is not a"
                " tf.distribute.Strategy."
            )
        return strategy


# Arguments of TensorFlow's constructors that have another name here.
_INSTEAD_OF = {
    "tpu_cluster_resolver": "cluster=",
    "variable_partitioner": 'placement="balanced", which cuts large variables, or rules such as'
    ' placement={"users/.*": "sharded(4)"}',
}

_TABLE = {
    factory.__name__: Entry(factory.__name__, factory, description)
    for factory, description in (
        (one_machine.default, "no distribution: TensorFlow's default on one device"),
        (one_machine.one_device, "everything on one named device"),
        (one_machine.mirrored, "a copy of the model on each device of this machine"),
        (several_machines.multi_worker_mirrored, "a copy of the model on each worker of a cluster"),
        (one_machine.central_storage, "variables on one device, computation on all devices"),
        (placed, "each variable on the devices that a rule names"),
        (several_machines.parameter_server, "variables on parameter servers, asynchronous"),
        (several_machines.tpu, "a copy of the model on each core of a TPU"),
    )
}


_BUILT_IN = ("auto", *_TABLE)


@filter_traceback
def register_strategy(
    name: str, factory: Callable[..., tf.distribute.Strategy], description: str
) -> None:
    """Registers a strategy, so that `create_strategy(name, ...)` calls `factory`.

    Args:
        name: a Python identifier. It replaces a strategy that was registered under this name.
        factory: a function that returns a `tf.distribute.Strategy`. Its parameters are the options
            of the strategy, and are passed as keywords. A parameter `cluster` receives the cluster
            of the call or of the environment. The names `name` and `config` are not allowed.
        description: one line for the list of strategies.

    Raises:
        StrategyError: the name is that of a built-in strategy or not an identifier, or the factory
            is not callable.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in _BUILT_IN:
        raise StrategyError(
            f"{name!r} cannot be the name of a new strategy. Use a new word like 'my_strategy'."
            f" These names are taken: {', '.join(_BUILT_IN)}."
        )
    if not callable(factory):
        raise StrategyError(f"the factory of the strategy {name!r} is not a function: {factory!r}.")
    _TABLE[name] = Entry(name, factory, description)


@filter_traceback
def available_strategies() -> dict[str, str]:
    """Returns the names of all strategies of `create_strategy`, with their descriptions."""
    return {name: entry.description for name, entry in _TABLE.items()}


def lookup(name: str) -> Entry:
    """Returns the entry of a name.

    Raises:
        StrategyError: no strategy has this name.
    """
    if not isinstance(name, str) or name not in _TABLE:
        raise StrategyError(f"there is no strategy {name!r}. {nearest(name, ['auto', *_TABLE])}")
    return _TABLE[name]
