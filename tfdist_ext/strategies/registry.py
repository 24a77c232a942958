"""The table of strategies: name -> what makes it, and what it is for."""

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

_OF_THE_CALL = ("name", "config")  # create_strategy keeps these for itself


@dataclass(frozen=True)
class Entry:
    """One strategy of the table; its options are the parameters of its factory.

    Attributes:
        signals: the options that the environment may set, where the factory takes them.
        is_registered: by a user; not one of this package's own.
    """

    name: str
    factory: Callable[..., tf.distribute.Strategy]
    description: str
    signals: tuple[str, ...] = ("cluster",)
    is_registered: bool = False

    def check(self, given: Mapping[str, Any], where: Mapping[str, str]) -> None:
        """Raise StrategyError for an option the factory does not take, or one that it lacks.

        Args:
            given: the options.
            where: option -> where it came from, for the message.
        """
        parameters = self._parameters()
        unknown = next((key for key in given if not self._can_get(key)), None)
        if unknown is not None:
            known = [*parameters, "name", *["logical_cpus"] * self.is_registered]
            near = difflib.get_close_matches(unknown, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            if self.is_registered and not hint:
                hint = f" Give its factory a parameter {unknown!r}."
            raise StrategyError(
                f"the options of the strategy {self.name!r} must be"
                f" {', '.join(parameters) or 'left out'}, got {unknown}={given[unknown]!r}, which"
                f" comes from {where.get(unknown, 'the call')}.{hint}"
            )
        for option, parameter in parameters.items():
            variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and not variadic and option not in given:
                raise StrategyError(
                    f"the strategy {self.name!r} must get the option {option!r}, got none: write"
                    f" create_strategy({self.name!r}, {option}=...)."
                )

    def takes(self, option: str) -> bool:
        return option in self._parameters()

    def make(self, given: Mapping[str, Any]) -> tf.distribute.Strategy:
        """Call the factory, and check that it returns a strategy."""
        if self.is_registered:
            make_logical_cpus(given.get("logical_cpus"))
            given = {key: value for key, value in given.items() if self._passes(key)}
        strategy = self.factory(**given)
        if not isinstance(strategy, tf.distribute.Strategy):
            raise StrategyError(
                f"the factory of the strategy {self.name!r} must return a tf.distribute.Strategy,"
                f" got {strategy!r}."
            )
        return strategy

    def _can_get(self, option: str) -> bool:
        """Whether the option may be given; the factory need not know of logical CPUs."""
        return self._passes(option) or (self.is_registered and option == "logical_cpus")

    def _passes(self, option: str) -> bool:
        parameters = self._parameters()
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return takes_any or option in parameters

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.factory).parameters


_TABLE: dict[str, Entry] = {}


@filter_traceback
def register_strategy(
    name: str, factory: Callable[..., tf.distribute.Strategy], description: str
) -> None:
    """Make `create_strategy(name, ...)` call `factory`.

    Args:
        name: a new name; not "auto".
        factory: returns a `tf.distribute.Strategy`. It is called with keyword arguments: its
            parameters are the strategy's options, and one named `cluster` gets the cluster
            that was given or found. `logical_cpus` is an option also without a parameter: the
            logical CPUs are made before the call.
        description: one line, shown where strategies are listed.

    Raises:
        StrategyError: the name is taken, or is no name; the factory cannot be called with
            keywords, or has a parameter `name` or `config`; the description is empty.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise StrategyError(f"a strategy's name must be a word like 'my_strategy', got {name!r}.")
    if name in _TABLE or name == "auto":
        raise StrategyError(
            f"a strategy's name must be new, got {name!r}, which is there already (auto,"
            f" {', '.join(_TABLE)}); choose another name."
        )
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        raise StrategyError(
            f"the factory of the strategy {name!r} must be a function, got {factory!r}."
        ) from None
    for parameter in parameters.values():
        if parameter.name in _OF_THE_CALL or parameter.kind is parameter.POSITIONAL_ONLY:
            raise StrategyError(
                f"the factory of the strategy {name!r} must have parameters that create_strategy"
                f" can pass on, got {parameter.name!r}: give it another name, and no '/' after it."
            )
    if not isinstance(description, str) or not description.strip():
        raise StrategyError(
            f"the description of the strategy {name!r} must be one line, got {description!r}."
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


for _name, _factory, _description in (
    ("default", constructors.default, "no distribution: TensorFlow's default, one device"),
    ("one_device", constructors.one_device, "everything on one named device"),
    ("mirrored", constructors.mirrored, "a copy of the model on each device of this machine"),
    (
        "multi_worker_mirrored",
        cluster_constructors.multi_worker_mirrored,
        "a copy on each worker of a cluster",
    ),
    ("central_storage", constructors.central_storage, "variables on one device, computing on all"),
    ("placed", constructors.placed, "each variable on the devices that its rule says"),
    (
        "parameter_server",
        cluster_constructors.parameter_server,
        "variables on parameter servers, asynchronous",
    ),
):
    _TABLE[_name] = Entry(_name, _factory, _description)
# A TPU is named by variables of its own; a TF_CONFIG does not describe one.
_TABLE["tpu"] = Entry(
    "tpu", tpu.tpu, "a copy on each core of a TPU", signals=("tpu", "zone", "project")
)
