"""Shares of a machine: a table, a property, and processes that have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.shares import Share, gpus_of, shares_of


@pytest.mark.parametrize(
    ("workers", "gpus", "cores", "shares"),
    [
        (None, ["0", "1"], [0, 1], [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (1, ["GPU-8f", "GPU-9a"], [0], [{"CUDA_VISIBLE_DEVICES": "GPU-8f"}]),
        (2, [], [0, 1, 2, 5], [(0, 1), (2, 5)]),
        (2, [], [4, 5, 6], [(4,), (5, 6)]),
        (3, [], [], [(), (), ()]),  # a system that binds no process to cores
    ],
)
def test_shares(workers: int | None, gpus: list[str], cores: list[int], shares: list[Any]) -> None:
    found = shares_of(workers, gpus=gpus, cores=cores)
    expected = [Share(each) if isinstance(each, dict) else Share(cores=each) for each in shares]
    assert found == expected


@pytest.mark.parametrize(
    ("workers", "gpus", "cores", "message"),
    [
        (3, ["0", "1"], [0], r"from 1 to 2 .*the GPUs \(0, 1\), got 3"),
        (0, ["0", "1"], [0], "from 1 to 2 .*got 0"),
        (3, [], [0, 1], "from 1 to 2 .*the 2 cores, got 3"),
        (None, [], [0, 1], "must come with --workers on a machine without GPUs"),
    ],
)
def test_no_share(workers: int | None, gpus: list[str], cores: list[int], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        shares_of(workers, gpus=gpus, cores=cores)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0, 2", ["0", "2"]), ("", []), ("-1", []), ("1,-1,0", ["1"]), ("GPU-8f", ["GPU-8f"])],
)
def test_gpus_that_the_environment_names(visible: str, gpus: list[str]) -> None:
    assert gpus_of({"CUDA_VISIBLE_DEVICES": visible, "PATH": "/nowhere"}) == gpus


def test_gpus_that_nvidia_smi_lists(tmp_path: Path) -> None:
    assert gpus_of({"PATH": str(tmp_path)}) == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\n")
    program.chmod(0o755)
    assert gpus_of({"PATH": str(tmp_path)}) == ["0", "1"]
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(LaunchError, match=r"nvidia-smi must list the GPUs.*exit status 9"):
        gpus_of({"PATH": str(tmp_path)})


def tfdist(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfdist_ext.cli", "run", *words]
    env = {"CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False
    )


PRINTS = ["--", "python", "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_workers_run_on_their_own_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    workers = min(2, len(cores))
    done = tfdist("--workers", str(workers), "--process-per-device", *PRINTS)
    expected = shares_of(workers, gpus=[], cores=cores)
    lines = [f"[worker:{n}] {list(share.cores)}" for n, share in enumerate(expected)]
    assert sorted(done.stdout.splitlines()) == lines
    assert sorted(os.sched_getaffinity(0)) == cores


def test_each_worker_sees_its_own_gpu() -> None:
    prints = ["--", "python", "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    done = tfdist("--process-per-device", *prints, CUDA_VISIBLE_DEVICES="5,7")
    assert sorted(done.stdout.splitlines()) == ["[worker:0] 5", "[worker:1] 7"]
