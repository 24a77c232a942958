"""A strategy's settings from arguments, flags, a TOML file and the environment, in that order."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist_ext.errors import StrategyError

__all__ = ["Settings", "read_file"]


class Settings:
    """Settings from several places; the first place that sets an option wins."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Any, str]]] = {}

    def add(self, place: str, given: Mapping[str, Any]) -> None:
        """Add the settings of a place with lower precedence. A value of None sets nothing."""
        for option, value in given.items():
            if value is not None:
                self._found.setdefault(option, []).append((value, place))

    @property
    def values(self) -> dict[str, Any]:
        """Option -> the value that won."""
        return {option: found[0][0] for option, found in self._found.items()}

    def place_of(self, option: str) -> str | None:
        """Where the value of an option came from; None if the option is not set."""
        return self._found[option][0][1] if option in self._found else None

    def lines(self, without: Collection[str] = ()) -> Iterator[str]:
        """One line for each option, with its value and where the value came from.

        Args:
            without: leave out the options whose value came from one of these places.
        """
        for option, ((value, place), *others) in self._found.items():
            if place not in without:
                over = " and ".join(f"{other} ({_shown(lost)})" for lost, other in others)
                yield f"{option} = {_shown(value)} from {place}" + (f", over {over}" * bool(over))


def _shown(value: Any) -> str:
    """The repr of a value; the type's name for an object without a readable repr."""
    text = repr(value)
    return type(value).__name__ if text.startswith("<") else text


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The [strategy] table of a TOML file.

    Raises:
        StrategyError: the file cannot be read, is not TOML, has no [strategy] table, or the table
            has a key `cluster`.
    """
    if not isinstance(path, str | os.PathLike):
        raise StrategyError(f"config must be the path of a TOML file, got {path!r}.")
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError is a ValueError
        raise StrategyError(
            f"the settings file {os.fspath(path)!r} cannot be read as TOML: {error}"
        ) from error
    table = document.get("strategy")
    if not isinstance(table, dict):
        raise StrategyError(
            f"{path} must have a [strategy] table, got {', '.join(document) or 'nothing'}."
        )
    if "cluster" in table:
        raise StrategyError(
            f"strategy.cluster must be left out of {path}, got {table['cluster']!r}. Describe the"
            " cluster in TF_CONFIG or another environment, or pass cluster= to create_strategy."
        )
    return table
