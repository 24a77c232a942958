"""The table of strategies: a name, the function that makes the strategy, and its description."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies import cluster_constructors, constructors
from tfdist_ext.strategies.devices import make_logical_cpus
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Entry", "available_strategies", "lookup", "register_strategy"]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Entry:
    """One strategy of the table; its options are the parameters of its factory.

    Attributes:
        takes_logical_cpus: whether `logical_cpus` is an option too.
    """

    name: str
    factory: Callable[..., tf.distribute.Strategy]
    description: str
    takes_logical_cpus: bool = True

    @property
    def options(self) -> list[str]:
        """The names of the options that the strategy takes."""
        names = [each.name for each in self._parameters if each.kind not in _VARIADIC]
        cpus = self.takes_logical_cpus and "logical_cpus" not in names
        return [*names, "logical_cpus"] if cpus else names

    @property
    def takes_found_cluster(self) -> bool:
        """Whether the factory gets the cluster that the environment describes.

        A TPU has variables of its own in the environment, which describe no cluster.
        """
        return "cluster" in self.options and self.name != "tpu"

    def make(self, given: Mapping[str, Any]) -> tf.distribute.Strategy:
        """Make the strategy with these options.

        Raises:
            StrategyError: an option is not known or is missing, or the factory does not return a
                strategy.
        """
        takes_any = any(each.kind is each.VAR_KEYWORD for each in self._parameters)
        unknown = next((key for key in given if key not in self.options), None)
        if unknown is not None and not takes_any:
            near = difflib.get_close_matches(unknown, [*self.options, "name"], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise StrategyError(
                f"the options of the strategy {self.name!r} must be {', '.join(self.options)}, got"
                f" {unknown}={given[unknown]!r}.{hint}"
            )
        for each in self._parameters:
            required = each.default is each.empty and each.kind not in _VARIADIC
            if required and each.name not in given:
                raise StrategyError(
                    f"the strategy {self.name!r} must get the option {each.name!r}, got none:"
                    f" write create_strategy({self.name!r}, {each.name}=...)."
                )
        options = dict(given)
        make_logical_cpus(options.get("logical_cpus"))
        if "logical_cpus" not in {each.name for each in self._parameters}:
            options.pop("logical_cpus", None)
        strategy = self.factory(**options)
        if not isinstance(strategy, tf.distribute.Strategy):
            raise StrategyError(
                f"the factory of the strategy {self.name!r} must return a tf.distribute.Strategy,"
                f" got {strategy!r}."
            )
        return strategy

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.factory).parameters.values())


_TABLE = {
    entry.name: entry
    for entry in (
        Entry("default", constructors.default, "no distribution: TensorFlow's default, one device"),
        Entry("one_device", constructors.one_device, "everything on one named device"),
        Entry(
            "mirrored", constructors.mirrored, "a copy of the model on each device of this machine"
        ),
        Entry(
            "multi_worker_mirrored",
            cluster_constructors.multi_worker_mirrored,
            "a copy on each worker of a cluster",
            takes_logical_cpus=False,
        ),
        Entry(
            "central_storage",
            constructors.central_storage,
            "variables on one device, computing on all",
        ),
        Entry("placed", constructors.placed, "each variable on the devices that its rule says"),
        Entry(
            "parameter_server",
            cluster_constructors.parameter_server,
            "variables on parameter servers, asynchronous",
            takes_logical_cpus=False,
        ),
        Entry("tpu", constructors.tpu, "a copy on each core of a TPU", takes_logical_cpus=False),
    )
}


@filter_traceback
def register_strategy(
    name: str, factory: Callable[..., tf.distribute.Strategy], description: str
) -> None:
    """Make `create_strategy(name, ...)` call `factory`.

    Args:
        name: a new name; not "auto".
        factory: returns a `tf.distribute.Strategy`. It is called with keyword arguments: its
            parameters are the strategy's options. None of them may be called `name` or `config`.
            A parameter `cluster` gets the cluster that was given or found. `logical_cpus` is an
            option also without a parameter: the logical CPUs are made before the call.
        description: one line, shown in the list of strategies.

    Raises:
        StrategyError: the name is taken or is not an identifier, or the factory is not callable.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in ("auto", *_TABLE):
        raise StrategyError(
            f"a strategy's name must be a new word like 'my_strategy', got {name!r}. These are"
            f" there already: auto, {', '.join(_TABLE)}."
        )
    if not callable(factory):
        raise StrategyError(
            f"the factory of the strategy {name!r} must be a function, got {factory!r}."
        )
    _TABLE[name] = Entry(name, factory, description)


@filter_traceback
def available_strategies() -> dict[str, str]:
    """Name -> description of every strategy that `create_strategy` knows."""
    return {name: entry.description for name, entry in _TABLE.items()}


def lookup(name: str) -> Entry:
    """Returns the entry of a name.

    Raises:
        StrategyError: no strategy has this name.
    """
    if not isinstance(name, str) or name not in _TABLE:
        near = difflib.get_close_matches(str(name).lower(), ["auto", *_TABLE], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise StrategyError(
            f"a strategy must be one of auto, {', '.join(_TABLE)}, got {name!r}.{hint}"
        )
    return _TABLE[name]
