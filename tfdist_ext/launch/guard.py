"""The watchdog beside a launcher: what it ends when the launcher is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Mapping

from tfdist_ext.launch import watchdog

__all__ = ["Guard"]


class Guard:
    """A process that outlives this one, and ends the groups of processes that it was told of.

    Args:
        env: the environment it gets, and that of the processes without their mark.

    Attributes:
        env: that of the processes: with the mark of those that left their group; see `watchdog`.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._run_id = uuid.uuid4().hex
        # Inside of another run (a launcher that launches) a process has the marks of both.
        marks = f"{env.get(watchdog.MARK, '')} {self._run_id}".strip()
        self.env = {**env, watchdog.MARK: marks}
        # Not marked itself, and away from the launcher's group, so that what ends the tasks or
        # the launcher does not end it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, self._run_id],
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
        return watchdog.marked(self._run_id)

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
