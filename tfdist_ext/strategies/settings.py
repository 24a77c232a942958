"""A strategy's settings from arguments, flags, a TOML file and the environment, in that order."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist_ext.errors import StrategyError

__all__ = ["Settings", "read_file"]


class Settings:
    """Settings from several places; the first place that sets an option wins.

    Attributes:
        values: option -> the value that won.
        places: option -> where this value came from.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self._overridden: dict[str, list[str]] = {}

    def add(self, place: str, given: Mapping[str, Any]) -> None:
        """Add the settings of a place with lower precedence. A value of None sets nothing."""
        for option, value in given.items():
            if value is None:
                continue
            if option in self.values:
                self._overridden[option].append(f"{place} ({_shown(value)})")
            else:
                self.values[option], self.places[option] = value, place
                self._overridden[option] = []

    def lines(self, without: str = "") -> Iterator[str]:
        """One line for each option, with its value and where the value came from.

        Args:
            without: leave out the options whose value came from this place.
        """
        for option, value in self.values.items():
            if self.places[option] != without:
                over = " and ".join(self._overridden[option])
                line = f"{option} = {_shown(value)} from {self.places[option]}"
                yield f"{line}, over {over}" if over else line


def _shown(value: Any) -> str:
    """The repr of a value; the type's name for an object without a readable repr."""
    text = repr(value)
    return type(value).__name__ if text.startswith("<") else text


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The [strategy] table of a TOML file.

    Raises:
        StrategyError: the file cannot be read, is not TOML, or has no [strategy] table.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:  # TOMLDecodeError is a ValueError
        raise StrategyError(
            f"the settings file {path!r} cannot be read as TOML: {error}"
        ) from error
    table = document.get("strategy")
    if not isinstance(table, dict):
        raise StrategyError(
            f"{path} must have a [strategy] table, got {', '.join(document) or 'nothing'}."
        )
    return table
