"""Fixtures of tests/launcher and tests/cli: marked processes, and a check that none is left."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import pids_with

from tfdist_ext.launcher.plan import LaunchPlan, TaskPlan
from tfdist_ext.launcher.run import Limits, RunResult, run_plan

ROOT = Path(__file__).resolve().parents[1]
MARK = "TFDIST_TEST_MARK"


@dataclass
class Mark:
    """A unique word in the environment of all that a test starts, the watchdog included."""

    word: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
            MARK: self.word,
        }

    def pids(self) -> list[int]:
        return pids_with(MARK, self.word)

    def wait_for(self, count: int, seconds: float = 5.0) -> list[int]:
        """The processes, once there are `count` of them."""
        end = time.monotonic() + seconds
        while len(pids := self.pids()) != count and time.monotonic() < end:
            time.sleep(0.02)
        return pids


@pytest.fixture
def mark() -> Iterator[Mark]:
    """A mark; the test fails when a process that carries it outlives the test."""
    mark = Mark()
    yield mark
    # A watchdog looks around for half a second after its launcher was killed.
    left = mark.wait_for(0, seconds=3)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == [], "processes outlived the test"


@dataclass
class Ran:
    result: RunResult
    out: str
    err: str
    seconds: float

    def lines(self, task: str) -> list[str]:
        """What was shown of a task, without its prefix."""
        width = len(f"[{task}]")
        return [
            line[width:].lstrip(" ")
            for line in self.out.split("\n")
            if line.startswith(f"[{task}]")
        ]


@pytest.fixture
def run_tasks(mark: Mark) -> Callable[..., Ran]:
    """Run shell scripts as tasks: `run_tasks({"worker:0": "exit 3"}, grace=1)`."""

    def run(
        scripts: dict[str, str],
        *,
        coordinator: str | None = None,
        log_dir: Path | None = None,
        **limits: float,
    ) -> Ran:
        plan = LaunchPlan(
            tasks=tuple(
                TaskPlan(
                    name=name,
                    argv=("sh", "-c", script),
                    log_file=log_dir and log_dir / f"{name.replace(':', '-')}.log",
                )
                for name, script in scripts.items()
            ),
            coordinator=coordinator,
        )
        out, err = io.StringIO(), io.StringIO()
        start = time.monotonic()
        result = run_plan(plan, Limits(**limits), env=mark.env, stream=out, report=err)
        seconds = time.monotonic() - start
        assert mark.pids() == [], "run_plan came back before everything had ended"
        return Ran(result, out.getvalue(), err.getvalue(), seconds)

    return run


@pytest.fixture
def tfdist(
    mark: Mark, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `tfdist` with these words, in a session of its own, with pipes for its output."""
    started: list[subprocess.Popen[str]] = []
    logs = str(tmp_path_factory.mktemp("logs"))

    def start(*words: str, **env: str) -> subprocess.Popen[str]:
        popen = subprocess.Popen(
            [sys.executable, "-m", "tfdist_ext.cli", *words],
            cwd=ROOT,
            env={**mark.env, "TMPDIR": logs, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(popen)
        return popen

    yield start
    for popen in started:
        with popen:
            popen.kill()
