"""tfdist env: what this machine has, to paste into a bug report."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from tfdist_ext.launcher.exit_codes import COMMAND

SUMMARY = "describe this machine, for a bug report"
USAGE = "env"
EPILOG = ""

_PACKAGES = ("tfdist_ext", "tensorflow", "keras", "numpy", "h5py", "protobuf", "grpcio")
# Variables of TensorFlow, Keras, this package and launchers. Terraform, too, uses the prefix TF_.
_RELEVANT = re.compile(
    r"(?!TF_(VAR|CLI|LOG|INPUT|DATA_DIR|REGISTRY|WORKSPACE|PLUGIN))"
    r"(TF|KERAS|CUDA|XLA|OMP|GRPC|TPU|NCCL|TFDIST|OMPI_COMM_WORLD)_\w+|SM_(HOSTS|CURRENT_HOST)"
    r"|SLURM_(JOB|STEP|PROC|NTASKS|NODE|GPU|LOCALID)\w*|LD_LIBRARY_PATH"
    r"|JOB_COMPLETION_INDEX|KUBERNETES_SERVICE_HOST"
)
# Values are hidden if the name or the value may hold a secret.
_SECRET = re.compile(
    r"token|secret|pass|pwd|credential|key|auth|sig(nature)?\b|@|\?", re.IGNORECASE
)


def add_options(_: argparse.ArgumentParser) -> None:
    """`tfdist env` has no options."""


def run(_options: argparse.Namespace, _: list[str]) -> int:
    """Print versions, devices, memory, variables, and what `auto` would choose."""
    env = dict(os.environ)  # TensorFlow adds to it
    python = f"python {platform.python_version()}, {platform.platform()}"
    versions = {package.name: package.version for package in metadata.distributions()}
    packages = (f"{name} {versions[name]}" for name in _PACKAGES if name in versions)
    _print("versions", [python, *packages])
    _print("machine", [f"{os.cpu_count()} CPUs, {_memory()}"])
    import tensorflow as tf

    from tfdist_ext.strategies.factory import automatic_choice

    details = tf.config.experimental.get_device_details
    devices = (
        f"{device.name.removeprefix('/physical_device:')} {details(device).get('device_name', '')}"
        for device in tf.config.list_physical_devices()
    )
    _print("devices", devices)
    _print("variables", relevant_variables(env) or ["none"])
    _print('create_strategy("auto")', automatic_choice(env))
    return 0


def _print(title: str, lines: Iterable[str]) -> None:
    print(title)
    for line in lines:
        print(f"  {line}".rstrip())


def relevant_variables(env: Mapping[str, str]) -> list[str]:
    """NAME=value for each variable that matters in a bug report, without secrets."""
    variables = {name: value for name, value in sorted(env.items()) if _RELEVANT.fullmatch(name)}
    lines = []
    for name, value in variables.items():
        if name == COMMAND or _SECRET.search(name) or _SECRET.search(value):
            value = "(hidden)"
        lines.append(f"{name}={value}")
    return lines


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "memory unknown"
    with contextlib.suppress(OSError, ValueError):  # a container may have less
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return f"{size / 2**30:.1f} GiB of memory"
