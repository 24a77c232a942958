"""job.toml and what is made of it: a table of files that cannot be right, and the batch script."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tfdist_ext import cli
from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.exit_codes import PREEMPTED, RESTART
from tfdist_ext.launch.schedulers.batch_script import batch_script
from tfdist_ext.launch.schedulers.job_file import Job, read_job

COMMAND = 'command = "python train.py"\n'


def job_of(folder: Path, text: str, name: str = "train.toml") -> Job:
    (folder / name).write_text(text)
    return read_job(folder / name)


def test_a_file_with_a_command_is_a_job(tmp_path: Path) -> None:
    assert job_of(tmp_path, COMMAND) == Job("train", ("python", "train.py"))
    listed = job_of(tmp_path, 'command = ["python", "my train.py"]', "My_Job.toml")
    assert listed == Job("my-job", ("python", "my train.py"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "command must be what each task runs, got None"),
        ("command = []", r"command must be what each task runs, got \[\]"),
        ("command = [1]", r"command must be what each task runs, got \[1\]"),
        ('command = "a \'b"', "command must be a command line, got No closing quotation"),
        ("command =", "a job must be described by a TOML file"),
        (COMMAND + "nods = 2", "unknown key 'nods'.*nodes"),
        (COMMAND + "nodes = 0", "nodes must be at least 1, got 0"),
        (COMMAND + "nodes = true", "nodes must be a whole number, got True"),
        (COMMAND + "nodes = '2'", "nodes must be a whole number, got '2'"),
        (COMMAND + "evaluator = 1", "evaluator must be true or false, got 1"),
        (COMMAND + "name = 'My job'", "name must be of lowercase letters, digits and dashes"),
        (COMMAND + "ps = 1\nchief = false", "ps must come with a chief, got chief = false"),
        (COMMAND + "min_workers = 3", "min_workers must be from 1 to the number of workers, 1,"),
        (COMMAND + "env = {A = 1}", "env.A must be text, got 1; quote it"),
        (COMMAND + "slurm = 1", r"slurm must be a table, \[slurm\], got 1"),
    ],
)
def test_a_file_that_cannot_be_right(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        job_of(tmp_path, text)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("tim = '1:00'", "train.toml: slurm: unknown key 'tim'.*time"),
        ("time = 60", "slurm: time must be text, got 60"),
        ('time = "a\\nb"', "slurm: time must have no line breaks"),
        ("cpus_per_node = 0", "slurm: cpus_per_node must be at least 1, got 0"),
        ("setup = 'module load cuda'", "slurm: setup must be a list"),
        ("setup = [1]", r"slurm: setup must be a list of text, got \[1\]"),
        ('options = ["--a\\n--b"]', "slurm: options must have no line breaks"),
    ],
)
def test_a_slurm_table_that_cannot_be_right(tmp_path: Path, table: str, message: str) -> None:
    job = job_of(tmp_path, f"{COMMAND}[slurm]\n{table}")
    with pytest.raises(LaunchError, match=message):
        batch_script(job, "train.toml")


JOB = """
command = ["python", "train.py", "--name", "two words"]
nodes = 2
workers_per_node = 4
ps = 2
evaluator = true
max_restarts = 5
min_workers = 6
grace = 120
gpus_per_node = 4
env = {NCCL_DEBUG = "WARN", MOTTO = "it's"}
[slurm]
time = "04:00:00"
partition = "gpu"
memory = "64G"
cpus_per_node = 32
options = ["--exclusive"]
setup = ["module load cuda"]
"""


def test_the_script_says_what_the_file_says(tmp_path: Path) -> None:
    script = batch_script(job_of(tmp_path, JOB))
    directives = {line for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert directives == {
        f"#SBATCH --{each}"
        for each in (
            "job-name=train",
            "nodes=2",
            "ntasks-per-node=1",
            "output=%x-%j.out",
            "open-mode=append",
            "signal=USR1@120",
            "requeue",
            "gpus-per-node=4",
            "time=04:00:00",
            "partition=gpu",
            "mem=64G",
            "cpus-per-task=32",
            "exclusive",
        )
    }
    assert "module load cuda\nexport TFDIST_STARTS_AGAIN=1\nexport NCCL_DEBUG=WARN\n" in script
    assert (
        "tfdist run --slurm --workers-per-node 4 --ps 2 --evaluator --max-restarts 5"
        " --min-workers 6 --grace 120 \\\n  -- python train.py --name 'two words' &\n" in script
    )


@pytest.mark.parametrize(
    ("status", "restarts", "cancelled", "said", "queued"),
    [
        (0, 0, False, "", False),
        (1, 0, False, "", False),  # a permanent failure
        (PREEMPTED, 0, False, "queued again, 1 of 3 times", True),
        (RESTART, 2, False, "queued again, 3 of 3 times", True),
        (137, 0, False, "", False),  # tfdist has tried max_restarts times
        (PREEMPTED, 3, False, "all 3 times that it may be queued again", False),
        (PREEMPTED, 0, True, "", False),  # scancel is for good
    ],
)
def test_what_the_script_does_at_the_end(
    tmp_path: Path, status: int, restarts: int, cancelled: bool, said: str, queued: bool
) -> None:
    """The script as bash runs it, beside a tfdist and a Slurm that say what they are told."""
    script = batch_script(job_of(tmp_path, f"{COMMAND}[slurm]\nmax_requeues = 3\n"))
    ends = 'kill -TERM "$PPID"; sleep 0.2; ' if cancelled else ""
    programs = {
        "tfdist": f'{ends}echo "$MOTTO"; exit {status}',
        "scontrol": f'echo "$@" >> {tmp_path}/told',
        "sleep": "exit 0",
    }
    for name, body in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    run = subprocess.run(
        ["bash"], input=script, env=env, capture_output=True, text=True, timeout=20
    )
    assert run.returncode == status, run.stderr
    assert said in run.stdout
    assert ("queued again" in run.stdout) == bool(said)
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == ("requeue 7\n" if queued else "")


def test_the_command_prints_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.toml").write_text(JOB)
    assert cli.main(["slurm", str(tmp_path / "train.toml")]) == 0
    assert capsys.readouterr().out == batch_script(read_job(tmp_path / "train.toml"))
    assert cli.main(["slurm", str(tmp_path / "none.toml")]) == 2
    assert "a job must be described by a TOML file" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["slurm", "--submit", str(tmp_path / "train.toml")]) == 2
    assert "must find sbatch on PATH, got none" in capsys.readouterr().err
