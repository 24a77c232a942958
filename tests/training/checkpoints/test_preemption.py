"""SIGTERM to any one task of a training: all end at one step, saved once, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from real_tasks import PROGRAMS, Tasks, tasks
from warm_programs import Program

pytestmark = pytest.mark.timeout(300)
EPOCHS, STEPS = 3, 6
PROGRAM = "interrupted_training.py"


IN_SECOND_EPOCH = f"STEP {STEPS + 2}\n"
IN_SECOND_VALIDATION = f"(?s)STEP {2 * STEPS}\n.*VALIDATION 0\n"


def train(folder: Path, workers: int, *, hurt: str = "", resumes: str = "") -> dict[str, int]:
    """Returns the status of each task; worker 1 gets SIGTERM after it has written `hurt`."""
    names = [f"worker:{number}" for number in range(workers)]
    arguments = (str(folder), "tfd.data", str(EPOCHS), str(STEPS), "0.05")
    with tasks(PROGRAM, *arguments, folder=folder, workers=workers, ps=0) as cluster:
        cluster.start(*names)
        if hurt:
            cluster.wait_for("worker:1", hurt, 100)
            cluster.signal("worker:1", signal.SIGTERM)
        statuses = {name: cluster.status(name, 100) for name in names}
        for name in names:
            assert "Traceback" not in cluster.log(name), cluster.log(name)[-3000:]
        if hurt:
            check_ended_together(cluster, names)
        assert resumes in cluster.log(names[0])
        return statuses


def check_ended_together(cluster: Tasks, names: list[str]) -> None:
    last = {re.findall(r"STEP (\d+)\n", cluster.log(name))[-1] for name in names}
    assert len(last) == 1, last
    (step,) = last
    said = cluster.log("worker:0")
    assert "training stopped by a signal. The last checkpoint is" in said
    assert f"(step {step})" in said


def result(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "worker-0.npz") as file:
        return dict(file)


def test_workers_end_at_one_step_and_in_a_validation_and_continue(tmp_path: Path) -> None:
    """The second job has another number of workers: the numbers are those of one training."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    for folder in (whole, hurt):
        folder.mkdir()
    assert set(train(whole, 2).values()) == {0}
    assert set(train(hurt, 3, hurt=IN_SECOND_EPOCH).values()) == {143}
    (checkpoint,) = (hurt / "checkpoints").glob("epoch-*-batch-*.safetensors")  # saved once
    assert checkpoint.name.startswith("epoch-00001-batch-")
    ended = train(hurt, 2, hurt=IN_SECOND_VALIDATION, resumes="resuming from epoch 2, batch ")
    assert set(ended.values()) == {143}
    resumes = "resuming with the validation of epoch 2, of "
    assert set(train(hurt, 2, resumes=resumes).values()) == {0}
    expected, found = result(whole), result(hurt)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert len(found["val_loss"]) == EPOCHS  # over all rows of each validation
    assert found["iterations"] == EPOCHS * STEPS


def test_one_process_ends_by_a_signal_of_choice(tmp_path: Path) -> None:
    env = {**os.environ, "TFDIST_PREEMPTION_SIGNAL": "SIGUSR1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env.pop("TF_CONFIG", None)
    words = [PROGRAMS / PROGRAM, tmp_path, "arrays", EPOCHS, STEPS, 0.05]
    log = tmp_path / "log"
    program = Program([sys.executable, *map(str, words)], output=log, env=env)
    deadline = time.monotonic() + 60
    while IN_SECOND_EPOCH not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    program.send_signal(signal.SIGUSR1)
    assert program.wait(60) == 143
    assert "training stopped by a signal. The last checkpoint is" in log.read_text()
