"""One function a strategy of one machine: checks what TensorFlow would not, then makes it.

The parameters of a function are the options of its strategy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies._tf_private import with_metrics_per_replica
from tfdist_ext.strategies.devices import make_logical_cpus, pick_devices
from tfdist_ext.strategies.placed import PlacedStrategy

__all__ = ["central_storage", "default", "mirrored", "one_device", "placed"]

Devices: TypeAlias = int | str | Sequence[str] | None


def default() -> tf.distribute.Strategy:
    """TensorFlow's default strategy, which can be had outside of any scope only."""
    if tf.distribute.has_strategy():
        scope = type(tf.distribute.get_strategy()).__name__
        raise StrategyError(
            "the default strategy must be asked for outside of any scope, got the scope of"
            f" {scope}: call create_strategy outside of it."
        )
    return tf.distribute.get_strategy()


def one_device(
    *, devices: Devices = None, logical_cpus: int | None = None
) -> tf.distribute.Strategy:
    """Everything on one device: the given one, else the first GPU, else the CPU."""
    make_logical_cpus(logical_cpus)
    picked = pick_devices("one_device", devices, default="first")
    if len(picked) > 1:
        raise StrategyError(f"devices of one_device must be one device, got {', '.join(picked)}.")
    return tf.distribute.OneDeviceStrategy(picked[0])


def mirrored(*, devices: Devices = None, logical_cpus: int | None = None) -> tf.distribute.Strategy:
    """A copy on each device: the given ones, else all GPUs, else all logical CPUs."""
    make_logical_cpus(logical_cpus)
    picked = pick_devices("mirrored", devices)
    on_cpus = all(name.startswith("CPU:") for name in picked)
    # The default collectives fail on CPUs inside a loop in the graph.
    reduction = tf.distribute.ReductionToOneDevice() if on_cpus else None
    try:
        return tf.distribute.MirroredStrategy(picked, cross_device_ops=reduction)
    except json.JSONDecodeError as error:
        raise StrategyError(
            f"TF_CONFIG must be JSON where it is set, as MirroredStrategy reads it, got: {error}."
            " Correct it or unset it; mirrored needs none."
        ) from error


def central_storage(
    *,
    devices: Devices = None,
    parameter_device: str = "CPU:0",
    logical_cpus: int | None = None,
) -> tf.distribute.Strategy:
    """Variables on `parameter_device`, computing on `devices`.

    Variables with `synchronization=ON_READ`, as those of Keras metrics, have a copy on each of
    `devices`.
    """
    if not isinstance(parameter_device, str):
        raise StrategyError(
            "parameter_device of central_storage must be one name like 'CPU:0', got"
            f" {parameter_device!r}."
        )
    make_logical_cpus(logical_cpus)
    computing = pick_devices("central_storage", devices)
    keeping = pick_devices("central_storage", parameter_device, option="parameter_device")
    strategy = tf.distribute.experimental.CentralStorageStrategy(computing, keeping[0])
    return with_metrics_per_replica(strategy)


def placed(
    *,
    devices: Devices = None,
    placement: Any = None,
    rules: Any = None,
    owned_from: int | str = "16KiB",
    logical_cpus: int | None = None,
) -> tf.distribute.Strategy:
    """Each variable where its rule says: `placement`, or `rules`, which is the same."""
    if placement is not None and rules is not None:
        raise StrategyError(
            "placed must get placement or rules, which are the same, got both; give one of them."
        )
    given = placement if rules is None else rules
    make_logical_cpus(logical_cpus)
    return PlacedStrategy(devices, () if given is None else given, owned_from=owned_from)
