"""The table of strategies: a name, what makes the strategy, and what it is for."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies import cluster_constructors, constructors, tpu
from tfdist_ext.strategies.devices import make_logical_cpus
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Entry", "available_strategies", "lookup", "register_strategy"]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Entry:
    """One strategy of the table; its options are the parameters of its factory.

    Attributes:
        is_registered: by a user; not one of this package's own.
    """

    name: str
    factory: Callable[..., tf.distribute.Strategy]
    description: str
    is_registered: bool = False

    @property
    def options(self) -> set[str]:
        """The names of the options that the factory takes."""
        return {each.name for each in self._parameters() if each.kind not in _VARIADIC}

    @property
    def takes_found_cluster(self) -> bool:
        """Whether the factory gets the cluster that the environment describes.

        A TPU is named by variables of its own; a TF_CONFIG does not describe one.
        """
        return "cluster" in self.options and self.name != "tpu"

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise StrategyError for an option the factory does not take, or one that it lacks."""
        names = [each.name for each in self._parameters()]
        known = [*names, *["logical_cpus"] * self.is_registered]
        unknown = next((key for key in given if key not in known), None)
        if unknown is not None and not self._takes_any():
            near = difflib.get_close_matches(unknown, [*known, "name"], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            if self.is_registered and not hint:
                hint = f" Give its factory a parameter {unknown!r}."
            raise StrategyError(
                f"the options of the strategy {self.name!r} must be"
                f" {', '.join(names) or 'left out'}, got {unknown}={given[unknown]!r}.{hint}"
            )
        for each in self._parameters():
            required = each.default is each.empty and each.kind not in _VARIADIC
            if required and each.name not in given:
                raise StrategyError(
                    f"the strategy {self.name!r} must get the option {each.name!r}, got none:"
                    f" write create_strategy({self.name!r}, {each.name}=...)."
                )

    def make(self, given: Mapping[str, Any]) -> tf.distribute.Strategy:
        """Call the factory, and check that it returns a strategy."""
        if self.is_registered:
            make_logical_cpus(given.get("logical_cpus"))
        if "logical_cpus" not in self.options and not self._takes_any():
            given = {key: value for key, value in given.items() if key != "logical_cpus"}
        strategy = self.factory(**given)
        if not isinstance(strategy, tf.distribute.Strategy):
            raise StrategyError(
                f"the factory of the strategy {self.name!r} must return a tf.distribute.Strategy,"
                f" got {strategy!r}."
            )
        return strategy

    def _takes_any(self) -> bool:
        return any(each.kind is each.VAR_KEYWORD for each in self._parameters())

    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.factory).parameters.values())


_TABLE: dict[str, Entry] = {}


@filter_traceback
def register_strategy(
    name: str, factory: Callable[..., tf.distribute.Strategy], description: str
) -> None:
    """Make `create_strategy(name, ...)` call `factory`.

    Args:
        name: a new name; not "auto".
        factory: returns a `tf.distribute.Strategy`. It is called with keyword arguments: its
            parameters are the strategy's options, none of them `name` or `config`, and one
            named `cluster` gets the cluster that was given or found. `logical_cpus` is an
            option also without a parameter: the logical CPUs are made before the call.
        description: one line, shown where strategies are listed.

    Raises:
        StrategyError: the name is taken, or is no name; the factory cannot be called.
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
    _TABLE[name] = Entry(name, factory, description, is_registered=True)


@filter_traceback
def available_strategies() -> dict[str, str]:
    """Name -> description of every strategy that `create_strategy` knows."""
    return {name: entry.description for name, entry in _TABLE.items()}


def lookup(name: str) -> Entry:
    """The entry of a name; StrategyError lists the known ones."""
    if not isinstance(name, str) or name not in _TABLE:
        near = difflib.get_close_matches(str(name).lower(), ["auto", *_TABLE], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise StrategyError(
            f"a strategy must be one of auto, {', '.join(_TABLE)}, got {name!r}.{hint}"
        )
    return _TABLE[name]


for _entry in (
    Entry("default", constructors.default, "no distribution: TensorFlow's default, one device"),
    Entry("one_device", constructors.one_device, "everything on one named device"),
    Entry("mirrored", constructors.mirrored, "a copy of the model on each device of this machine"),
    Entry(
        "multi_worker_mirrored",
        cluster_constructors.multi_worker_mirrored,
        "a copy on each worker of a cluster",
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
    ),
    Entry("tpu", tpu.tpu, "a copy on each core of a TPU"),
):
    _TABLE[_entry.name] = _entry
