"""The watchdog beside a launcher: what it ends when the launcher is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping

from tfdist_ext.launch import watchdog

__all__ = ["Guard"]


class Guard:
    """A process that outlives this one, and ends the groups of processes that it was told of.

    Args:
        run_id: marks processes that left their group; see `watchdog`.
        env: the environment it gets.
    """

    def __init__(self, run_id: str, env: Mapping[str, str]) -> None:
        # Not marked itself, and away from the launcher's group, so that what ends the tasks or
        # the launcher does not end it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=dict(env),
        )

    def add(self, group: int) -> None:
        """End this group, too."""
        self._tell(f"{group}\n")

    def dismiss(self) -> None:
        """All have ended."""
        self._tell("done\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # killed by somebody: the run goes on
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
