"""Jobs on a real Slurm: found by detection, queued again before their time is over, cancelled."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_cluster
from conftest import (
    BIN,
    TFDIST,
    Result,
    Starter,
    assert_equal,
    result_in,
    training,
    write_files_of,
)
from pages import blocks_of, commands_of
from slurm_cluster import NODES, Slurm

pytestmark = [
    pytest.mark.skipif(bool(slurm_cluster.WHY_NOT), reason=slurm_cluster.WHY_NOT or "-"),
    pytest.mark.timeout(
        300, func_only=True
    ),  # other tests may use the Slurm of this machine before
]


def submit(slurm: Slurm, folder: Path, command: list[str], tables: str, **slurm_keys: str) -> str:
    """The number of a job that `tfdist slurm` has submitted."""
    job = folder / "job.toml"
    listed = ", ".join(f"'{word}'" for word in command)
    job.write_text(
        f"command = [{listed}]\nnodes = 2\n{tables}\n[env]\nTF_CPP_MIN_LOG_LEVEL = '3'\n"
        f"[slurm]\noutput = '{folder}/output'\nsetup = ['export PATH={BIN}:$PATH']\n"
        + "".join(f"{key} = {value}\n" for key, value in slurm_keys.items())
    )
    said = slurm(TFDIST, "slurm", "--submit", str(job))
    return re.findall(r"Submitted batch job (\d+)", said)[0]


def output(folder: Path) -> str:
    path = folder / "output"
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for(folder: Path, text: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while text not in output(folder):
        assert time.monotonic() < deadline, f"{text!r} did not come:\n{output(folder)}"
        time.sleep(0.1)


def left(folder: Path) -> list[str]:
    """The commands of processes whose arguments name this folder."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if str(folder) in words and int(name) != os.getpid():
            found.append(words.replace("\0", " "))
    return found


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
    job = submit(slurm, tmp_path, command, "grace = 20", time="'00:01:00'")
    wait_for(tmp_path, "tfdist: queued again, 1 of 20 times")
    # Of a minute, a slow machine has nothing left when its tasks have started.
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), 250) == "COMPLETED"
    said = output(tmp_path)
    assert said.count("tfdist: SIGUSR1: ending 2 tasks") == 1
    assert said.count("tfdist: queued again") == 1  # by node 0 alone
    assert f"JobId={job} " in slurm("scontrol", "show", "job", job)
    assert_equal(result_in(tmp_path), undisturbed(4, 40))
    assert not left(tmp_path)


def test_servers_and_a_drained_node(slurm: Slurm, tmp_path: Path) -> None:
    """A chief, workers and a server on two nodes. A node that is drained finishes its job."""
    job = submit(slurm, tmp_path, training(tmp_path, 3, 8), "ps = 1")
    wait_for(tmp_path, " STEP 4\n")
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=DRAIN", "Reason=test")
    try:
        assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 150) == "COMPLETED"
    finally:
        slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    assert result_in(tmp_path)["iterations"] == 24
    tasks = set(re.findall(r"^\[(\w+:\d)\]", output(tmp_path), re.M))
    assert tasks == {"chief:0", "worker:0", "worker:1", "ps:0"}


def test_a_node_that_fails(
    slurm: Slurm, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    """Slurm queues the job again, which goes on from its checkpoint once the node is back."""
    job = submit(slurm, tmp_path, training(tmp_path, 3, 8, 0.1), "")
    wait_for(tmp_path, " STEP 10\n")
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    slurm.wait_for(job, ("PENDING", "COMPLETING"), 60)
    # It may be back already, by its slurmd.
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME", check=False)
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 150) == "COMPLETED"
    assert_equal(result_in(tmp_path), undisturbed(3, 8))


def test_scancel_is_for_good(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, training(tmp_path, 3, 50, 0.2), "")
    wait_for(tmp_path, " STEP 3\n")
    slurm("scancel", job)
    assert slurm.wait_for(job, ("CANCELLED",), 60) == "CANCELLED"
    deadline = time.monotonic() + 30
    while left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left(tmp_path)
    assert "queued again" not in output(tmp_path)
    assert "training stopped by a signal. The last checkpoint is" in output(tmp_path)


PAGE = "docs/slurm.md"


def test_the_commands_of_the_page(slurm: Slurm, start: Starter, tmp_path: Path) -> None:
    """A job with its job.toml, but for what this Slurm does not have; then one of salloc."""
    shown, submitted, interactive = (command for command, _ in commands_of(PAGE))
    write_files_of("docs/several_machines.md", tmp_path)
    (job,) = (block.text for block in blocks_of(PAGE) if block.language == "toml")
    (tmp_path / "job.toml").write_text(job)
    in_folder = {"cwd": tmp_path, "PATH": f"{BIN}:{slurm.env['PATH']}"}
    in_folder["SLURM_CONF"] = slurm.env["SLURM_CONF"]
    assert start("bash", "-c", shown, **in_folder).ended() == 0
    script = (tmp_path / "job.sbatch").read_text()
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "--workers-per-node 4" in script

    for line in ("gpus_per_node = 4", 'partition = "gpu"'):
        (of_file,) = (each for each in job.splitlines() if each.startswith(line))
        job = job.replace(of_file, "")
    job = job.replace("workers_per_node = 4", "workers_per_node = 1")
    job = job.replace("source /home/user/venv/bin/activate", f"export PATH={BIN}:$PATH")
    (tmp_path / "job.toml").write_text(job)
    said = start("bash", "-c", submitted, **in_folder)
    assert said.ended() == 0, said.output
    number = re.findall(r"Submitted batch job (\d+)", said.output)[0]
    assert slurm.wait_for(number, ("COMPLETED", "FAILED", "CANCELLED"), 100) == "COMPLETED"
    assert "[worker:0] Epoch 5/5" in (tmp_path / f"job-{number}.out").read_text()

    again = start("bash", "-c", interactive, **in_folder)
    assert again.ended() == 0, again.output
    assert re.findall(r"^\[worker:0\] .*complete after 5 epochs", again.output, re.M)
    assert (tmp_path / "model.keras").exists()
