"""The end of every process of a run, also when the launcher itself is killed.

Two means, because each has a gap. A process group reaches what a task has started, but not what
left the group (a daemon). A mark in the environment, which children inherit, reaches that too,
but only where /proc shows it, and not in a process that cleared its environment.

Run as a program, this file waits beside the launcher: it reads the task groups from its standard
input, and when that closes without the word `done`, the launcher is dead, and they are ended.
PR_SET_PDEATHSIG would not do: it does not reach grandchildren, and it follows the thread, not the
process, that started the task. Only the standard library is imported, to start in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping

__all__ = ["Guard", "signal_all", "signal_group"]

MARK = "TFDIST_RUN"


class Guard:
    """A process that outlives this one, and ends the groups of processes that it was told of.

    Args:
        env: the environment it gets, and that of the processes without their mark.

    Attributes:
        env: that of the processes: with the mark of those that left their group.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._run_id = uuid.uuid4().hex
        # Inside of another run (a launcher that launches) a process has the marks of both.
        marks = f"{env.get(MARK, '')} {self._run_id}".strip()
        self.env = {**env, MARK: marks}
        # Not marked itself, and away from the launcher's group, so that what ends the tasks or
        # the launcher does not end it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=dict(env),
        )

    def add(self, group: int) -> None:
        """End this group, too."""
        self._tell(f"{group}\n")

    def marked(self) -> list[int]:
        """The living processes that have the mark, wherever they went."""
        return marked(self._run_id)

    def dismiss(self) -> None:
        """Stop watching: all processes have ended."""
        self._tell("done\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # killed from outside: the run continues
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def marked(run_id: str) -> list[int]:
    """The living processes of a run, wherever they went; none where there is no /proc."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    return [pid for pid in pids if _has_mark(pid, run_id.encode())]


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to processes some of which may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a group of processes, as far as they are still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _has_mark(pid: int, run_id: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:  # gone, a zombie, or another user's
        return False
    prefix = MARK.encode() + b"="
    return any(
        entry.startswith(prefix) and run_id in entry.removeprefix(prefix).split()
        for entry in environ.split(b"\0")
    )


def _end(groups: list[int], run_id: str, *, at_least: float = 0.5, at_most: float = 10.0) -> None:
    # More than once: a task that was being started has its mark only a moment later.
    start = time.monotonic()
    while time.monotonic() - start < at_most:
        for group in groups:
            signal_group(group, signal.SIGKILL)
        left = marked(run_id)
        signal_all(left, signal.SIGKILL)
        if not left and time.monotonic() - start >= at_least:
            return
        time.sleep(0.05)


def main() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # which a scheduler sends to every process
        signal.signal(number, signal.SIG_IGN)
    run_id = sys.argv[1]
    groups: list[int] = []
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        groups.append(int(word))
    _end(groups, run_id)


if __name__ == "__main__":
    main()
