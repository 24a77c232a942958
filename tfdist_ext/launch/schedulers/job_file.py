"""job.toml: what a job runs and on how many machines, for whichever scheduler."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist_ext.errors import LaunchError
from tfdist_ext.messages import nearest, shown

__all__ = ["Job", "check_table", "read_job"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")
_TABLES = ("slurm", "kubernetes")


@dataclass(frozen=True)
class Job:
    """What a job runs.

    Attributes:
        name: lowercase letters, digits and dashes.
        command: of each task.
        nodes: machines.
        workers_per_node: workers of each machine.
        chief: whether there is a chief; None: exactly where there are parameter servers.
        ps: parameter servers.
        evaluator: whether there is one.
        max_restarts: how often it may start again after a failure.
        min_workers: how many workers are enough; None: all.
        grace: seconds from the signal that asks it to save to its end.
        gpus_per_node: of each machine.
        env: what is added to the environment of its tasks.
        scheduler: the keys of each scheduler's own table.
    """

    name: str
    command: tuple[str, ...]
    nodes: int = 1
    workers_per_node: int = 1
    chief: bool | None = None
    ps: int = 0
    evaluator: bool = False
    max_restarts: int = 3
    min_workers: int | None = None
    grace: int = 90
    gpus_per_node: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    scheduler: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def has_chief(self) -> bool:
        return self.ps > 0 if self.chief is None else self.chief


# Key -> its type, and the least value of a number.
_KEYS: dict[str, tuple[type, int]] = {
    "name": (str, 0),
    "nodes": (int, 1),
    "workers_per_node": (int, 1),
    "chief": (bool, 0),
    "ps": (int, 0),
    "evaluator": (bool, 0),
    "max_restarts": (int, 0),
    "min_workers": (int, 1),
    "grace": (int, 1),
    "gpus_per_node": (int, 0),
    "env": (dict, 0),
}


def read_job(path: str | os.PathLike[str]) -> Job:
    """The job of a file.

    Raises:
        LaunchError: no such file, or one that cannot be right; names the key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"a job must be described by a TOML file, got {path}: {error}") from error
    where = str(path)
    tables = {key: content.pop(key) for key in _TABLES if key in content}
    command = content.pop("command", None)
    values = check_table(where, content, _KEYS, also=(*_TABLES, "command"))
    name = values.pop("name", Path(path).stem.lower().replace("_", "-"))
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f"{where}: name must be of lowercase letters, digits and dashes, at most 52, got"
            f" {shown(name)}"
        )
    for key, value in values.get("env", {}).items():
        if not isinstance(value, str):
            raise LaunchError(f"{where}: env.{key} must be text, got {shown(value)}; quote it")
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise LaunchError(f"{where}: {key} must be a table, [{key}], got {shown(table)}")
    job = Job(name, _command(where, command), **values, scheduler=tables)
    if job.ps and not job.has_chief:
        raise LaunchError(f"{where}: ps must come with a chief, got chief = false; leave it out")
    workers = job.nodes * job.workers_per_node
    if job.min_workers is not None and job.min_workers > workers:
        raise LaunchError(
            f"{where}: min_workers must be from 1 to the number of workers, {workers}, got"
            f" {job.min_workers}"
        )
    return job


def _command(where: str, command: Any) -> tuple[str, ...]:
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise LaunchError(f"{where}: command must be a command line, got {error}") from error
    else:
        words = command
    texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
    if not words or not texts:
        raise LaunchError(
            f"{where}: command must be what each task runs, got {shown(command)}; write command ="
            ' "python train.py"'
        )
    return tuple(words)


def check_table(
    where: str,
    table: Mapping[str, Any],
    keys: Mapping[str, tuple[type, int]],
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """The values of a table whose keys and types are right.

    Args:
        keys: key -> its type, and the least value where it is a number.
        also: keys that are known, and not of this table.

    Raises:
        LaunchError: an unknown key, or a value of another type.
    """
    words = {str: "text", int: "a whole number", bool: "true or false", list: "a list"}
    for key, value in table.items():
        if key not in keys:
            raise LaunchError(f"{where}: unknown key {key!r}. {nearest(key, [*keys, *also])}")
        kind, least = keys[key]
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right:
            must = words.get(kind, "a table")
            raise LaunchError(f"{where}: {key} must be {must}, got {shown(value)}")
        if kind is int and value < least:
            raise LaunchError(f"{where}: {key} must be at least {least}, got {value}")
        lines = value if kind is list else [value] if kind is str else []
        if not all(isinstance(line, str) for line in lines):
            raise LaunchError(f"{where}: {key} must be a list of text, got {shown(value)}")
        if any("\n" in line or "\0" in line for line in lines):
            raise LaunchError(f"{where}: {key} must have no line breaks, got {shown(value)}")
    return dict(table)
