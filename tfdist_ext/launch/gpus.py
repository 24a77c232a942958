"""The GPUs of this machine, one for each worker."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from tfdist_ext.errors import LaunchError
from tfdist_ext.messages import check_int

__all__ = ["gpus_of", "one_gpu_each"]


def one_gpu_each(workers: int | None, gpus: list[str]) -> list[str]:
    """The GPU of each worker.

    Args:
        workers: how many; None: one for each GPU.

    Raises:
        LaunchError: more workers than GPUs, or no GPU.
    """
    if not gpus:
        raise LaunchError(
            "--process-per-device needs GPUs, and this machine has none; write --workers N, and"
            " the workers divide the cores among them"
        )
    count = len(gpus) if workers is None else workers
    check_int(count, "--workers with --process-per-device", 1, len(gpus), error=LaunchError)
    return gpus[:count]


def gpus_of(env: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        LaunchError: nvidia-smi is there, and fails.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",")]
        # CUDA uses the GPUs before the first name that is not a GPU.
        return named[: next((n for n, name in enumerate(named) if name in ("", "-1")), len(named))]
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    if program is None:
        return []
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    try:  # it is slow on machines with many GPUs
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"nvidia-smi must list the GPUs, got {error}; set CUDA_VISIBLE_DEVICES to those to use,"
            " or to -1 for none"
        ) from error
    return done.stdout.split()
