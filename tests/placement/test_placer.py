"""Placer: the task of each variable when it is created, with or without a plan of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tfdist_ext.placement import (
    Balanced,
    OnTask,
    PlacementError,
    Rule,
    Sharded,
    VariableSpec,
    plan,
)
from tfdist_ext.placement.placer import Placer

SPECS = [
    VariableSpec("users", (1000, 16)),  # 64,000 bytes
    VariableSpec("items", (100, 16)),  # 6,400
    VariableSpec("head/kernel", (16, 4)),  # 256
    VariableSpec("head/bias", (4,)),  # 16
]


def tasks_of(placer: Placer, specs: Sequence[VariableSpec] = SPECS) -> list[tuple[int, ...]]:
    return [tuple(shard.task for shard in placer.place(spec)) for spec in specs]


@pytest.mark.parametrize("placement", [None, "balanced"])
def test_without_rules_each_goes_where_the_fewest_bytes_are(placement: Any) -> None:
    placer = Placer(placement, 2)
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


def test_a_default_for_variables_without_a_rule() -> None:
    placer = Placer({"items": "task 1"}, 2, lambda spec: Sharded(2))
    assert tasks_of(placer) == [(0, 1), (1,), (0, 0), (0, 0)]
    assert len(placer.learn(SPECS).shards_of("head/kernel")) == 2


def test_rules_one_by_one() -> None:
    rules = [Rule("users", Sharded(3)), Rule("head/.*", OnTask(1)), Rule("head/bias", Balanced())]
    placer = Placer(rules, 2)
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
    assert tasks_of(Placer(Rule("users", OnTask(1)), 2)) == [(1,), (0,), (0,), (0,)]


def test_a_learned_model() -> None:
    placer = Placer({"head/bias": "task 1"}, 2)
    made = placer.learn(SPECS)
    assert placer.plan is made
    assert made == plan(SPECS, 2, rules={"head/bias": "task 1"})
    # One by one, the largest would go to a task alone; as a whole it is cut. The order of creation
    # is not that of the plan.
    assert tasks_of(placer, SPECS[::-1])[-1] == (0, 1)
    assert placer.bytes_by_task == list(made.bytes_by_task)
    # A rule for no variable of the model is a mistake, which only the whole model shows.
    with pytest.raises(PlacementError, match=r"'haed/bias' .* matches no variable.* 'head/bias'"):
        Placer({"haed/bias": "task 1"}, 2).learn(SPECS)


def test_variables_that_the_plan_does_not_have() -> None:
    """After a model was learned, others may come: they are placed one by one."""
    placer = Placer({"users": "task 0"}, 2)
    placer.learn(SPECS)
    other = VariableSpec("other", (10,))
    assert placer.knows(other)  # no plan was given that should have it
    assert tasks_of(placer) == [(0,), (1,), (1,), (1,)]
    assert tasks_of(placer, [other]) == [(1,)]
    # The same path in another shape is another variable, by the same rule.
    assert tasks_of(placer, [VariableSpec("users", (7, 7))]) == [(0,)]


def test_of_an_optimizers_counter_only_the_last_part_of_the_path_is_known() -> None:
    counter = VariableSpec("adam/iteration", (), "int64", trainable=False)
    made = plan([*SPECS, counter], 2, rules={"adam/.*": "task 0", "users": "task 0"})
    placer = Placer(made, 2)
    bare = VariableSpec("iteration", (), "int64")
    assert placer.knows(bare)
    assert placer.place(bare) == ((0, 0, 1),)
    # Of another dtype, or of two of them, it is not known which.
    assert not placer.knows(VariableSpec("iteration", (), "float32"))
    second = VariableSpec("sgd/iteration", (), "int64")
    assert not Placer(plan([counter, second], 2), 2).knows(bare)


def test_a_plan(tmp_path: Path) -> None:
    made = plan(SPECS, 2, rules={"items": "task 1"})
    file = tmp_path / "plan.json"
    file.write_text(made.to_json(), encoding="utf-8")
    for placement in (made, str(file)):
        placer = Placer(placement, 2)
        assert placer.plans_models
        assert placer.plan == placer.learn(SPECS) == made
        assert [placer.place(spec) for spec in SPECS] == [made.shards_of(s.path) for s in SPECS]
        assert placer.bytes_by_task == list(made.bytes_by_task)
        assert placer.knows(SPECS[0])
        assert not placer.knows(VariableSpec("users", (1001, 16)))
        with pytest.raises(PlacementError, match=r"must be those of the plan, got 1 gone: 'users'"):
            placer.learn(SPECS[1:])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlacementError, match="cannot be read"):
        Placer(str(file), 2)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (7, r'placement must be a PlacementPlan .* or "balanced", got 7'),
        (plan(SPECS, 3), r"for the cluster's 2 ps tasks, got one for 3\. Plan again"),
        ("no/such/plan.json", "the plan 'no/such/plan.json' cannot be read: .*No such file"),
    ],
)
def test_a_placement_that_is_wrong(placement: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placer(placement, 2)
