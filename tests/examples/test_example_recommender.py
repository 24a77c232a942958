"""The recommender: learns from its tables, and a job that is killed takes the same steps."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from warm_programs import Program

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "recommender.py"


@pytest.mark.long  # scripts/chaos --fixed kills servers and workers, too
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
    assert aucs[1] > 0.69  # without the tables, the numbers alone give 0.62
