"""The plan itself: what it knows, its table, and another model or cluster."""

from __future__ import annotations

import pytest
from placement_models import resnet50

from tfdist_ext.placement import Owned, PlacementError, VariableSpec, plan

SPECS = [
    VariableSpec("users", (1000, 16), slots=2, load=3.0),
    VariableSpec("items", (100, 16), slots=2),
    VariableSpec("head/kernel", (16, 4), slots=1),
    VariableSpec("steps", (), "int64", trainable=False),
]


def test_the_table() -> None:
    specs = [
        *resnet50(),
        VariableSpec("a", (10_000_000, 250)),
        VariableSpec("b", (20_000_000, 250)),
    ]
    text = str(plan(specs, 3, rules={"a": "task 0", "conv1_.*": "sharded(1)"}, budget="20GB"))
    for line in (
        "322 variables, 28.23 GiB with optimizer slots, on 3 ps tasks",
        "ps 0  9.41 GiB    1.000",
        "imbalance 1.000 (fullest over mean bytes)",
        "budget 18.63 GiB each",
        "b                           (20000000, 250)     18.63 GiB  2 pieces: ps 1, ps 2",
        "a                           (10000000, 250)      9.31 GiB  ps 0",
    ):
        assert line in text
    small = [VariableSpec("t", (8,)), VariableSpec("w", (4,))]
    lines = str(plan(small, 2, rules={"t": "sharded(2)", "w": "task 1"})).splitlines()
    assert lines[2].split() == ["bytes", "of", "mean", "variables", "shards"]
    assert lines[3].split() == ["ps", "0", "16", "B", "0.667", "1", "1"]
    assert lines[4].split() == ["ps", "1", "32", "B", "1.333", "2", "1"]
    loads = str(plan(SPECS, 2))
    assert "load" in loads.splitlines()[2]
    assert "imbalance of load 1.000" in loads
    devices = str(plan(SPECS, devices=["CPU:0", "GPU:0"], default=lambda _: Owned()))
    assert "on every device, owner CPU:0" in devices


def test_a_plan_for_another_model_names_the_differences() -> None:
    made = plan(SPECS, 2)
    made.check(reversed(SPECS))
    made.check([VariableSpec("users", (1000, 16), slots=1), *SPECS[1:]])  # another optimizer
    changed = [
        VariableSpec("users", (1001, 16)),
        VariableSpec("items", (100, 16), "float16"),
        VariableSpec("tail/kernel", (4, 4)),
        SPECS[-1],
    ]
    with pytest.raises(PlacementError) as error:
        made.check(changed)
    for part in (
        "1 new: 'tail/kernel'",
        "1 gone: 'head/kernel'",
        "2 changed: 'users' from float32[1000, 16] to float32[1001, 16]",
        "'items' from float32[100, 16] to float16[100, 16]",
    ):
        assert part in str(error.value)
    with pytest.raises(PlacementError, match=r"50 new: 'n0', 'n1', 'n2', 'n3', 'n4', \.\.\."):
        made.check([*SPECS, *(VariableSpec(f"n{i}", ()) for i in range(50))])


def test_a_plan_for_another_number_of_tasks() -> None:
    made = plan(SPECS, 2)
    made.check_tasks(2)
    with pytest.raises(
        PlacementError, match=r"plan must be for the cluster's 3 .*got one for 2\. Plan again"
    ):
        made.check_tasks(3)
    with pytest.raises(
        PlacementError, match=r"for the cluster's 1 ps tasks, got one for the devices CPU:0"
    ):
        plan(SPECS, devices=["CPU:0"]).check_tasks(1)
    with pytest.raises(PlacementError, match=r"no variable 'user'.* 'users'"):
        made.tasks_of("user")
