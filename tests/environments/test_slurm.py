"""Jobs on a real Slurm: found by detection, queued again before their time is over, cancelled."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import slurm_cluster
from pages import blocks_of, commands_of
from processes import command_of, environment_of, pids
from real_jobs import BIN, ROOT, Result, Starter, assert_equal, result_in, training
from slurm_cluster import NODES, Slurm
from task_programs import LEFT_OUT

pytestmark = [
    pytest.mark.skipif(bool(slurm_cluster.WHY_NOT), reason=slurm_cluster.WHY_NOT or "-"),
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("slurm"),
]
TEMPLATE = ROOT / "configs" / "slurm" / "train.sbatch"
PAGE = "docs/slurm.md"


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


def wait_for(folder: Path, text: str, after: str = "") -> str:
    """Wait until the output of a job has this text after another one; the output until then."""
    deadline = time.monotonic() + 120
    while text not in (said := output(folder)).removeprefix(after):
        assert time.monotonic() < deadline, f"{text!r} did not come:\n{said}"
        time.sleep(0.1)
    return said


def pids_of(folder: Path) -> list[int]:
    """Processes of Python whose arguments name this folder."""
    commands = {pid: command_of(pid) for pid in pids() if pid != os.getpid()}
    return [pid for pid, words in commands.items() if str(folder) in words and "python" in words[0]]


def test_a_job_survives(slurm: Slurm, tmp_path: Path, undisturbed: Result) -> None:
    """A killed task, a failed node and the time limit in one job, which ends with equal weights."""
    job = submit(slurm, tmp_path, training(tmp_path, pause=0.6))
    wait_for(tmp_path, " STEP 3\n")
    pid = next(pid for pid in pids_of(tmp_path) if environment_of(pid).get("SLURM_PROCID") == "1")
    os.kill(pid, signal.SIGKILL)
    before = wait_for(tmp_path, ": restart 1 of 3\n")
    assert re.search(r"exit codes (137 138|138 137): restart", before)

    before = wait_for(tmp_path, " STEP 3\n", after=before)
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    slurm.wait_for(job, ("PENDING", "COMPLETING"), 60)
    # It may be back already, by its slurmd.
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME", check=False)
    slurm.wait_for(job, ("RUNNING",), 60)

    wait_for(tmp_path, ": resuming ", after=before)
    # The template's USR1@120 is due at once. Slurm looks every 30 seconds.
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    wait_for(tmp_path, "train.sbatch: back into the queue, 2 of 20 times")
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), 150) == "COMPLETED"
    said = output(tmp_path)
    assert said.count("train.sbatch: back into the queue") == said.count("restart 1 of 3") == 1
    assert f"JobId={job} " in slurm("scontrol", "show", "job", job)
    assert_equal(result_in(tmp_path), undisturbed)
    assert not pids_of(tmp_path)


def test_servers_are_cancelled_for_good(slurm: Slurm, tmp_path: Path) -> None:
    """A chief, workers and a server on two nodes."""
    roles = {
        "# export TFDIST_TASKS=chief=1,worker=2,ps=1": "export TFDIST_TASKS=chief=1,worker=2,ps=1",
        "--ntasks-per-node=1": "--ntasks-per-node=2",
    }
    job = submit(slurm, tmp_path, training(tmp_path, pause=1.0), **roles)
    wait_for(tmp_path, " STEP 4\n")
    slurm("scancel", job)
    assert slurm.wait_for(job, ("CANCELLED",), 60) == "CANCELLED"
    deadline = time.monotonic() + 30
    while pids_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not pids_of(tmp_path)
    assert not re.search("back into the queue|restart [1-9]", output(tmp_path))


def test_an_error_of_the_script_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, ["python", "-c", "'raise SystemExit(3)'"])
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 60) == "FAILED"
    assert "ExitCode=3:0" in slurm("scontrol", "show", "job", job)
    assert "restart" not in output(tmp_path)


def test_the_command_of_the_page(slurm: Slurm, start: Starter, tmp_path: Path) -> None:
    """Runs in an interactive allocation, where nobody writes TF_CONFIG."""
    interactive, submitted = (command for command, _ in commands_of(PAGE))
    assert submitted == "sbatch train.sbatch"
    (script,) = (block for block in blocks_of(PAGE) if block.file)
    (tmp_path / script.file).write_text(script.program, encoding="utf-8")
    in_folder = {"cwd": tmp_path, "PATH": f"{BIN}:{slurm.env['PATH']}", "PYTHONPATH": LEFT_OUT}
    in_folder["SLURM_CONF"] = slurm.env["SLURM_CONF"]
    said = start(*slurm.command("bash", "-c", interactive), **in_folder)
    assert said.ended() == 0, said.output
    assert "Epoch 5/5" in said.output
    assert (tmp_path / "model.keras").exists()
