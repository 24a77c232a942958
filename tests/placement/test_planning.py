"""Plans for tasks and for devices, and arguments that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
from placement_models import bert_large

from tfdist_ext.placement import (
    Mirrored,
    PlacementError,
    PlacementPlan,
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
