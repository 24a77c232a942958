"""Tasks of a cluster as processes, none under a launcher: how each ends by itself, and when."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from warm_programs import Program

from tfdist_ext.launcher.plan import local_plan

PROGRAMS = Path(__file__).parent / "programs"


class Tasks:
    """The processes of a cluster; one that was not started is `late`."""

    def __init__(self, commands: dict[str, tuple[Sequence[str], dict[str, str]]], folder: Path):
        self._commands = commands
        self.folder = folder
        self._processes: dict[str, Program] = {}
        self._watchers: list[threading.Thread] = []
        self._ended: dict[str, float] = {}

    def start(self, *names: str) -> None:
        for name in names:
            argv, env = self._commands[name]
            process = Program(argv, output=self.folder / f"{name}.log", env=env)
            self._processes[name] = process
            watcher = threading.Thread(target=self._watch, args=(name, process), daemon=True)
            watcher.start()
            self._watchers.append(watcher)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_for(self, name: str, pattern: str, seconds: float = 120.0) -> re.Match[str]:
        """The first match in what a task writes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log(name)):
                return found
            if name in self._ended:
                break
            time.sleep(0.05)
        raise AssertionError(f"{name} did not write {pattern!r}:\n{self.log(name)[-3000:]}")

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def status(self, name: str, seconds: float = 60.0) -> int:
        return self._processes[name].wait(seconds)

    def seconds_after(self, first: str, then: str) -> float:
        """From the end of one task to that of another; both have ended."""
        for watcher in self._watchers:
            watcher.join(5.0)
        return self._ended[then] - self._ended[first]

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()  # nothing else ends a TensorFlow that waits
            process.wait()

    def _watch(self, name: str, process: Program) -> None:
        process.wait()
        self._ended[name] = time.monotonic()


@contextlib.contextmanager
def tasks(
    program: str, *args: str, folder: Path, workers: int, ps: int, evaluator: bool = False
) -> Iterator[Tasks]:
    """The tasks of a cluster, none started yet; all are dead after the body."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(PROGRAMS / program), *args]
    with local_plan(command, workers=workers, ps=ps, evaluator=evaluator, env=env) as plan:
        cluster = Tasks({t.name: (t.argv, {**env, **t.env}) for t in plan.tasks}, folder)
        try:
            yield cluster
        finally:
            cluster.kill()
