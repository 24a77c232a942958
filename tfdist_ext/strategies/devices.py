"""Devices by name or by number, checked against those that TensorFlow sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import check_int

__all__ = ["make_logical_cpus", "normal_name", "pick_devices", "seen_devices"]

_NAME = re.compile(
    r"^/?(?:job:localhost/)?(?:replica:0/)?(?:task:0/)?(?:device:)?"
    r"(?P<type>[A-Za-z_]+):(?P<index>\d+)$"
)


def normal_name(name: object) -> str:
    """'/cpu:0', 'CPU:0' and '/device:CPU:0' are the same device: 'CPU:0'."""
    match = _NAME.match(name) if isinstance(name, str) else None
    if match is None:
        raise StrategyError(
            f"devices must be names like 'GPU:0' of devices of this process, got {name!r}."
        )
    return f"{match['type'].upper()}:{int(match['index'])}"


def seen_devices() -> list[str]:
    """The logical devices of this process, not those of its peers; starts TensorFlow."""
    specs = [tf.DeviceSpec.from_string(each.name) for each in tf.config.list_logical_devices()]
    if len({(spec.job, spec.task) for spec in specs}) > 1:
        # Connected to a cluster: its devices are listed too. An operation tells who we are.
        with tf.device("CPU:0"):
            here = tf.DeviceSpec.from_string(tf.constant(0).device)
        specs = [spec for spec in specs if (spec.job, spec.task) == (here.job, here.task)]
    return [f"{spec.device_type}:{spec.device_index}" for spec in specs]


def make_logical_cpus(count: int) -> None:
    """Make logical CPUs, which is possible until TensorFlow starts.

    Raises:
        StrategyError: TensorFlow has started with another number.
    """
    count = check_int(count, "logical_cpus", 1, error=StrategyError)
    cpu = tf.config.list_physical_devices("CPU")[0]
    configuration = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(cpu, configuration)
    except RuntimeError:
        there = sum(name.startswith("CPU:") for name in seen_devices())
        if there != count:
            raise StrategyError(
                f"logical_cpus must be set before TensorFlow starts, got {count} where TensorFlow"
                f" has started with {there}: make the strategy, or call"
                " tfdist_ext.testing.logical_cpus, before the first TensorFlow operation."
            ) from None


def pick_devices(strategy: str, devices: int | str | Sequence[str] | None) -> list[str]:
    """The normal names of the devices that a strategy was asked to use.

    Args:
        strategy: its name, for messages.
        devices: names, a number of devices (GPUs if there are any, else logical CPUs), or None
            for all GPUs, or for all logical CPUs if there are no GPUs.

    Raises:
        StrategyError: a device does not exist or is named twice.
    """
    seen = seen_devices()
    kind = "GPU" if any(name.startswith("GPU:") for name in seen) else "CPU"
    if devices is None:
        return [name for name in seen if name.startswith(f"{kind}:")]
    names: object = devices
    if isinstance(devices, str):
        names = [devices]
    elif isinstance(devices, Integral) and not isinstance(devices, bool):
        count = check_int(devices, f"devices of {strategy}", 1, 10_000, error=StrategyError)
        names = [f"{kind}:{index}" for index in range(count)]
    if not isinstance(names, list | tuple) or not names:
        raise StrategyError(
            f"devices of {strategy} must be names or a number of devices, got {devices!r}."
        )
    picked = [normal_name(name) for name in names]
    if twice := next((name for name in picked if picked.count(name) > 1), None):
        raise StrategyError(
            f"devices of {strategy} must name each device once, got {twice} twice in {devices!r}."
        )
    if missing := [name for name in picked if name not in seen]:
        cpus = [int(name.removeprefix("CPU:")) for name in missing if name.startswith("CPU:")]
        count = max(cpus, default=0) + 1
        more = (
            f" For more CPUs pass logical_cpus={count} to create_strategy before the first"
            f" TensorFlow operation; in a test, call tfdist_ext.testing.logical_cpus({count})"
            " first."
        )
        raise StrategyError(
            f"devices of {strategy} must be devices that are there, got {' and '.join(missing)};"
            f" devices seen are {', '.join(seen)}.{more if cpus else ''}"
        )
    return picked
