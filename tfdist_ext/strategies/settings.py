"""A strategy's settings from arguments, flags and a TOML file, in that order."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist_ext.errors import StrategyError

__all__ = ["Settings", "read_file"]


@dataclass
class Settings:
    """Settings from several places; the first place that sets an option wins.

    Attributes:
        values: option -> the value that won.
        places: option -> where this value came from.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, given: Mapping[str, Any]) -> None:
        """Add the settings of a place with lower precedence. A value of None sets nothing."""
        for option, value in given.items():
            if value is not None and option not in self.values:
                self.values[option], self.places[option] = value, place

    def lines(self, without: str = "") -> Iterator[str]:
        """One line for each option, with its value and where the value came from.

        Args:
            without: leave out the options whose value came from this place.
        """
        for option, value in self.values.items():
            if self.places[option] != without:
                text = repr(value)
                shown = type(value).__name__ if text.startswith("<") else text
                yield f"{option} = {shown} from {self.places[option]}"


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
