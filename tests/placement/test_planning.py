"""Plans for tasks and devices: the planner keeps its promises on any variables, and what is wrong.

The promises: each row once, budgets, rules, and balance.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from placement_models import MODELS, bert_large

from tfdist_ext.placement import (
    Mirrored,
    OnTask,
    PlacementError,
    PlacementPlan,
    Rule,
    Sharded,
    VariableSpec,
    compare,
    plan,
)
from tfdist_ext.placement.planning import plan_owners

SPECS = [
    VariableSpec("users", (1000, 16), slots=2, load=3.0),
    VariableSpec("items", (100, 16), slots=2),
    VariableSpec("head/kernel", (16, 4), slots=1),
    VariableSpec("steps", (), "int64", trainable=False),
]
QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)

_shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 5000), st.integers(1, 64)),
    st.tuples(st.just(1), st.just(1), st.integers(1, 64), st.integers(1, 64)),
)


@st.composite
def models(draw: st.DrawFn) -> list[VariableSpec]:
    """Scalars, vectors, tables and kernels, some with slots and loads."""
    shapes = draw(st.lists(_shapes, min_size=1, max_size=12))
    slots, load = st.integers(0, 2), st.none() | st.floats(0, 1000)
    return [
        VariableSpec(f"v{index}", shape, slots=draw(slots), load=draw(load))
        for index, shape in enumerate(shapes)
    ]


@st.composite
def ruled(draw: st.DrawFn, specs: list[VariableSpec], tasks: int) -> list[Rule]:
    rules = []
    for spec in specs:
        kind = draw(st.sampled_from(["", "", "task", "sharded"]))
        if kind == "task":
            rules.append(Rule(spec.path, OnTask(draw(st.integers(0, tasks - 1)))))
        elif kind == "sharded" and spec.shape and spec.rows:
            rules.append(Rule(spec.path, Sharded(draw(st.integers(1, min(spec.rows, 9))))))
    return rules


def check_rows_and_bytes(made: PlacementPlan) -> None:
    """Every row of every variable is exactly once; the sums are those of the shards."""
    held = [0] * made.tasks
    loaded = [0.0] * made.tasks
    for spec in made.specs:
        shards = made.shards_of(spec.path)
        assert [shard.start for shard in shards[1:]] == [shard.stop for shard in shards[:-1]]
        assert (shards[0].start, shards[-1].stop) == (0, spec.rows)
        rows = [shard.stop - shard.start for shard in shards]
        # What TensorFlow's lookups take for granted: equal up to one row, larger ones first.
        assert rows == sorted(rows, reverse=True)
        assert rows[0] - rows[-1] <= 1
        assert rows[-1] > 0 or spec.rows == 0
        for place, shard in enumerate(shards):
            held[shard.task] += rows[place] * spec.row_bytes
            if spec.load and spec.rows:
                loaded[shard.task] += spec.load * rows[place] / spec.rows
        if spec.load and not spec.rows:
            loaded[shards[0].task] += spec.load
    assert tuple(held) == made.bytes_by_task
    assert made.load_by_task == pytest.approx(loaded)
    assert sum(held) == sum(spec.bytes for spec in made.specs)


@QUICK
@given(st.data(), models(), st.integers(1, 9))
def test_a_plan_has_each_row_once_and_keeps_the_rules(
    data: st.DataObject, specs: list[VariableSpec], tasks: int
) -> None:
    rules = data.draw(ruled(specs, tasks))
    made = plan(specs, tasks, rules=rules)
    check_rows_and_bytes(made)
    for rule in rules:
        if isinstance(rule.placement, OnTask):
            assert made.tasks_of(rule.pattern) == (rule.placement.task,)
        elif isinstance(rule.placement, Sharded):
            assert len(made.shards_of(rule.pattern)) == rule.placement.pieces
            # Whoever asks for n pieces means n tasks, if there are as many.
            if rule.placement.pieces <= tasks:
                assert len(made.tasks_of(rule.pattern)) == rule.placement.pieces
    assert made == plan(specs, tasks, rules=rules)


@settings(QUICK, max_examples=12)
@given(st.data(), models(), st.integers(1, 6))
def test_the_smallest_budget_is_true(
    data: st.DataObject, specs: list[VariableSpec], tasks: int
) -> None:
    rules = data.draw(ruled(specs, tasks)) if data.draw(st.booleans()) else []
    smallest = max(plan(specs, tasks, rules=rules).bytes_by_task)
    assume(smallest > 0)
    plan(specs, tasks, rules=rules, budget=smallest)
    needed = max(-(-sum(spec.bytes for spec in specs) // max(smallest - 1, 1)), tasks + 1)
    with pytest.raises(PlacementError, match="do not fit") as error:
        plan(specs, tasks, rules=rules, budget=smallest - 1)
    assert f"smallest budget that fits is {smallest} bytes" in str(error.value)
    advice = f"use at least {needed} ps tasks"
    assert advice in str(error.value) or "Change the rule" in str(error.value)
    assert advice in str(error.value) or rules


@QUICK
@given(
    st.lists(st.integers(2000, 10**7), min_size=1, max_size=8),
    st.integers(2, 64),
    st.integers(0, 2**30),
)
def test_what_can_be_cut_is_balanced(rows: list[int], tasks: int, already: int) -> None:
    """Whatever a rule has put on one task before: hardly more than the mean."""
    specs = [VariableSpec(f"table{i}", (n, 16), slots=1) for i, n in enumerate(rows)]
    fixed = VariableSpec("fixed", (already,), "int8")
    made = plan([*specs, fixed], tasks, rules={"fixed": "task 1"})
    rows_of_128_bytes = 2 * 128
    even = 1.015 * sum(made.bytes_by_task) / tasks + rows_of_128_bytes
    assert max(made.bytes_by_task) <= max(even, already)


def test_no_more_is_cut_than_balance_needs() -> None:
    table = VariableSpec("table", (1_000_000, 64))
    small = [VariableSpec(f"w{i}", (64, 64)) for i in range(48)]
    assert plan([table], 4).shards_of("table") == (
        (0, 0, 250_000),
        (1, 250_000, 500_000),
        (2, 500_000, 750_000),
        (3, 750_000, 1_000_000),
    )
    # Nothing is cut that is not larger than a fair share.
    made = plan(small, 4)
    assert {len(made.shards_of(spec.path)) for spec in small} == {1}
    assert made.imbalance == 1
    # One half is on task 0 by a rule, so 5 GB there and 15 GB on the other: four pieces.
    whole, half = VariableSpec("b", (20_000_000, 250)), VariableSpec("a", (10_000_000, 250))
    made = plan([half, whole], 2, rules={"a": "task 0"})
    assert [shard.task for shard in made.shards_of("b")] == [0, 1, 1, 1]
    assert made.imbalance == 1


def test_loads_are_balanced_with_bytes() -> None:
    # By bytes alone all eight hot tables could share a task with nothing else.
    cold = [VariableSpec(f"cold{i}", (100_000, 8), load=1) for i in range(8)]
    hot = [VariableSpec(f"hot{i}", (1000, 8), load=100) for i in range(8)]
    made = plan(cold + hot, 4)
    assert made.load_by_task == (202, 202, 202, 202)
    assert made.imbalance <= 1.01
    # A hot table is cut although it is small.
    made = plan([*cold, VariableSpec("hot", (1000, 8), load=800)], 4)
    assert len(made.tasks_of("hot")) == 4
    assert made.load_by_task == pytest.approx((202, 202, 202, 202))


# Where a kernel of one row, as (1, 1, 1024, 2048), is more than a task's share. Its bytes with
# slots over the mean of 64 tasks are what no placement can beat.
CANNOT_BE_EVEN = {("ResNet-50", 64), ("MobileNetV2", 64), ("EfficientNetB0", 64)}


@pytest.mark.parametrize("tasks", [3, 64])
@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_balanced_to_a_hundredth(name: str, tasks: int) -> None:
    specs = MODELS[name]()
    made = plan(specs, tasks)
    if (name, tasks) in CANNOT_BE_EVEN:
        row = max(spec.row_bytes for spec in specs)
        assert max(made.bytes_by_task) == row
    else:
        assert made.imbalance <= 1.01


def test_variables_and_slots_on_the_devices_of_one_machine() -> None:
    made = plan(
        SPECS,
        devices=["CPU:0", "/device:gpu:0", "GPU:1"],
        rules={"users": "device cpu:0", "items": "owned"},
        default=lambda _: Mirrored(),
    )
    assert made.names() == ("CPU:0", "GPU:0", "GPU:1")
    assert made.tasks_of("users") == (0,)
    assert made.tasks_of("items") == made.tasks_of("head/kernel") == (0, 1, 2)
    assert made.shards_of("steps") == ((0, 0, 1), (1, 0, 1), (2, 0, 1))
    # The slots of an owned variable are on one device: not on the one that has the table.
    owner = made.owner_of("items")
    assert owner in (1, 2)
    assert made.owner_of("users") is None
    everywhere = 6400 + 16 * 4 * 4 * 2 + 8
    expected = [everywhere + 1000 * 16 * 4 * 3, everywhere, everywhere]
    expected[owner] += 2 * 6400
    assert made.bytes_by_task == tuple(expected)
    # A copy serves its own replica; a single one serves all.
    assert made.load_by_task == (3, 0, 0)
    # Without a rule, nothing is cut on one machine.
    made = plan([VariableSpec("w0", (100, 10), slots=2)], devices=["GPU:0", "GPU:1"])
    assert (made.tasks_of("w0"), made.imbalance) == ((0,), 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tasks": 0}, "number of parameter servers must be an integer from 1"),
        ({}, "a plan needs either a number of parameter servers .* or devices="),
        ({"tasks": 2, "devices": ["CPU:0"]}, "got tasks=2, devices="),
        ({"devices": ["cpu:0", "/device:CPU:0"]}, "a list of different names"),
        ({"tasks": 2, "budget": "much"}, "budget must be a size, got 'much'"),
    ],
)
def test_wrong_arguments_of_a_plan_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(PlacementError, match=named):
        plan(SPECS, **arguments)


def test_a_rule_that_breaks_the_budget_is_named() -> None:
    specs = [VariableSpec("table", (1000, 4), "float32"), VariableSpec("dense", (10,), "float32")]

    def refused(tasks: int, budget: str, rules: Any = ()) -> str:
        with pytest.raises(PlacementError) as error:
            plan(specs, tasks, rules=rules, budget=budget)
        return str(error.value)

    forced = "Change the rule 'tab.*' (task 2), which puts 15.62 KiB of table on ps 2."
    assert forced in refused(4, "10KiB", {"tab.*": "task 2"})
    assert "use at least 8 ps tasks" in refused(4, "2KiB", {"tab.*": "sharded(4)"})
    assert "use at least 5 ps tasks" in refused(4, "3.92KiB")  # 4 in sum, but one has a row more
    with pytest.raises(PlacementError, match="Or use more workers, or an optimizer with fewer"):
        plan_owners(specs, 2, budget="2KiB")


def test_two_variables_of_one_path_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"two variables have the path 'steps'\. Rules and"):
        plan([*SPECS, SPECS[-1]], 2)
    with pytest.raises(PlacementError, match="VariableSpec objects, got 'steps'"):
        plan(["steps"], 2)  # type: ignore[list-item]


def cells(table: str) -> list[str]:
    return [" ".join(line.split()) for line in table.splitlines()]


def test_compare_shows_the_memory_of_each_strategy() -> None:
    """335,141,888 parameters of 4 bytes are 1.25 GiB, Adam's slots twice that."""
    table = compare(bert_large(), devices=8, ps=4)
    assert cells(table)[1:] == [
        "mirrored each device 1.25 GiB 2.50 GiB 3.75 GiB",
        "central_storage host 1.25 GiB 2.50 GiB 3.75 GiB",
        # Of 2557 MiB slots an eighth is 319.6: ten kernels of 16 MiB with two slots are 320.
        "placed fullest device 1.25 GiB 320.00 MiB 1.56 GiB",
        # Of 3835 MiB a quarter is 958.8: twenty such kernels with their slots are 960.
        "parameter_server fullest ps 320.00 MiB 640.00 MiB 960.00 MiB",
    ]
    assert len({line.rindex(" ") for line in table.splitlines()[1:]}) == 1  # units in one column


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_compare_refuses_numbers_below_1(numbers: tuple[int, int]) -> None:
    with pytest.raises(PlacementError, match=r"must be an integer (of at least|from) 1"):
        compare([VariableSpec("a", (1,))], *numbers)


