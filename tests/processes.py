"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_of(pid: int) -> list[str]:
    """The words of its command; [] after the process has ended."""
    return _words(pid, "cmdline")


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which it was started; {} after the process has ended."""
    return dict(entry.split("=", 1) for entry in _words(pid, "environ") if "=" in entry)


def pids_with(name: str, value: str) -> list[int]:
    """Processes with this value of a variable."""
    return [pid for pid in pids() if environment_of(pid).get(name) == value]


def is_alive(pid: int) -> bool:
    """Whether it has not ended; a zombie has ended."""
    return _stat(pid)[:1] not in ([], ["Z"])


def check_dead(pids: Iterable[int], seconds: float = 10.0) -> None:
    """Fail unless these processes end within some seconds."""
    left, deadline = list(pids), time.monotonic() + seconds
    while left := [pid for pid in left if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    """The parent's pid; 0 after the process has ended."""
    return int((_stat(pid) or ["", "0"])[1])


def _words(pid: int, file: str) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0")


def _stat(pid: int) -> list[str]:
    """The fields of its state from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
