"""docs/examples/submitit_train.py on a real Slurm: its tasks find each other, save, and go on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slurm_cluster
from real_jobs import ROOT, Starter
from slurm_cluster import Slurm
from task_programs import LEFT_OUT

pytest.importorskip("submitit", reason="pip install submitit")

pytestmark = [
    pytest.mark.skipif(bool(slurm_cluster.WHY_NOT), reason=slurm_cluster.WHY_NOT or "-"),
    pytest.mark.timeout(250),
]
EXAMPLES = str(ROOT / "docs" / "examples")
SLOWLY = """
import sys
from pathlib import Path
import submitit_train
folder, epochs, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
job = submitit_train.executor(folder).submit(submitit_train.Training(folder), epochs, pause)
print("job", job.job_id, flush=True)
job.results()
"""


def alone(folder: Path, epochs: int) -> dict[str, Any]:
    """What the training returns on one device."""
    code = (
        "import pickle, sys; from pathlib import Path; import submitit_train\n"
        "result = submitit_train.Training(Path(sys.argv[1]))(int(sys.argv[2]))\n"
        "Path(sys.argv[1], 'alone').write_bytes(pickle.dumps(result))"
    )
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-c", code, str(folder), str(epochs)],
        env={**os.environ, "PYTHONPATH": f"{EXAMPLES}:{LEFT_OUT}"},
        check=True,
        capture_output=True,
        timeout=100,
    )
    return pickle.loads((folder / "alone").read_bytes())


def output(folder: Path, suffix: str = "out") -> str:
    files = sorted((folder / "submitit").glob(f"*_log.{suffix}"))
    return "".join(file.read_text(errors="replace") for file in files)


def wait_for(folder: Path, text: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while text not in output(folder):
        said = output(folder) + output(folder, "err")
        assert time.monotonic() < deadline, f"{text!r} did not come:\n{said}"
        time.sleep(0.1)


@pytest.mark.parametrize("preempted", [False, True])
def test_submitit(slurm: Slurm, start: Starter, tmp_path: Path, preempted: bool) -> None:
    """The weights are those of one device, also where Slurm's signal comes within an epoch."""
    words = [f"{EXAMPLES}/submitit_train.py", str(tmp_path), "--epochs", "3"]
    if preempted:
        words = ["-c", SLOWLY, str(tmp_path), "3", "0.2"]
    # More tasks than this machine may have cores.
    env = {**slurm.env, "PYTHONPATH": f"{EXAMPLES}:{LEFT_OUT}", "SBATCH_OVERCOMMIT": "1"}
    submitter = start(*slurm.command(sys.executable, *words), **env)
    submitter.wait_for("job ")
    job = submitter.output.split("job ")[1].split()[0]
    if preempted:
        wait_for(tmp_path, "STEP 13\n")
        slurm("scancel", "--signal=USR2", job)  # as Slurm does before the time is over
        slurm.wait_for(job, ("PENDING",), 60)
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 150) == "COMPLETED"
    assert submitter.ended(30) == 0
    files = sorted((tmp_path / "submitit").glob("*_result.pkl"))
    assert len(files) == 2
    expected = alone(tmp_path / "alone", 3)
    for task, file in enumerate(files):
        outcome, result = pickle.loads(file.read_bytes())
        assert outcome == "success"
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
        for value, wanted in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=0, atol=2e-6)
        if not preempted:
            assert f"task {task}: loss {expected['loss'][-1]:.4f}\n" in submitter.output
    steps = [int(line.split()[1]) for line in output(tmp_path).splitlines() if "STEP" in line]
    # Each step was done once, by each of the two: the job has gone on where it was.
    assert sorted(steps) == sorted(2 * list(range(1, 31)))
    assert output(tmp_path).count("Requeued job") == preempted  # by task 0 alone