def test_workers_own_rows_of_a_variable() -> None:
    """Each worker has all weights, and about as many slots as the others."""
    specs = [
        VariableSpec("table", (1000, 8), slots=2),
        VariableSpec("whole", (300, 8), slots=2),
        VariableSpec("bias", (7,), slots=2),
        VariableSpec("scale", (), slots=2),
        VariableSpec("count", (), "int64", trainable=False),
    ]
    made = plan_owners(specs, 3, is_cut=lambda spec: spec.path != "whole", budget="80KiB")
    weights = sum(spec.weight_bytes for spec in specs)
    slots = sum(spec.bytes for spec in specs) - weights
    assert sum(made.bytes_by_task) == 3 * weights + slots
    assert max(made.bytes_by_task) <= weights + slots / 3 * 1.05
    assert sum(rows.stop - rows.start for rows in made.owned_shards_of("table")) == 1000
    assert len(made.owned_shards_of("whole")) == 1
    assert made.owned_shards_of("count") == ()
    assert "31.25 KiB on every worker, slots on worker 0" in str(made)
    without_slots = plan_owners([VariableSpec("table", (1000, 8))], 1, is_cut=lambda spec: True)
    assert "31.25 KiB on every worker, updated on worker 0" in str(without_slots)
    assert PlacementPlan.from_json(made.to_json()) == made
    with pytest.raises(PlacementError, match="worker 0 would hold"):
        plan_owners(specs, 3, budget="1KiB")
