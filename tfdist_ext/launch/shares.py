"""Shares of a machine for the workers on it: a GPU each, or so many cores."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist_ext.errors import LaunchError

__all__ = ["Share", "gpus_of", "shares_of"]

_ASKED = 60.0  # seconds that nvidia-smi may take; it is slow on machines with many GPUs


@dataclass(frozen=True)
class Share:
    """What one worker gets of a machine.

    Attributes:
        env: what is added to its environment.
        cores: numbers of the cores that it runs on; empty: all.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


def shares_of(workers: int | None, *, gpus: Sequence[str], cores: Sequence[int]) -> list[Share]:
    """A share for each worker: one GPU, or where there are none, equal parts of the cores.

    Args:
        workers: how many; None: one for each GPU.
        gpus: as CUDA_VISIBLE_DEVICES names them.
        cores: their numbers; empty where a process cannot be bound to some.

    Raises:
        LaunchError: more workers than GPUs or cores, or no number of workers without a GPU.
    """
    if gpus:
        workers = len(gpus) if workers is None else workers
        _check(workers, len(gpus), f"the GPUs ({', '.join(gpus)})")
        return [Share({"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:workers]]
    if workers is None:
        raise LaunchError(
            "--process-per-device must come with --workers on a machine without GPUs, got no"
            " number; add --workers 2 or more, and each gets its part of the cores"
        )
    if not cores:
        return [Share() for _ in range(workers)]
    _check(workers, len(cores), f"the {len(cores)} cores")
    bounds = [len(cores) * number // workers for number in range(workers + 1)]
    return [Share(cores=tuple(cores[begin:end])) for begin, end in itertools.pairwise(bounds)]


def _check(workers: int, most: int, what: str) -> None:
    if not 1 <= workers <= most:
        raise LaunchError(
            f"--workers must be from 1 to {most} with --process-per-device, one for each of {what},"
            f" got {workers}; change it, or leave out --process-per-device"
        )


def gpus_of(env: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        LaunchError: nvidia-smi is there, and fails.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",")]
        # CUDA sees those before the first that is no GPU.
        return named[: next((n for n, name in enumerate(named) if name in ("", "-1")), len(named))]
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    if program is None:
        return []
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKED, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"nvidia-smi must list the GPUs, got {error}; set CUDA_VISIBLE_DEVICES to those to use,"
            " or to -1 for none"
        ) from error
    return done.stdout.split()
