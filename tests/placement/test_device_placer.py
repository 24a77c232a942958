"""DevicePlacer: which placement a variable of one machine gets, and who owns what is owned."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist_ext.placement import (
    Mirrored,
    OnDevice,
    OnTask,
    Owned,
    PlacementError,
    Rule,
    Sharded,
    VariableSpec,
)
from tfdist_ext.placement.device_placer import DevicePlacer

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


def test_what_comes_one_by_one_goes_to_whom_owns_least() -> None:
    placer = DevicePlacer(FOUR)
    sizes = [8, 4, 2, 1, 1, 2, 6]
    owners = [placer.choose_owner(spec(str(n), kib)) for n, kib in enumerate(sizes)]
    assert owners == [0, 1, 2, 3, 3, 2, 3]
    assert placer.owned_bytes == [8 * KIB, 4 * KIB, 4 * KIB, 8 * KIB]


def test_a_known_model_is_planned_as_a_whole() -> None:
    """In the order of creation the large ones at the end would meet."""
    sizes = [1, 1, 1, 1, 2, 2, 4, 4]
    specs = [spec(str(n), kib, slots=2) for n, kib in enumerate(sizes)]
    placer = DevicePlacer(FOUR)
    plan = placer.learn(specs)
    assert placer.plan is plan
    assert len(set(plan.bytes_by_task)) == 1
    owned = [0] * 4
    for variable in specs:
        owned[placer.choose_owner(variable)] += variable.weight_bytes
    assert owned == placer.owned_bytes == [4 * KIB] * 4
    # Another variable than the planned one of that path.
    assert placer.choose_owner(spec("0", 7)) == 0


def test_pieces_go_where_that_balances() -> None:
    specs = [spec("a", 8), spec("b", 8), spec("c", 4)]
    rules = {"a": "sharded(2)", "b": Sharded(2), "c": "sharded"}
    placer = DevicePlacer(FOUR, rules)
    a, b, c = ((each, placer.placement_of(each)) for each in specs)
    assert placer.devices_of_pieces(*a) == placer.devices_of_pieces(*b) == FOUR[:2], "unknown yet"
    assert placer.rule_of(a[0]) == "the rule 'a' (sharded(2))"
    plan = placer.learn(specs)
    assert {*placer.devices_of_pieces(*a), *placer.devices_of_pieces(*b)} == {*FOUR}
    assert placer.devices_of_pieces(*c) == FOUR
    assert plan.bytes_by_task == (5 * KIB,) * 4
    assert placer.devices_of_pieces(spec("a", 7), a[1]) == FOUR[:2], "another than the planned one"


def test_too_few_rows() -> None:
    placer = DevicePlacer(FOUR, {"v": "sharded(4)"})
    for variable in (VariableSpec("v", (3, 2)), VariableSpec("v", ())):
        for call in (placer.placement_of, lambda spec: placer.learn([spec])):
            with pytest.raises(PlacementError, match=r"only 3 rows|got the scalar 'v'"):
                call(variable)


def test_the_host_is_no_owner() -> None:
    placer = DevicePlacer(FOUR[:2], {"table": "device CPU:0", "other": "device GPU:0"})
    specs = [spec("table", 99, 2), spec("other", 8, 2), spec("a", 4, 2), spec("b", 4, 2)]
    plan = placer.learn(specs)
    assert [each.path for each in plan.specs] == ["other", "a", "b"]
    # GPU:0 holds the other table and its slots already.
    assert (plan.owner_of("a"), plan.owner_of("b"), plan.owner_of("other")) == (1, 1, None)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            {"a.*": "device GPU:4"},
            [r"the rule 'a.*' (device GPU:4)", "got GPU:4", "GPU:3, or CPU:0"],
        ),
        ([Rule("a", OnTask(0))], ["'a' on devices must be mirrored", "got task 0, which is for"]),
        (
            [Rule("a", Sharded(5))],
            ["the rule 'a' (sharded(5))", "at most 4 pieces, got 5:"],
        ),
        ("owned", ["rules must be a list", "got 'owned'"]),
    ],
)
def test_rules_that_cannot_be(rules: Any, said: list[str]) -> None:
    with pytest.raises(PlacementError) as error:
        DevicePlacer(FOUR, rules)
    for words in said:
        assert words in str(error.value)


def test_rules_that_do_not_fit_the_model() -> None:
    with pytest.raises(PlacementError, match=r"the rule 'tabel' \(owned\) matches no variable"):
        DevicePlacer(FOUR, {"tabel": "owned"}).learn([spec("table", 4)])
    placer = DevicePlacer(FOUR, {"t.*": "owned", ".*e": "mirrored"})
    with pytest.raises(PlacementError, match="at most one rule must match 'table'"):
        placer.placement_of(spec("table", 4))
    with pytest.raises(PlacementError, match="owned_from must be a size"):
        DevicePlacer(FOUR, owned_from="large")
