"""hosts.toml: the machines of a run, and how to start tfdist on each."""

from __future__ import annotations

import os
import secrets
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist_ext.errors import LaunchError
from tfdist_ext.messages import nearest, shown

__all__ = ["Host", "read_hosts", "remote_line"]

_PORTS = range(20_000, 30_000)  # below those that Linux hands out by itself
_OF_FILE = ("hosts", "port", "directory", "tfdist", "env")
_OF_HOST = ("ssh", "address", "directory", "tfdist", "env")


@dataclass(frozen=True)
class Host:
    """A machine of hosts.toml.

    Attributes:
        ssh: what ssh connects to: a name of its config, or user@host.
        address: by which the other machines reach it.
        directory: where the command runs; "": where ssh starts.
        tfdist: the program there.
        env: what is added to its environment there.
    """

    ssh: str
    address: str
    directory: str = ""
    tfdist: str = "tfdist"
    env: Mapping[str, str] = field(default_factory=dict)


def read_hosts(path: str | os.PathLike[str]) -> tuple[list[Host], int]:
    """The machines of a file, node 0 first, and the port of the rendezvous.

    Raises:
        LaunchError: no such file, or one that cannot be right; names the key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"--hosts must be a TOML file of machines, got {path}: {error}"
        ) from error
    where = str(path)
    _check_keys(where, content, _OF_FILE)
    listed = content.get("hosts")
    if not isinstance(listed, list) or not listed:
        raise LaunchError(
            f'{where}: hosts must list the machines, got {shown(listed)}; write hosts = ["node0",'
            ' "node1"], or a [[hosts]] table for each'
        )
    port = content.get("port")
    if port is None:  # two runs on one machine seldom draw the same
        port = secrets.choice(_PORTS)
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port < 65536:
        raise LaunchError(f"{where}: port must be from 1 to 65535, got {shown(port)}")
    usual = {key: value for key, value in content.items() if key not in ("hosts", "port")}
    hosts = [_host(f"{where}: hosts[{n}]", each, usual) for n, each in enumerate(listed)]
    addresses = [host.address for host in hosts]
    for number, address in enumerate(addresses):
        if address in addresses[:number]:
            raise LaunchError(
                f"{where}: hosts[{number}] must have an address of its own, got {address!r} twice"
            )
    return hosts, port


def _host(where: str, listed: Any, usual: Mapping[str, Any]) -> Host:
    table = {"ssh": listed} if isinstance(listed, str) else listed
    if not isinstance(table, dict):
        raise LaunchError(f"{where} must be a name or a table, got {shown(listed)}")
    _check_keys(where, table, _OF_HOST)
    values = {**usual, **table, "env": {**usual.get("env", {}), **table.get("env", {})}}
    for key, value in values.items():
        texts = value.values() if key == "env" and isinstance(value, dict) else [value]
        if not all(isinstance(text, str) and "\0" not in text for text in texts):
            raise LaunchError(f"{where}: {key} must be text, got {shown(value)}")
    ssh = values.get("ssh", "")
    if not ssh or ssh.startswith("-"):
        raise LaunchError(f"{where}: ssh must name what to connect to, got {shown(ssh)}")
    return Host(**{"address": ssh.rpartition("@")[2], **values})


def _check_keys(where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise LaunchError(f"{where}: unknown key {key!r}. {nearest(key, known)}")


def remote_line(host: Host, words: Sequence[str]) -> str:
    """What a host's shell runs: tfdist with these words, in its folder and environment."""
    # A folder below the home of the user there stays unquoted as far as the tilde.
    home, slash, rest = host.directory.partition("/")
    folder = home + slash + shlex.quote(rest) if home == "~" and rest else host.directory
    if not home.startswith("~"):
        folder = shlex.quote(host.directory)
    go = f"cd {folder} && " if host.directory else ""
    settings = [f"{name}={value}" for name, value in host.env.items()]
    program = ["env", *settings, host.tfdist] if settings else [host.tfdist]
    return f"{go}exec {shlex.join([*program, *words])}"
