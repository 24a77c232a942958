"""A strategy's settings from arguments, flags, a TOML file and the environment, in that order."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_ext.errors import StrategyError

__all__ = ["Settings", "merge", "read_file"]


@dataclass(frozen=True)
class Settings:
    """The settings that won.

    Attributes:
        values: option -> value.
        where: option -> where it came from.
        origins: a line for each: its value, where it came from, and what it won over.
    """

    values: dict[str, Any]
    where: dict[str, str]
    origins: dict[str, str]


def merge(layers: list[tuple[str, Mapping[str, Any]]]) -> Settings:
    """Lay settings over one another, the first layer on top.

    Args:
        layers: (where it comes from, settings), strongest first; a None value sets nothing.
    """
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    origins: dict[str, str] = {}
    for key in [key for _, layer in layers for key, value in layer.items() if value is not None]:
        (origin, value), *beaten = [
            (name, layer[key]) for name, layer in layers if layer.get(key) is not None
        ]
        lost = " and ".join(f"{name} ({_shown(other)})" for name, other in beaten)
        over = f", over {lost}" if lost else ""
        values[key] = value
        where[key] = origin
        origins[key] = f"{key} = {_shown(value)} from {origin}{over}"
    return Settings(values, where, origins)


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
    except tomllib.TOMLDecodeError as error:
        raise StrategyError(f"{path} must be valid TOML, got an error: {error}") from error
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"the settings file {os.fspath(path)!r} cannot be read: {error}"
        ) from error
    if "strategy" not in document:
        near = difflib.get_close_matches("strategy", document, n=1)
        hint = f" Did you mean [strategy] by [{near[0]}]?" if near else ""
        raise StrategyError(
            f"{path} must have a [strategy] table, got {', '.join(document) or 'nothing'}.{hint}"
        )
    table = document["strategy"]
    if not isinstance(table, dict):
        raise StrategyError(f"[strategy] of {path} must be a table of settings, got {table!r}.")
    if not isinstance(table.get("name", ""), str):
        raise StrategyError(f"strategy.name of {path} must be a text, got {table['name']!r}.")
    for key in ("cluster", "config"):
        if key in table:
            raise StrategyError(
                f"strategy.{key} must be left out of {path}, got {table[key]!r}: a cluster is"
                " described by TF_CONFIG or another environment, or passed as cluster=."
            )
    return table
