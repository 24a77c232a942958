"""The strategies of one machine, and its devices by name or by number.

The parameters of a function that makes a strategy are the options of the strategy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import check_int
from tfdist_ext.placement.rules import short_name
from tfdist_ext.strategies._tf_private import with_metrics_per_replica

Devices: TypeAlias = int | str | Sequence[str] | None


def default() -> tf.distribute.Strategy:
    """TensorFlow's default strategy, which cannot be created inside a scope."""
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        raise StrategyError(
            "the default strategy cannot be created inside a scope. Call create_strategy outside"
            f" the scope of {type(strategy).__name__}."
        )
    return strategy


def one_device(*, devices: Devices = None) -> tf.distribute.Strategy:
    """Everything on one device: the given one, else the first GPU, else the CPU."""
    picked = pick_devices("one_device", devices)
    if devices is not None and len(picked) > 1:
        raise StrategyError(f"one_device takes one device, not {', '.join(picked)}.")
    return tf.distribute.OneDeviceStrategy(picked[0])


def mirrored(
    *, devices: Devices = None, cross_device_ops: tf.distribute.CrossDeviceOps | None = None
) -> tf.distribute.Strategy:
    """A copy on each device: the given ones, else all GPUs, else all logical CPUs."""
    picked = pick_devices("mirrored", devices)
    if not isinstance(cross_device_ops, tf.distribute.CrossDeviceOps | None):
        raise StrategyError(
            f"cross_device_ops={cross_device_ops!r} is not a tf.distribute.CrossDeviceOps. Use an"
            " object such as tf.distribute.HierarchicalCopyAllReduce()."
        )
    if cross_device_ops is None and all(name.startswith("CPU:") for name in picked):
        # The default collectives fail on CPUs inside a loop in the graph.
        cross_device_ops = tf.distribute.ReductionToOneDevice()
    try:
        return tf.distribute.MirroredStrategy(picked, cross_device_ops=cross_device_ops)
    except json.JSONDecodeError as error:
        raise StrategyError(f"TF_CONFIG is not JSON: {error}. Correct or unset it.") from error


def central_storage(
    *, devices: Devices = None, parameter_device: str = "CPU:0"
) -> tf.distribute.Strategy:
    """Variables on `parameter_device`, computing on `devices`.

    Variables with `synchronization=ON_READ`, as those of Keras metrics, have a copy on each of
    `devices`.
    """
    computing = pick_devices("central_storage", devices)
    (keeping,) = pick_devices("central_storage", [parameter_device])
    strategy = tf.distribute.experimental.CentralStorageStrategy(computing, keeping)
    return with_metrics_per_replica(strategy)


def seen_devices() -> list[str]:
    """The logical devices of this process, not those of its peers; starts TensorFlow."""
    return list(_short_names().values())


def _short_names() -> dict[str, str]:
    """TensorFlow's name -> short name, of the devices of this process.

    In a process of a cluster, TensorFlow's names contain the job and the task.
    """
    names = [device.name for device in tf.config.list_logical_devices()]
    specs = {name: tf.DeviceSpec.from_string(name) for name in names}
    if len({(spec.job, spec.task) for spec in specs.values()}) > 1:
        # Connected to a cluster: its devices are listed too. An operation tells who we are.
        with tf.device("CPU:0"):
            here = tf.DeviceSpec.from_string(tf.constant(0).device)
        own = (here.job, here.task)
        specs = {name: spec for name, spec in specs.items() if (spec.job, spec.task) == own}
    return {name: f"{spec.device_type}:{spec.device_index}" for name, spec in specs.items()}


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
                f"logical_cpus={count} is not possible: TensorFlow has already started with"
                f" {there}. Create the strategy, or call tfdist_ext.testing.logical_cpus, before"
                " the first TensorFlow operation."
            ) from None


def pick_devices(strategy: str, devices: int | str | Sequence[str] | None) -> list[str]:
    """The short names of the devices that a strategy was asked to use.

    Args:
        strategy: its name, for messages.
        devices: names, a number of devices (GPUs if there are any, else logical CPUs), or None
            for all GPUs, or for all logical CPUs if there are no GPUs.

    Raises:
        StrategyError: a device does not exist or is named twice.
    """
    short_names = _short_names()
    seen = list(short_names.values())
    kind = "GPU" if any(name.startswith("GPU:") for name in seen) else "CPU"
    if devices is None:
        return [name for name in seen if name.startswith(f"{kind}:")]
    names: Any = devices
    if isinstance(devices, str):
        names = [devices]
    elif isinstance(devices, Integral) and not isinstance(devices, bool):
        count = check_int(devices, f"devices of {strategy}", 1, 10_000, error=StrategyError)
        names = [f"{kind}:{index}" for index in range(count)]
    is_list = isinstance(names, list | tuple) and bool(names)
    if not (is_list and all(isinstance(name, str) for name in names)):
        raise StrategyError(
            f"devices of {strategy} must be names or a number of devices, got {devices!r}."
        )
    picked = [short_names.get(name) or short_name(name) for name in names]
    if twice := next((name for name in picked if picked.count(name) > 1), None):
        raise StrategyError(f"devices of {strategy} name {twice} twice: {devices!r}.")
    if missing := [name for name in picked if name not in seen]:
        message = (
            f"devices of {strategy} do not exist: {' and '.join(missing)}. Devices seen are"
            f" {', '.join(seen)}."
        )
        numbers = [name[4:] for name in missing if name.startswith("CPU:")]
        if cpus := [int(number) + 1 for number in numbers if number.isdecimal()]:
            message += (
                f" For more CPUs pass logical_cpus={max(cpus)} to create_strategy before the first"
                f" TensorFlow operation, or call tfdist_ext.testing.logical_cpus({max(cpus)})."
            )
        raise StrategyError(message)
    return picked
