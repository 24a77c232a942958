"""Placers: where each variable goes when it is created, with or without a plan of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tfdist_ext.placement import (
    Balanced,
    Mirrored,
    OnDevice,
    OnTask,
    Owned,
    PlacementError,
    Rule,
    Sharded,
    VariableSpec,
    plan,
)
from tfdist_ext.placement.placer import DevicePlacer, ServerPlacer, plan_in_order

SPECS = [
    VariableSpec("users", (1000, 16)),  # 64,000 bytes
    VariableSpec("items", (100, 16)),  # 6,400
    VariableSpec("head/kernel", (16, 4)),  # 256
    VariableSpec("head/bias", (4,)),  # 16
]


def tasks_of(placer: ServerPlacer, specs: Sequence[VariableSpec] = SPECS) -> list[tuple[int, ...]]:
    return [tuple(shard.task for shard in placer.place(spec)) for spec in specs]


@pytest.mark.parametrize("placement", [None, "balanced"])
def test_without_rules_the_task_with_the_fewest_bytes_gets_the_next(placement: Any) -> None:
    placer = ServerPlacer(placement, 2)
    assert placer.plans_models == (placement is not None)
    assert tasks_of(placer) == [(0,), (1,), (1,), (1,)]
    assert placer.bytes_by_task == [64_000, 6_672]
    assert placer.fewest_bytes == 1
    # What others put there counts; what is on no parameter server does not.
    placer.add(1, 60_000)
    placer.add(-1, 10**9)
    placer.add(2, 10**9)
    assert placer.bytes_by_task == [64_000, 66_672]
    assert tasks_of(placer, [VariableSpec("late", (4,))]) == [(0,)]


def test_rules_decide_where_variables_go_one_by_one() -> None:
    rules = [Rule("users", Sharded(3)), Rule("head/.*", OnTask(1)), Rule("head/bias", Balanced())]
    placer = ServerPlacer(rules, 2)
    # 1000 rows in three are 334, 333, 333: 21,376 and 21,312 bytes.
    assert [tuple(shard) for shard in placer.place(SPECS[0])] == [
        (0, 0, 334),
        (1, 334, 667),
        (1, 667, 1000),
    ]
    assert placer.bytes_by_task == [21_376, 42_624]
    # The rule for the path itself goes before the expression.
    assert tasks_of(placer, SPECS[1:]) == [(0,), (1,), (0,)]
    assert placer.bytes_by_task == [21_376 + 6_400 + 16, 42_624 + 256]


def test_large_variables_are_cut_without_a_placement() -> None:
    row = 2**20
    large = VariableSpec("users", (64, row // 4), slots=2)  # exactly 64 MiB without slots
    specs = [
        VariableSpec("bias", (4,)),
        large,
        VariableSpec("items", (63, row // 4)),
        VariableSpec("flat", (1, 64 * row)),  # one row cannot be cut
        VariableSpec("two_rows", (2, 32 * row)),  # never more pieces than rows
    ]
    placer = ServerPlacer(None, 3)
    assert tasks_of(placer, specs) == [(0,), (0, 1, 2), (1,), (2,), (0, 1)]
    assert [shard.stop - shard.start for shard in large.shards((0, 1, 2))] == [22, 21, 21]
    planned = plan_in_order(specs, 3)
    assert [planned.tasks_of(one.path) for one in specs] == tasks_of(ServerPlacer(None, 3), specs)
    # Slots are beside their variable, and count in the plan.
    assert planned.bytes_by_task[0] == 16 + 3 * 22 * row + 128 * row
    assert tasks_of(ServerPlacer(None, 1), specs) == [(0,)] * 5
    with pytest.raises(PlacementError, match=r"use at least 6 ps tasks"):
        plan_in_order(specs, 3, budget="150MiB")
    # A rule decides about its variables, and the others are as without a placement.
    assert tasks_of(ServerPlacer({"users": "task 1"}, 3), specs)[1] == (1,)
    assert "from 64.00 MiB on it is cut into a piece for each ps" in str(placer)
    assert "cut" not in str(ServerPlacer(None, 1))


def test_a_plan_decides_and_refuses_another_model(tmp_path: Path) -> None:
    made = plan(SPECS, 2, rules={"items": "task 1"})
    file = tmp_path / "plan.json"
    file.write_text(made.to_json(), encoding="utf-8")
    for placement in (made, str(file)):
        placer = ServerPlacer(placement, 2)
        assert placer.plans_models
        placer.learn(SPECS)
        assert placer.plan == made
        assert [placer.place(spec) for spec in SPECS] == [made.shards_of(s.path) for s in SPECS]
        assert placer.bytes_by_task == list(made.bytes_by_task)
        assert placer.knows(SPECS[0])
        assert not placer.knows(VariableSpec("users", (1001, 16)))
        with pytest.raises(PlacementError, match="the variables of the model: 1 gone: 'users'"):
            placer.learn(SPECS[1:])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlacementError, match="cannot be read"):
        ServerPlacer(str(file), 2)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (7, r'placement must be a PlacementPlan .* or "balanced", got 7'),
        (plan(SPECS, 3), "the plan is for 3 ps tasks, but the cluster has 2 ps tasks. Plan again"),
        (plan(SPECS, devices=["CPU:0"]), "the plan is for 1 device, but the cluster has 2 ps"),
        ("no/such/plan.json", "the plan 'no/such/plan.json' cannot be read: .*No such file"),
    ],
)
def test_a_wrong_placement_is_refused(placement: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        ServerPlacer(placement, 2)


FOUR = ("GPU:0", "GPU:1", "GPU:2", "GPU:3")
KIB = 1024


def spec(path: str, kib: int, slots: int = 0, trainable: bool = True) -> VariableSpec:
    return VariableSpec(path, (kib, 256), slots=slots, trainable=trainable)


@pytest.mark.parametrize(
    ("rules", "variable", "expected", "reason"),
    [
        ({}, spec("kernel", 16), Owned(), "as large as owned_from"),
        ({}, spec("kernel", 15), Mirrored(), "smaller"),
        ({}, spec("frozen", 99, trainable=False), Mirrored(), "there is nothing to update"),
        ({"bias": "owned"}, spec("bias", 1), Owned(), "its rule says so"),
        ({"bias": "owned"}, spec("other/bias", 1), Mirrored(), "whole paths are matched"),
        ({".*": "balanced"}, spec("kernel", 99), Owned(), "balanced is as no rule"),
        ({".*": "device gpu:1"}, spec("kernel", 1), OnDevice("GPU:1"), "one of the replicas'"),
        ({".*": "device /cpu:0"}, spec("kernel", 1), OnDevice("CPU:0"), "the host"),
    ],
)
def test_the_placement_of_a_variable(
    rules: Any, variable: VariableSpec, expected: Any, reason: str
) -> None:
    placer = DevicePlacer(FOUR, rules, owned_from="16KiB")
    assert placer.placement_of(variable) == expected, reason


def test_pieces_go_where_that_balances() -> None:
    specs = [spec("a", 8), spec("b", 8), spec("c", 4)]
    rules = {"a": "sharded(2)", "b": Sharded(2), "c": "sharded"}
    placer = DevicePlacer(FOUR, rules)
    a, b, c = ((one, placer.placement_of(one)) for one in specs)
    assert placer.devices_of_pieces(*a) == placer.devices_of_pieces(*b) == FOUR[:2], "unknown yet"
    placer.learn(specs)
    assert {*placer.devices_of_pieces(*a), *placer.devices_of_pieces(*b)} == {*FOUR}
    assert placer.devices_of_pieces(*c) == FOUR
    assert placer.plan.bytes_by_task == (5 * KIB,) * 4
    assert placer.devices_of_pieces(spec("a", 7), a[1]) == FOUR[:2], "another than the planned one"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            {"a.*": "device GPU:4"},
            "'a.*' cannot be on device GPU:4, which does not exist. Use one of",
        ),
        ([Rule("a", OnTask(0))], "'a' cannot be on task 0, which is for parameter servers"),
        ([Rule("a", Sharded(5))], "'a' cannot be sharded(5) on 4 devices"),
        ("owned", "rules must be a list of Rule"),
    ],
)
def test_rules_that_do_not_fit_the_devices_are_refused(rules: Any, said: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(said)):
        DevicePlacer(FOUR, rules)
