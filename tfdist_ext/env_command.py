"""tfdist env: what this machine has, to paste into a bug report."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from tfdist_ext.launch.exit_codes import COMMAND

__all__ = ["EPILOG", "SUMMARY", "USAGE", "add_options", "relevant_variables", "run"]

SUMMARY = "what this machine has, to paste into a bug report"
USAGE = "env"
EPILOG = ""

_PACKAGES = ("tfdist_ext", "tensorflow", "keras", "numpy", "h5py", "protobuf", "grpcio")
# Other programs have variables of these prefixes, too, as Terraform has TF_CLI_CONFIG_FILE.
_RELEVANT = re.compile(
    r"TF_(CONFIG|CPP_(MIN_LOG|MAX_VLOG)_LEVEL|CPP_VMODULE|NUM_INT(RA|ER)OP_THREADS|XLA_FLAGS"
    r"|ENABLE_ONEDNN_OPTS|USE_LEGACY_KERAS|FORCE_(GPU_ALLOW_GROWTH|UNIFIED_MEMORY)"
    r"|GPU_(ALLOCATOR|THREAD_MODE|THREAD_COUNT)|DETERMINISTIC_OPS|CUDNN_(DETERMINISTIC|USE_AUTOTUNE)"
    r"|PSS?_\w+|COORDINATOR_\w+|GRPC_\w+|PLUGGABLE_DEVICE_LIBRARY_PATH)"
    r"|KERAS_(BACKEND|HOME|MAX_EPOCHS|MAX_STEPS_PER_EPOCH|DISTRIBUTION_\w+)"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING|HOME|PATH)"
    r"|XLA_FLAGS|OMP_(NUM_THREADS|PROC_BIND|PLACES)"
    r"|GRPC_(VERBOSITY|TRACE|POLL_STRATEGY|DNS_RESOLVER|ENABLE_FORK_SUPPORT|FAIL_FAST)"
    r"|TPU_(NAME|PROJECT|ZONE|WORKER_ID|WORKER_HOSTNAMES|ACCELERATOR_TYPE)"
    r"|SLURM_(JOB|STEP|PROC|NTASKS|NODE|GPU|LOCALID|GTIDS|DIST)\w*|OMPI_COMM_WORLD_\w+"
    r"|SM_(HOSTS|CURRENT_HOST|NUM_GPUS|RESOURCE_CONFIG)|TFDIST_\w+|NCCL_\w+"
    r"|JOB_COMPLETION_INDEX|KUBERNETES_SERVICE_HOST|LD_LIBRARY_PATH"
)
# A name, or whatever is in a value: what may hold a secret is hidden whole.
_SECRET = re.compile(
    r"token|secret|pass|pwd|credential|key|auth|sig(nature)?\b|@|\?", re.IGNORECASE
)


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def run(_options: argparse.Namespace, _: list[str]) -> int:
    """Print versions, devices, memory, variables, and what `auto` would choose."""
    env = dict(os.environ)  # TensorFlow adds to it
    for title, lines in _sections(env):
        print(title)
        for line in lines:
            print(f"  {line}")
    return 0


def _sections(env: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    yield (
        "versions",
        [
            f"python {platform.python_version()}, {platform.platform()}",
            *(f"{name} {version}" for name in _PACKAGES if (version := _version(name))),
        ],
    )
    yield "machine", [f"{os.cpu_count()} CPUs, {_memory()}", *_disk()]
    import tensorflow as tf

    from tfdist_ext.strategies.factory import automatic_choice

    yield (
        "devices",
        [
            f"{device.name.removeprefix('/physical_device:')}"
            f" {tf.config.experimental.get_device_details(device).get('device_name', '')}".rstrip()
            for device in tf.config.list_physical_devices()
        ],
    )
    yield "variables", relevant_variables(env) or ["none"]
    yield 'create_strategy("auto")', automatic_choice(env)


def relevant_variables(env: Mapping[str, str]) -> list[str]:
    """NAME=value of what TensorFlow, Keras, this package and launchers read; without secrets."""
    found = {name: value for name, value in sorted(env.items()) if _RELEVANT.fullmatch(name)}
    lines = []
    for name, value in found.items():
        if name == COMMAND or _SECRET.search(name) or _SECRET.search(value):
            value = "(hidden)"
        lines.append(f"{name}={value}")
    return lines


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "memory unknown"
    with contextlib.suppress(OSError, ValueError):  # in a container there may be less
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return f"{size / 2**30:.1f} GiB of memory"


def _disk() -> list[str]:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return []
    return [f"{shutil.disk_usage(shared).free / 2**30:.1f} GiB free in /dev/shm (NCCL uses it)"]
