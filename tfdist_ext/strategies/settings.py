"""A strategy's settings from arguments, flags, a TOML file and the environment, in that order."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_ext.errors import StrategyError

__all__ = ["Settings", "merge", "read_file"]


@dataclass(frozen=True)
class Settings:
    """The settings that won, and a line for each that says where it came from."""

    values: dict[str, Any]
    origins: tuple[str, ...]


def merge(layers: list[tuple[str, Mapping[str, Any]]]) -> Settings:
    """Lay settings over one another, the first layer on top.

    Args:
        layers: (where it comes from, settings), strongest first; a None value sets nothing.
    """
    values: dict[str, Any] = {}
    origins: list[str] = []
    for place, (origin, settings) in enumerate(layers):
        for key, value in settings.items():
            if value is None or key in values:
                continue
            values[key] = value
            beaten = [
                f"{other} ({lower[key]!r})"
                for other, lower in layers[place + 1 :]
                if lower.get(key) is not None
            ]
            over = f", over {', '.join(beaten)}" if beaten else ""
            origins.append(f"{key} = {value!r} from {origin}{over}")
    return Settings(values, tuple(origins))


def read_file(path: str | Path) -> dict[str, Any]:
    """The [strategy] table of a TOML file.

    Raises:
        StrategyError: the file cannot be read, is no TOML, or its strategy is no table.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(f"the settings file {str(path)!r} cannot be read: {error}") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StrategyError(f"{path} is no valid TOML: {error}") from error
    table = document.get("strategy", {})
    if not isinstance(table, dict):
        raise StrategyError(f"{path}: [strategy] is a table of settings; {table!r} arrived.")
    if not isinstance(table.get("name", ""), str):
        raise StrategyError(f"{path}: strategy.name is a text; {table['name']!r} arrived.")
    return table
