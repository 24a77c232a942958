"""Tests on what jobs really run on: `scripts/environments` installs it and runs them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import slurm_cluster
from real_jobs import Result, Starter, result_in, training
from slurm_cluster import Slurm
from task_programs import LEFT_OUT

os.environ["PYTHONPATH"] = LEFT_OUT  # most of these jobs start TensorFlow in each task


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for process in starter.processes:
        if process.popen.poll() is None:
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Result]:
    """What the training ends with on one device."""
    known: dict[tuple[int, int], Result] = {}

    def run(epochs: int, steps: int) -> Result:
        if (epochs, steps) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            command: Sequence[str] = training(folder, epochs, steps, 0.0)
            env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
            subprocess.run(command, env=env, check=True, timeout=120, capture_output=True)
            known[epochs, steps] = result_in(folder)
        return known[epochs, steps]

    return run
