"""Real jobs that are killed while they write a checkpoint, or paused and woken."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from real_tasks import PROGRAMS, Tasks
from training_cases import assert_same_weights, mirrored, steps_taken, strategy_of

import tfdist_ext as tfd

sys.path.insert(0, str(PROGRAMS))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tasks]:
    folder = tmp_path_factory.mktemp("jobs")
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    program = [sys.executable, str(PROGRAMS / "checkpoint_killed.py")]
    commands = {
        name: ([*program, str(folder / f"of {name}"), name], env) for name in ("killed", "paused")
    }
    jobs = Tasks(commands, folder)
    try:
        jobs.start(*commands)
        jobs.wait_for("killed", "INSIDE")
        jobs.signal("killed", signal.SIGKILL)
        assert jobs.status("killed") == -signal.SIGKILL
        jobs.wait_for("paused", "PAUSED")
        yield jobs
    finally:
        jobs.kill()


def train(folder: Path) -> tuple[tfd.DistributedModel, list[int]]:
    import mlp

    keras.utils.set_random_seed(3)
    model = tfd.distribute(mlp.build, mirrored())
    options = {"batch_size": mlp.BATCH, "epochs": 4, "verbose": 0, "checkpoint_dir": folder}
    return model, model.fit(*mlp.data(), **options).epoch


def test_a_job_that_was_killed_while_it_saved_goes_on(jobs: Tasks, tmp_path: Path) -> None:
    folder = jobs.folder / "of killed"
    names = ["epoch-00001", "epoch-00002"]
    assert [path.stem for path in tfd.finished_checkpoints(folder)] == names
    assert len(list(folder.glob(".epoch-00003.*.unfinished"))) == 1
    assert not tfd.training_is_done(folder)
    whole, _ = train(tmp_path / "whole")
    resumed, epochs = train(folder)
    assert epochs == [0, 1, 2, 3]
    assert_same_weights(whole, resumed)
    assert steps_taken(resumed) == 4 * 8
    assert not list(folder.glob(".*"))
    assert tfd.training_is_done(folder)


def test_a_paused_job_that_wakes_leaves_the_training_of_its_successor(jobs: Tasks) -> None:
    import mlp

    folder = jobs.folder / "of paused"
    model, epochs = train(folder)
    assert epochs == [0, 1, 2, 3]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    jobs.signal("paused", signal.SIGCONT)
    assert jobs.status("paused") == 1
    log = jobs.log("paused")
    taken = rf"Another job writes to {folder}: host {socket.gethostname()}, process"
    assert re.search(rf"FolderTakenError: {taken} {os.getpid()}, since 20", log)
    assert "To resume" not in log
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert tfd.training_is_done(folder)
    other = tfd.distribute(mlp.build, strategy_of("central_storage"))
    assert other.restore_checkpoint(tfd.finished_checkpoints(folder)[-1]).epoch == 4
    assert_same_weights(model, other, tolerance=0)
