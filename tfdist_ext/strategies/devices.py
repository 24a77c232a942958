"""Devices by name or by number, checked against those that TensorFlow sees."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.errors import StrategyError

__all__ = ["make_logical_cpus", "normal_name", "pick_devices", "seen_devices"]

_NAME = re.compile(r"^/?(?:.*/)?(?:device:)?(?P<type>[A-Za-z_]+):(?P<index>\d+)$")


def normal_name(name: str) -> str:
    """'/cpu:0', 'CPU:0' and '/device:CPU:0' are the same device: 'CPU:0'."""
    match = _NAME.match(name) if isinstance(name, str) else None
    if match is None:
        raise StrategyError(f"devices: {name!r} is no device name; write one like 'GPU:0'.")
    return f"{match['type'].upper()}:{int(match['index'])}"


def seen_devices() -> list[str]:
    """The logical devices of this process; starts TensorFlow."""
    return [normal_name(device.name) for device in tf.config.list_logical_devices()]


def make_logical_cpus(count: int) -> None:
    """Have `count` logical CPUs, which is possible until TensorFlow starts.

    Raises:
        StrategyError: TensorFlow has started with another number.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise StrategyError(f"logical_cpus is a number from 1 on; {count!r} arrived.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    configuration = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(cpu, configuration)
    except RuntimeError:
        there = len(tf.config.list_logical_devices("CPU"))
        if there != count:
            raise StrategyError(
                f"logical_cpus={count}: TensorFlow has started with {there} already, and the"
                " number is fixed then. Make the strategy before the first TensorFlow operation."
            ) from None


def pick_devices(
    strategy: str, devices: int | str | Sequence[str] | None, *, default: str = "all"
) -> list[str]:
    """Normal names of the devices that a strategy was asked to use.

    Args:
        strategy: its name, for messages.
        devices: names, a number of devices (GPUs where there are any, else logical CPUs), or
            None for the default.
        default: "all" GPUs, or CPUs where there are none; or "first" of them.

    Raises:
        StrategyError: a device that is not there, twice the same, or a senseless number.
    """
    seen = seen_devices()
    gpus = [name for name in seen if name.startswith("GPU:")]
    usable = gpus or [name for name in seen if name.startswith("CPU:")]
    if devices is None:
        return usable if default == "all" else usable[:1]
    if isinstance(devices, int) and not isinstance(devices, bool):
        if not 1 <= devices <= len(usable):
            raise StrategyError(
                f"{strategy}: devices={devices} was asked for; devices seen are"
                f" {', '.join(seen)}.{_more_cpus(devices) if not gpus and devices > 0 else ''}"
            )
        return usable[:devices]
    names = [devices] if isinstance(devices, str) else devices
    if not isinstance(names, Sequence) or not names:
        raise StrategyError(
            f"{strategy}: devices takes names or a number of devices; {devices!r} arrived."
        )
    picked = [normal_name(name) for name in names]
    for name in picked:
        if picked.count(name) > 1:
            raise StrategyError(f"{strategy}: the device {name} is named twice in {devices!r}.")
    missing = [name for name in picked if name not in seen]
    if missing:
        wanted = [int(name.split(":")[1]) + 1 for name in missing if name.startswith("CPU:")]
        raise StrategyError(
            f"{strategy}: there is no {' and no '.join(missing)}; devices seen are"
            f" {', '.join(seen)}.{_more_cpus(max(wanted)) if wanted else ''}"
        )
    return picked


def _more_cpus(count: int) -> str:
    return (
        f" For more CPUs pass logical_cpus={count} to create_strategy before the first TensorFlow"
        " operation."
    )
