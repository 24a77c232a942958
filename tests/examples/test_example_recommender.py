"""The recommender: learns from its tables, and a job that is killed takes the same steps."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from warm_programs import Program

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "recommender.py"


def test_only_tables_tell_which_ids_lead_to_clicks() -> None:
    """The numbers alone give an AUC of 0.62, so a higher one is that of learned rows."""
    import keras
    import recommender as example

    inputs, clicks = example.make_batch(7, 2000)
    again, _ = example.make_batch(7, 2000)
    np.testing.assert_array_equal(inputs["ids"], again["ids"])
    rows = np.minimum(example.CRITEO_ROWS, 2000)
    assert (inputs["ids"].numpy() < rows).all()
    assert (inputs["ids"].numpy() >= 0).all()

    numbers = np.concatenate([example.make_batch(n, 2000)[0]["numbers"] for n in range(20)])
    clicks = np.concatenate([example.make_batch(n, 2000)[1] for n in range(20)])
    auc = keras.metrics.AUC()
    auc.update_state(clicks, numbers.sum(axis=1) / 13)
    assert 0.6 < float(auc.result()) < 0.64


@pytest.mark.timeout(400)
def test_a_killed_server_and_a_killed_worker_cost_no_step(tmp_path: Path) -> None:
    options = ["--rows", "2000", "--steps", "120", "--epochs", "2", "--folder", "run"]
    command = [sys.executable, "-m", "tfdist_ext.cli", "run", "--workers", "2", "--ps", "2"]
    command += ["--max-restarts", "3", "--", sys.executable, str(EXAMPLE), *options]
    job = Program(command, output=tmp_path / "log", env=dict(os.environ), cwd=tmp_path)

    def log() -> str:
        return (tmp_path / "log").read_text(encoding="utf-8", errors="replace")

    def kill(task: str, start: int) -> None:
        """Kills a task in epoch 2, which has started this number of times."""
        deadline = time.monotonic() + 120
        while log().count("Epoch 2/2") < start:
            assert time.monotonic() < deadline, log()[-3000:]
            time.sleep(0.1)
        os.kill(int(re.findall(rf"{task} (\d+)", log())[-1]), signal.SIGKILL)

    try:
        kill("ps:0", 1)
        kill("worker:1", 2)
        assert job.wait(150) == 0, log()[-3000:]
    finally:
        job.kill()
    for line in (
        "ps:0 failed first",
        "resuming after epoch 1 (step 120)",
        "worker:1 failed (exit status 137); the other workers do its work; restart 2 of 3",
        "steps: 240",
    ):
        assert line in log(), log()[-3000:]
    aucs = [float(auc) for auc in re.findall(r"val_auc: ([\d.]+)", log())]
    assert len(aucs) == 2
    assert aucs[1] > aucs[0] > 0.65
    assert aucs[1] > 0.69
