"""SIGTERM to any one task of a training: all end at one step, saved once, and nothing is lost."""

from __future__ import annotations

import os
import random
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


def train(
    folder: Path,
    kind: str,
    workers: int,
    *,
    hurt: str | None = None,
    after: str = IN_SECOND_EPOCH,
    resumes: str = "",
) -> dict[str, int]:
    """The status of each task; `hurt` gets SIGTERM after it has written that."""
    names = [f"worker:{number}" for number in range(workers)]
    arguments = (str(folder), kind, str(EPOCHS), str(STEPS), "0.05")
    with tasks(PROGRAM, *arguments, folder=folder, workers=workers, ps=0) as cluster:
        cluster.start(*names)
        if hurt is not None:
            cluster.wait_for(hurt, after, 100)
            cluster.signal(hurt, signal.SIGTERM)
        statuses = {name: cluster.status(name, 100) for name in names}
        for name in names:
            assert "Traceback" not in cluster.log(name), cluster.log(name)[-3000:]
        if hurt is not None:
            check_ended_together(cluster, names)
        if resumes:
            assert resumes in cluster.log(names[0]), cluster.log(names[0])
        return statuses


def check_ended_together(cluster: Tasks, names: list[str]) -> None:
    last = {re.findall(r"STEP (\d+)\n", cluster.log(name))[-1] for name in names}
    assert len(last) == 1, last
    (step,) = last
    said = cluster.log("worker:0")
    assert "training stopped by a signal. The last checkpoint is" in said
    assert f"(step {step})" in said


def result(folder: Path, name: str = "worker-0") -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as file:
        return dict(file)


@pytest.mark.parametrize(
    ("kind", "workers", "again"),
    [("arrays", 2, 2), pytest.param("tfd.data", 3, 2, marks=pytest.mark.long)],
)
def test_all_workers_end_at_one_step_and_go_on_from_it(
    tmp_path: Path, kind: str, workers: int, again: int
) -> None:
    """The second job has another number of workers: the numbers are those of one training."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    for folder in (whole, hurt):
        folder.mkdir()
    assert set(train(whole, kind, workers).values()) == {0}
    assert set(train(hurt, kind, workers, hurt="worker:1").values()) == {143}
    (checkpoint,) = (hurt / "checkpoints").glob("epoch-*-batch-*.safetensors")  # saved once
    assert checkpoint.name.startswith("epoch-00001-batch-")
    assert set(train(hurt, kind, again).values()) == {0}
    expected, found = result(whole), result(hurt)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert found["iterations"] == EPOCHS * STEPS


def test_a_validation_ends_at_a_signal_and_is_begun_again(tmp_path: Path) -> None:
    """Its metrics are over all of its rows, and callbacks see the logs of the training before."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    for folder in (whole, hurt):
        folder.mkdir()
    assert set(train(whole, "tfd.data", 2).values()) == {0}
    ended = train(hurt, "tfd.data", 2, hurt="worker:1", after=IN_SECOND_VALIDATION)
    assert set(ended.values()) == {143}
    resumes = "resuming with the validation of epoch 2, of "
    assert set(train(hurt, "tfd.data", 2, resumes=resumes).values()) == {0}
    expected, found = result(whole), result(hurt)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert len(found["val_loss"]) == EPOCHS
    assert found["iterations"] == EPOCHS * STEPS


def test_one_process(tmp_path: Path) -> None:
    """Also by a signal of one's own choice."""
    env = {**os.environ, "TFDIST_PREEMPTION_SIGNAL": "SIGUSR1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env.pop("TF_CONFIG", None)
    statuses = []
    for number, hurt in enumerate((None, signal.SIGUSR1, None)):
        folder = tmp_path / ("hurt" if number else "whole")
        folder.mkdir(exist_ok=True)
        words = [PROGRAMS / PROGRAM, folder, "arrays", EPOCHS, STEPS, 0.05]
        log = folder / f"log-{number}"
        program = Program([sys.executable, *map(str, words)], output=log, env=env)
        if hurt is not None:
            deadline = time.monotonic() + 60
            while IN_SECOND_EPOCH not in log.read_text():
                assert time.monotonic() < deadline
                time.sleep(random.uniform(0.01, 0.05))
            program.send_signal(hurt)
        statuses.append(program.wait(60))
    assert statuses == [0, 143, 0]
    expected, found = result(tmp_path / "whole", "alone"), result(tmp_path / "hurt", "alone")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
