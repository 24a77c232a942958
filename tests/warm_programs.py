"""Commands in processes that have TensorFlow imported, with their output and exit status.

For scripts, pages and examples as users run them, and for tasks whose exit a test is about. Others
use `tfdist_ext.testing.run_tasks` or the pytest plugin. The processes are those of `run_tasks`:
each import of TensorFlow would take four seconds of a core.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from task_programs import CLUSTERS

from tfdist_ext.launcher.plan import LaunchPlan, local_plan
from tfdist_ext.testing import warm


class Program:
    """A program that runs; used as a `subprocess.Popen` of its command.

    Args:
        command: [sys.executable, file or "-c", ...].
        output, errors: files for what it writes.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Path,
        errors: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ):
        env = os.environ if env is None else env
        with open(output, "ab") as out:
            words = (list(command[1:]), str(cwd or Path.cwd()), errors and str(errors.absolute()))
            assert command[0] == sys.executable
            self._process = warm.start_function(run_words, words, env, out.fileno())

    def poll(self) -> int | None:
        return warm.status_of(self._process)

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(str(self._process.pid), timeout or 0.0)
        return warm.wait_for(self._process)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_words(words: list[str], folder: str, errors: str | None = None) -> None:
    """Do what Python does with these words on its command line, in this folder.

    Args:
        errors: a file for the errors; None: they go to the output.
    """
    if errors is not None:
        with open(errors, "ab") as file:
            os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.argv = [words[0], *words[2:]] if words[0] == "-c" else words[words[0] == "-m" :]
    if words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def run_program(
    command: Sequence[str], folder: Path, *, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(command, capture_output=True, text=True)`; its files go to `folder`."""
    output, errors = folder / "stdout", folder / "stderr"
    program = Program(command, output=output, errors=errors, **options)
    try:
        status = program.wait(timeout)
    finally:
        program.kill()
    texts = [file.read_text(errors="replace") for file in (output, errors)]
    done = subprocess.CompletedProcess(list(command), status, *texts)
    if check:
        done.check_returncode()
    return done


def run_together(
    plan: LaunchPlan,
    folder: Path,
    env: Mapping[str, str],
    *,
    timeout: float,
    linger: float = 0.0,
    cwd: Path | None = None,
) -> tuple[dict[str, int | None], dict[str, str]]:
    """Run all tasks of a plan until they have ended, or the coordinator has, or one has failed.

    That ends the others; `linger` is how many seconds they have to end by themselves after the
    coordinator.

    Returns:
        The statuses of tasks, by name, and what they wrote to files in `folder`.
    """
    files = {task.name: folder / f"{task.name.replace(':', '-')}.log" for task in plan.tasks}
    programs = {
        task.name: Program(task.argv, output=files[task.name], env={**env, **task.env}, cwd=cwd)
        for task in plan.tasks
    }
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            statuses = {name: program.poll() for name, program in programs.items()}
            running = {name for name, status in statuses.items() if status is None}
            if not running or any(statuses.values()):
                break
            if plan.coordinator in set(statuses) - running:
                deadline, linger = min(deadline, time.monotonic() + linger), float("inf")
            time.sleep(0.02)
    finally:
        for program in programs.values():
            program.kill()
    return statuses, {name: file.read_text(errors="replace") for name, file in files.items()}


def run_cluster(
    command: Sequence[str], folder: Path, *, timeout: float, cwd: Path | None = None, **tasks: Any
) -> dict[str, str]:
    """Run a command in all tasks of a cluster, which end with 0; returns their logs, by name.

    Args:
        tasks: numbers of tasks, as of `local_plan`.
    """
    env = {name: v for name, v in os.environ.items() if not name.startswith(CLUSTERS)}
    env["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with local_plan(command, **tasks, env=env) as plan:
        statuses, logs = run_together(plan, folder, env, timeout=timeout, linger=30, cwd=cwd)
    assert set(statuses.values()) == {0}, "\n".join(
        f"--- {name}: {statuses.get(name)}\n{log[-3000:]}" for name, log in logs.items()
    )
    return logs
