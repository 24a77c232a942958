"""GPUs of a machine: a table, and processes that have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.gpus import gpus_of, one_gpu_each


def test_a_gpu_for_each_worker() -> None:
    assert one_gpu_each(None, ["0", "1"]) == ["0", "1"]
    assert one_gpu_each(1, ["GPU-8f", "GPU-9a"]) == ["GPU-8f"]
    for workers in (0, 3):
        with pytest.raises(LaunchError, match=f"an integer from 1 to 2, got {workers}"):
            one_gpu_each(workers, ["0", "1"])
    with pytest.raises(LaunchError, match="needs GPUs, and this machine has none"):
        one_gpu_each(2, [])


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


def test_each_worker_sees_its_own_gpu() -> None:
    prints = ["--", "python", "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    command = [sys.executable, "-m", "tfdist_ext.cli", "run", "--process-per-device", *prints]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "5,7"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert sorted(done.stdout.splitlines()) == ["[worker:0] 5", "[worker:1] 7"]
