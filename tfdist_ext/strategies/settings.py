"""A strategy's settings from arguments, flags, a TOML file and the environment, in that order."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist_ext.errors import StrategyError

__all__ = ["Settings", "read_file"]


@dataclass
class Settings:
    """The settings that won, of several places.

    Attributes:
        values: option -> value.
        where: option -> where it came from.
        lines: option -> a line with its value, where it came from, and what it won over.
    """

    values: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, given: Mapping[str, Any]) -> None:
        """Add settings below those that are there; a value of None sets nothing."""
        for key, value in given.items():
            if value is None:
                continue
            if key not in self.values:
                self.values[key], self.where[key] = value, place
                self.lines[key] = f"{key} = {_shown(value)} from {place}"
            else:
                joint = " and" if ", over " in self.lines[key] else ", over"
                self.lines[key] += f"{joint} {place} ({_shown(value)})"


def _shown(value: Any) -> str:
    """The repr of a value; the type's name for an object without a readable repr."""
    text = repr(value)
    return type(value).__name__ if text.startswith("<") else text


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The [strategy] table of a TOML file.

    Raises:
        StrategyError: the file cannot be read, is no TOML, has no [strategy] table, or its
            strategy has a name that is no text or a key that is not for files.
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
        near = difflib.get_close_matches("strategy", document.keys() - {"strategy"}, n=1)
        hint = f" Did you mean [strategy] by [{near[0]}]?" if near else ""
        raise StrategyError(
            f"{path} must have a [strategy] table, got {', '.join(document) or 'nothing'}.{hint}"
        )
    if not isinstance(table.get("name", ""), str):
        raise StrategyError(f"strategy.name of {path} must be a text, got {table['name']!r}.")
    for key in {"cluster", "config"} & table.keys():
        raise StrategyError(
            f"strategy.{key} must be left out of {path}, got {table[key]!r}: a cluster is"
            " described by TF_CONFIG or another environment, or passed as cluster=."
        )
    return table
