"""Devices by name and by number; this process has four logical CPUs and no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfdist_ext import StrategyError
from tfdist_ext.strategies.one_machine import (
    make_logical_cpus,
    normal_name,
    pick_devices,
)

FOUR = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@pytest.mark.parametrize(
    "name", ["CPU:1", "/cpu:1", "device:Cpu:1", "/job:localhost/replica:0/task:0/device:CPU:1"]
)
def test_every_spelling_is_one_device(name: str) -> None:
    assert normal_name(name) == "CPU:1"


@pytest.mark.parametrize(
    "name",
    ["", "CPU", "CPU:-1", "CPU:0,CPU:1", 3]
    + ["/job:worker/replica:0/task:1/device:CPU:0"],  # of another process: never taken for ours
)
def test_other_names_are_no_device_of_this_process(name: Any) -> None:
    with pytest.raises(StrategyError, match="is not the name of a device of this process"):
        normal_name(name)


@pytest.mark.parametrize(
    ("devices", "picked"),
    [
        (None, FOUR),
        (1, ["CPU:0"]),
        (np.int64(3), FOUR[:3]),
        (["CPU:3", "/device:CPU:1"], ["CPU:3", "CPU:1"]),  # in the order that was given
    ],
)
def test_devices_are_picked_by_number_and_by_name(devices: Any, picked: list[str]) -> None:
    assert pick_devices("s", devices) == picked


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (5, "pass logical_cpus=5 to create_strategy before the first TensorFlow operation"),
        (0, "must be an integer from 1 to 10000, got 0"),
        ({"CPU:0"}, "must be names or a number of devices, got {'CPU:0'}"),
        (
            ["CPU:0", "/cpu:0"],
            "devices of mirrored name CPU:0 twice: ['CPU:0', '/cpu:0']",
        ),
        (["GPU:0", "GPU:1"], "do not exist: GPU:0 and GPU:1. Devices seen are CPU:0, CPU:1"),
        (["CPU:6"], "logical_cpus=7"),
    ],
)
def test_devices_that_cannot_be_picked_are_refused(devices: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        pick_devices("mirrored", devices)
    assert message in str(error.value)


@pytest.mark.parametrize("count", [0, True, 2.0])
def test_logical_cpus_that_is_no_number_is_refused(count: Any) -> None:
    with pytest.raises(StrategyError, match="logical_cpus must be an integer of at least 1"):
        make_logical_cpus(count)


def test_logical_cpus_cannot_change_after_tensorflows_start() -> None:
    make_logical_cpus(4)  # as many as there are: nothing to complain about
    with pytest.raises(
        StrategyError, match="logical_cpus=2 is not possible: TensorFlow has already started with 4"
    ):
        make_logical_cpus(2)
