"""Devices by name or by number, checked against those that TensorFlow sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import check_int

__all__ = ["make_logical_cpus", "normal_name", "pick_devices", "requested_count", "seen_devices"]

_NAME = re.compile(
    r"^/?(?:job:localhost/)?(?:replica:0/)?(?:task:0/)?(?:device:)?"
    r"(?P<type>[A-Za-z_]+):(?P<index>\d+)$"
)


def normal_name(name: object) -> str:
    """'/cpu:0', 'CPU:0' and '/device:CPU:0' are the same device: 'CPU:0'."""
    if isinstance(name, tf.config.LogicalDevice):
        name = name.name
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


def make_logical_cpus(count: int | None) -> None:
    """Make `count` logical CPUs, which is possible until TensorFlow starts.

    Args:
        count: None: change nothing.

    Raises:
        StrategyError: TensorFlow has started with another number.
    """
    if count is None:
        return
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


def requested_count(devices: object) -> int | None:
    """The number of devices that `devices=` asks for; None if it is not given."""
    if devices is None:
        return None
    if isinstance(devices, Integral):
        return int(devices)
    return len(devices) if isinstance(devices, list | tuple) else 1


def pick_devices(
    strategy: str,
    devices: int | str | Sequence[str] | None,
    *,
    option: str = "devices",
    default: str = "all",
) -> list[str]:
    """The normal names of the devices that a strategy was asked to use.

    Args:
        strategy: its name, for messages.
        devices: names, a number of devices (GPUs if there are any, else logical CPUs), or None
            for the default.
        option: the name of the option that `devices` was given as, for messages.
        default: "all" GPUs, or CPUs if there are no GPUs; or the "first" of these.

    Raises:
        StrategyError: a device does not exist or is named twice, or there are too few devices.
    """
    seen = seen_devices()
    gpus = [name for name in seen if name.startswith("GPU:")]
    usable = gpus or [name for name in seen if name.startswith("CPU:")]
    if devices is None:
        return usable if default == "all" else usable[:1]
    if isinstance(devices, Integral) and not isinstance(devices, bool):
        count = check_int(devices, f"{option} of {strategy}", 1, error=StrategyError)
        if count > len(usable):
            raise StrategyError(
                f"{option} of {strategy} must be at most the devices seen, got {count}; seen are"
                f" {', '.join(seen)}.{'' if gpus else _more_cpus(count)}"
            )
        return usable[:count]
    names = [devices] if isinstance(devices, str | tf.config.LogicalDevice) else devices
    if not isinstance(names, list | tuple) or not names:
        raise StrategyError(
            f"{option} of {strategy} must be names or a number of devices, got {devices!r}."
        )
    picked = [normal_name(name) for name in names]
    if twice := next((name for name in picked if picked.count(name) > 1), None):
        raise StrategyError(
            f"{option} of {strategy} must name each device once, got {twice} twice in {devices!r}."
        )
    if missing := [name for name in picked if name not in seen]:
        wanted = [int(name.split(":")[1]) + 1 for name in missing if name.startswith("CPU:")]
        raise StrategyError(
            f"{option} of {strategy} must be devices that are there, got {' and '.join(missing)};"
            f" devices seen are {', '.join(seen)}.{_more_cpus(max(wanted)) if wanted else ''}"
        )
    return picked


def _more_cpus(count: int) -> str:
    return (
        f" For more CPUs pass logical_cpus={count} to create_strategy before the first TensorFlow"
        f" operation; in a test, call tfdist_ext.testing.logical_cpus({count}) first."
    )
