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


def alone(folder: Path, *, hurt: bool) -> int:
    """Returns the status of a job of one process, which may get a signal in its second epoch."""
    env = {**os.environ, "TFDIST_PREEMPTION_SIGNAL": "SIGUSR1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env.pop("TF_CONFIG", None)
    words = [PROGRAMS / PROGRAM, folder, "tfd.data", EPOCHS, STEPS, 0.05]
    log = folder / f"log of {hurt=}"
    program = Program([sys.executable, *map(str, words)], output=log, env=env)
    deadline = time.monotonic() + 60
    while hurt and IN_SECOND_EPOCH not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if hurt:
        program.send_signal(signal.SIGUSR1)
    status = program.wait(100)
    assert ("training stopped by a signal. The last checkpoint is" in log.read_text()) == hurt
    return status


def test_jobs_end_in_an_epoch_and_after_a_validation_and_continue(tmp_path: Path) -> None:
    """The numbers of 3 and 2 workers that are stopped twice are those of a single process."""
    single, hurt = tmp_path / "single", tmp_path / "hurt"
    for folder in (single, hurt):
        folder.mkdir()
    assert [alone(single, hurt=True), alone(single, hurt=False)] == [143, 0]
    assert set(train(hurt, 3, hurt=IN_SECOND_EPOCH).values()) == {143}
    (checkpoint,) = (hurt / "checkpoints").glob("epoch-*-batch-*.safetensors")  # saved once
    assert checkpoint.name.startswith("epoch-00001-batch-")
    ended = train(hurt, 2, hurt=IN_SECOND_VALIDATION, resumes="resuming after batch ")
    assert set(ended.values()) == {143}
    resumes = f"resuming after epoch 2 (step {2 * STEPS})"
    assert set(train(hurt, 2, resumes=resumes).values()) == {0}
    with np.load(single / "alone.npz") as expected, np.load(hurt / "worker-0.npz") as found:
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)
        assert len(found["val_loss"]) == EPOCHS  # over all rows of each validation
        assert found["iterations"] == EPOCHS * STEPS
