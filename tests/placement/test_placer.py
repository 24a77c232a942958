"""Placer: the task of each variable when it is created, with or without a plan of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import models

from tfdist_ext.placement import (
    Balanced,
    Mirrored,
    OnTask,
    PlacementError,
    Rule,
    Sharded,
    Tasks,
    VariableSpec,
    greedy,
    plan,
    round_robin,
)
from tfdist_ext.placement.placer import Placer

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)
SPECS = [
    VariableSpec("users", (1000, 16)),  # 64,000 bytes
    VariableSpec("items", (100, 16)),  # 6,400
    VariableSpec("head/kernel", (16, 4)),  # 256
    VariableSpec("head/bias", (4,)),  # 16
]


def tasks_of(placer: Placer, specs: Sequence[VariableSpec] = SPECS) -> list[tuple[int, ...]]:
    return [tuple(shard.task for shard in placer.place(spec)) for spec in specs]


def test_without_a_placement_each_goes_where_the_fewest_bytes_are() -> None:
    placer = Placer(None, 2)
    assert not placer.plans_models
    assert tasks_of(placer) == [(0,), (1,), (1,), (1,)]
    assert placer.bytes_by_task == [64_000, 6_672]
    assert placer.fewest_bytes == 1
    # What others put there counts; what is on no parameter server does not.
    placer.add(1, 60_000)
    placer.add(-1, 10**9)
    placer.add(2, 10**9)
    assert placer.bytes_by_task == [64_000, 66_672]
    assert tasks_of(placer, [VariableSpec("late", (4,))]) == [(0,)]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("round_robin", [(0,), (1,), (0,), (1,)]),
        (round_robin, [(0,), (1,), (0,), (1,)]),
        ("greedy", [(0,), (1,), (1,), (1,)]),
        (greedy, [(0,), (1,), (1,), (1,)]),
        # The planner sees whole models. One by one, the fewest bytes are what is left to it.
        ("balanced", [(0,), (1,), (1,), (1,)]),
    ],
)
def test_a_policy_or_its_name(placement: Any, expected: list[tuple[int, ...]]) -> None:
    placer = Placer(placement, 2)
    assert placer.plans_models
    assert tasks_of(placer) == expected


def test_a_policy_of_ones_own_is_told_what_came_before() -> None:
    told: list[tuple[list[str], Tasks]] = []

    def last(specs: Sequence[VariableSpec], tasks: Tasks) -> list[list[int]]:
        told.append(([spec.path for spec in specs], tasks))
        return [[task % 3 for task in range(tasks.pieces.get(spec.path, 1))] for spec in specs]

    rules = [Rule("items", OnTask(2)), Rule("head/kernel", Sharded(4))]
    placer = Placer(rules, 3, last)
    assert tasks_of(placer) == [(0,), (2,), (0, 1, 2, 0), (0,)]
    # Of what rules put on a task it knows the bytes alone.
    assert [paths for paths, _ in told] == [
        ["users"],
        ["users", "head/kernel"],
        ["users", "head/kernel", "head/bias"],
    ]
    assert [tasks.filled for _, tasks in told] == [(0, 0, 0), (0, 0, 6400), (0, 0, 6400)]
    assert told[-1][1].pieces == {"head/kernel": 4}
    assert told[-1][1].count == 3
    assert placer.bytes_by_task == [64_000 + 128 + 16, 64, 64 + 6400]


def test_what_a_policy_may_not_answer() -> None:
    def nowhere(specs: Sequence[VariableSpec], tasks: Tasks) -> list[list[int]]:
        return [[7]] * len(specs)

    placer = Placer(nowhere, 2)
    with pytest.raises(
        PlacementError, match=r"nowhere must name tasks from 0 to .*got 7 for 'users'"
    ):
        placer.place(SPECS[0])
    assert placer.bytes_by_task == [0, 0]


@pytest.mark.parametrize(
    "placement",
    [
        {"users": "sharded(3)", "head/.*": "task 1", "head/bias": Balanced()},
        [Rule("users", Sharded(3)), Rule("head/.*", OnTask(1)), Rule("head/bias", Balanced())],
        iter(
            [Rule("users", Sharded(3)), Rule("head/.*", OnTask(1)), Rule("head/bias", Balanced())]
        ),
    ],
)
def test_rules_one_by_one(placement: Any) -> None:
    placer = Placer(placement, 2)
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


def test_one_rule_alone() -> None:
    assert tasks_of(Placer(Rule("users", OnTask(1)), 2)) == [(1,), (0,), (0,), (0,)]


def test_rules_that_cannot_be_right_for_a_variable() -> None:
    placer = Placer({"head/.*": "sharded(5)"}, 2)
    with pytest.raises(PlacementError, match=r"'head/bias' must .* sharded\(5\), got .* 4 rows"):
        placer.place(SPECS[3])
    placer = Placer({"head/.*": "task 0", ".*/bias": "task 1"}, 2)
    placer.place(SPECS[2])
    with pytest.raises(
        PlacementError, match=r"rule must match 'head/bias', got 'head/\.\*' .*bias"
    ):
        placer.place(SPECS[3])


def test_a_learned_model_is_planned_as_a_whole() -> None:
    placer = Placer({"head/bias": "task 1"}, 2)
    made = placer.learn(SPECS)
    assert placer.plan is made
    assert made == plan(SPECS, 2, rules={"head/bias": "task 1"})
    # One by one, the largest would go to a task alone; as a whole it is cut.
    assert tasks_of(placer)[0] == (0, 1)
    assert placer.bytes_by_task == list(made.bytes_by_task)
    # The order of creation is not that of the plan.
    placer = Placer({"head/bias": "task 1"}, 2)
    placer.learn(SPECS)
    tasks_of(placer, SPECS[::-1])
    assert placer.bytes_by_task == list(made.bytes_by_task)
    # A rule for no variable of the model is a mistake, which only the whole model shows.
    with pytest.raises(PlacementError, match=r"'haed/bias' .* matches no variable.* 'head/bias'"):
        Placer({"haed/bias": "task 1"}, 2).learn(SPECS)


@QUICK
@given(models(loads=False), st.integers(1, 5))
def test_a_learned_model_is_where_its_plan_says(specs: list[VariableSpec], tasks: int) -> None:
    placer = Placer({}, tasks)
    made = placer.learn(specs)
    for spec in specs:
        assert placer.place(spec) == made.shards_of(spec.path)
    assert tuple(placer.bytes_by_task) == made.bytes_by_task


@pytest.mark.parametrize("policy", [None, "round_robin", greedy])
def test_a_learned_model_is_placed_by_the_policy(policy: Any) -> None:
    """Rules and a policy, or the policy alone; none is the planner."""
    expected = plan(SPECS, 2, policy=policy)
    assert Placer({}, 2, policy).learn(SPECS) == expected
    if policy is not None:
        assert Placer(policy, 2).learn(SPECS) == expected


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
        assert placer.plan == made
        assert placer.learn(SPECS) == made
        assert [placer.place(spec) for spec in SPECS] == [made.shards_of(s.path) for s in SPECS]
        assert placer.bytes_by_task == list(made.bytes_by_task)
        assert placer.knows(SPECS[0])
        assert not placer.knows(VariableSpec("users", (1001, 16)))
        with pytest.raises(PlacementError, match=r"must be those of the plan, got 1 gone: 'users'"):
            placer.learn(SPECS[1:])


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (7, "placement must be a PlacementPlan, rules, .* or a policy, got 7"),
        ("gready", 'policy must be .* got .gready.* "greedy"'),
        (plan(SPECS, 3), "must be for the cluster's 2 ps tasks, got one for 3. Plan again"),
        (plan(SPECS, devices=["CPU:0"]), "must be for 2 ps tasks, got one for the devices CPU:0"),
        (["users"], r'rules must be Rule\("pattern", placement\), got .users'),
        ({"users": "everywhere"}, "the rule 'users': a placement must be .* got 'everywhere'"),
        ({"users/[": "task 0"}, r"the pattern of a rule must be .* got 'users/\["),
        ({"users": "task 2"}, "the task of 'users' must be from 0 to 1, got 2"),
        ({"users": Mirrored()}, "'users' on parameter servers must .* got mirrored"),
        ({"users": "device CPU:0"}, "'users' on parameter servers must .* got device CPU:0"),
        (
            [Rule("users", OnTask(0)), Rule("users", OnTask(1))],
            "got 'users' twice: task 0 and task 1",
        ),
        ("no/such/plan.json", "the plan 'no/such/plan.json' cannot be read: .*No such file"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_at_once(placement: Any, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        Placer(placement, 2)


def test_tasks_and_policies_that_cannot_be() -> None:
    with pytest.raises(PlacementError, match="number of parameter servers must be an integer"):
        Placer(None, 0)
    with pytest.raises(PlacementError, match=r"policy must be a known name or a function, got 3"):
        Placer({}, 2, 3)  # type: ignore[arg-type]


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan(SPECS, 2).to_json().replace('"tasks": [1]', '"tasks": [0]'), "utf-8")
    with pytest.raises(PlacementError, match="changed after it was written"):
        Placer(str(file), 2)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlacementError, match="cannot be read"):
        Placer(str(file), 2)
