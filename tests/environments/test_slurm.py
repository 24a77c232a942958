"""Jobs on a real Slurm: found by detection, queued again before their time is over, cancelled."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_cluster
from pages import commands_of
from processes import command_of, environment_of, pids
from real_jobs import (
    BIN,
    ROOT,
    Result,
    Starter,
    assert_equal,
    result_in,
    training,
    write_files_of,
)
from slurm_cluster import NODES, Slurm
from task_programs import LEFT_OUT

pytestmark = [
    pytest.mark.skipif(bool(slurm_cluster.WHY_NOT), reason=slurm_cluster.WHY_NOT or "-"),
    pytest.mark.timeout(300),
]


TEMPLATE = ROOT / "configs" / "slurm" / "train.sbatch"


def submit(slurm: Slurm, folder: Path, command: list[str], **edits: str) -> str:
    """The number of a job submitted with the template, after a few edits of its lines.

    Args:
        command: what each task runs.
        edits: what replaces some text of the template.
    """
    script = TEMPLATE.read_text(encoding="utf-8")
    setup = f"export PATH={BIN}:$PATH PYTHONPATH={LEFT_OUT} TF_CPP_MIN_LOG_LEVEL=3"
    for old, new in {
        "# EDIT: source /path/to/venv/bin/activate": setup,
        "python train.py": " ".join(command),
        "%x-%j.out": f"{folder}/output",
        **edits,
    }.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (folder / "train.sbatch").write_text(script, encoding="utf-8")
    said = slurm("sbatch", f"--chdir={folder}", str(folder / "train.sbatch"))
    return re.findall(r"Submitted batch job (\d+)", said)[0]


def output(folder: Path) -> str:
    path = folder / "output"
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for(folder: Path, text: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while text not in output(folder):
        assert time.monotonic() < deadline, f"{text!r} did not come:\n{output(folder)}"
        time.sleep(0.1)


def pids_of(folder: Path) -> list[int]:
    """Processes of Python whose arguments name this folder."""
    commands = {pid: command_of(pid) for pid in pids() if pid != os.getpid()}
    return [pid for pid, words in commands.items() if str(folder) in words and "python" in words[0]]


def test_srun_alone_is_detected(
    slurm: Slurm, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    """Two tasks on one node, more than it has cores for; nobody writes TF_CONFIG."""
    words = ["srun", "--nodes=1", "--ntasks=2", "--overcommit", "--label"]
    said = slurm(*words, *training(tmp_path, 3, 8, 0.0))
    assert {line.split(": ")[0] for line in said.splitlines() if "STEP 24" in line} == {"0", "1"}
    assert_equal(result_in(tmp_path), undisturbed(3, 8))


def test_a_time_limit_is_gone_past(
    slurm: Slurm, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    """It saves before its time is over, is queued again, and ends with the same weights."""
    command = training(tmp_path, 4, 40, 0.25)
    edits = {"04:00:00": "00:01:00", "USR1@120": "USR1@20", "GRACE=90": "GRACE=15"}
    job = submit(slurm, tmp_path, command, **edits)
    wait_for(tmp_path, "train.sbatch: back into the queue, 1 of 20 times")
    # Of a minute, a slow machine has nothing left when its tasks have started.
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), 250) == "COMPLETED"
    said = output(tmp_path)
    assert said.count("train.sbatch: back into the queue") == 1
    assert "restart" not in said
    assert f"JobId={job} " in slurm("scontrol", "show", "job", job)
    assert_equal(result_in(tmp_path), undisturbed(4, 40))
    assert not pids_of(tmp_path)


def test_servers_and_a_drained_node(slurm: Slurm, tmp_path: Path) -> None:
    """A chief, workers and a server on two nodes. A node that is drained finishes its job."""
    roles = {
        "# export TFDIST_TASKS=chief=1,worker=2,ps=1": "export TFDIST_TASKS=chief=1,worker=2,ps=1",
        "--ntasks-per-node=1": "--ntasks-per-node=2",
    }
    job = submit(slurm, tmp_path, training(tmp_path, 3, 8), **roles)
    wait_for(tmp_path, " STEP 4\n")
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=DRAIN", "Reason=test")
    try:
        assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 150) == "COMPLETED"
    finally:
        slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    assert result_in(tmp_path)["iterations"] == 24


def test_a_task_that_dies_starts_again_on_its_node(
    slurm: Slurm, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    job = submit(slurm, tmp_path, training(tmp_path, 3, 8, 0.1))
    wait_for(tmp_path, " STEP 10\n")
    pid = next(pid for pid in pids_of(tmp_path) if environment_of(pid).get("SLURM_PROCID") == "1")
    os.kill(pid, signal.SIGKILL)
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 150) == "COMPLETED"
    assert re.findall(r"exit codes (?:137 138|138 137): restart 1 of 3", output(tmp_path))
    assert_equal(result_in(tmp_path), undisturbed(3, 8))


def test_an_error_of_the_script_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, ["python", "-c", "'raise SystemExit(3)'"])
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 60) == "FAILED"
    assert "ExitCode=3:0" in slurm("scontrol", "show", "job", job)
    assert "restart" not in output(tmp_path)


def test_a_node_that_fails(
    slurm: Slurm, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    """Slurm queues the job again, which goes on from its checkpoint once the node is back."""
    job = submit(slurm, tmp_path, training(tmp_path, 3, 8, 0.1))
    wait_for(tmp_path, " STEP 10\n")
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    slurm.wait_for(job, ("PENDING", "COMPLETING"), 60)
    # It may be back already, by its slurmd.
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME", check=False)
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 150) == "COMPLETED"
    assert_equal(result_in(tmp_path), undisturbed(3, 8))


def test_scancel_is_for_good(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, training(tmp_path, 3, 50, 0.2))
    wait_for(tmp_path, " STEP 3\n")
    slurm("scancel", job)
    assert slurm.wait_for(job, ("CANCELLED",), 60) == "CANCELLED"
    deadline = time.monotonic() + 30
    while pids_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not pids_of(tmp_path)
    assert "back into the queue" not in output(tmp_path)
    assert "training stopped by a signal. The last checkpoint is" in output(tmp_path)


PAGE = "docs/slurm.md"


def test_the_command_of_the_page(slurm: Slurm, start: Starter, tmp_path: Path) -> None:
    """Runs in an interactive allocation. The tests above run the page's sbatch template."""
    submitted, interactive = (command for command, _ in commands_of(PAGE))
    assert submitted == "sbatch train.sbatch"
    write_files_of(PAGE, tmp_path)
    in_folder = {"cwd": tmp_path, "PATH": f"{BIN}:{slurm.env['PATH']}"}
    in_folder["SLURM_CONF"] = slurm.env["SLURM_CONF"]
    for epochs in ("Epoch 5/5", "complete after 5 epochs"):
        said = start(*slurm.command("bash", "-c", interactive), **in_folder)
        assert said.ended() == 0, said.output
        assert epochs in said.output
    assert (tmp_path / "model.keras").exists()
