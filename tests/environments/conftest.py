"""Tests on what jobs really run on: `scripts/environments` installs it and runs them."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
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
    starter.end()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> Result:
    """What the training ends with on one device, computed once for all processes of pytest."""
    folder = tmp_path_factory.getbasetemp().parent / f"undisturbed-{testrun_uid}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "alone.npz").exists():
            env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
            command = training(folder, pause=0.0)
            subprocess.run(command, env=env, check=True, timeout=120, capture_output=True)
    return result_in(folder)
