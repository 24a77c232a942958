"""docs/examples/submitit_train.py on a real Slurm: its tasks find each other, save, and go on."""

from __future__ import annotations

import pickle
import re
import sys
import time
from pathlib import Path

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
    pytest.mark.xdist_group("slurm"),
]
EXAMPLES = str(ROOT / "docs" / "examples")
ON_ONE_DEVICE = """
import pickle, sys
from pathlib import Path
import submitit_train
folder = Path(sys.argv[1])
(folder / "alone").write_bytes(pickle.dumps(submitit_train.Training(folder / "files")(3)))
"""


def output(folder: Path, suffix: str = "out") -> str:
    """What the tasks have written."""
    files = sorted((folder / "submitit").glob(f"*_log.{suffix}"))
    return "".join(file.read_text(errors="replace") for file in files)


def test_submitit(slurm: Slurm, start: Starter, tmp_path: Path) -> None:
    """Slurm's signal comes within an epoch; losses and weights are those of one device."""
    words = [f"{EXAMPLES}/submitit_train.py", str(tmp_path), "--epochs=3", "--pause=0.2"]
    # More tasks than this machine may have cores.
    env = {**slurm.env, "PYTHONPATH": f"{EXAMPLES}:{LEFT_OUT}", "SBATCH_OVERCOMMIT": "1"}
    submitter = start(*slurm.command(sys.executable, *words), **env)
    submitter.wait_for("job ")
    (job,) = re.findall(r"job (\d+)\n", submitter.output)
    deadline = time.monotonic() + 90
    while "STEP 13\n" not in output(tmp_path):
        assert time.monotonic() < deadline, output(tmp_path) + output(tmp_path, "err")
        time.sleep(0.1)
    slurm("scancel", "--signal=USR2", job)  # as Slurm does before the time is over
    slurm.wait_for(job, ("PENDING",), 60)
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 150) == "COMPLETED"
    assert submitter.ended(30) == 0

    alone = start(sys.executable, "-c", ON_ONE_DEVICE, str(tmp_path), **env)
    assert alone.ended() == 0, alone.output
    expected = pickle.loads((tmp_path / "alone").read_bytes())
    files = sorted((tmp_path / "submitit").glob("*_result.pkl"))
    assert len(files) == 2
    for task, file in enumerate(files):
        outcome, result = pickle.loads(file.read_bytes())
        assert outcome == "success"
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
        for value, wanted in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=0, atol=2e-6)
        assert f"task {task}: loss {expected['loss'][-1]:.4f}\n" in submitter.output
    steps = [int(line.split()[1]) for line in output(tmp_path).splitlines() if "STEP" in line]
    # Each step was done once, by each of the two: the job has gone on where it was.
    assert sorted(steps) == sorted(2 * list(range(1, 31)))
    assert output(tmp_path).count("Requeued job") == 1  # by task 0 alone
