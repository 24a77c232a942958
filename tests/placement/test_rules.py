"""Rules as people write them, and the variables that they match."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from tfdist_ext.placement import (
    OnTask,
    PlacementError,
    PlacementPlan,
    Rule,
    Sharded,
    VariableSpec,
    plan,
)
from tfdist_ext.placement.rules import placement_from, rules_from

SPECS = [
    VariableSpec("embedding/users", (1000, 8)),
    VariableSpec("embedding/items", (500, 8)),
    VariableSpec("head/kernel", (16, 2)),
    VariableSpec("head/bias", (2,)),
    VariableSpec("scale", ()),
]


@pytest.mark.parametrize(
    "text",
    [
        *("mirrored", "owned", "balanced", "sharded", "sharded(12)", "task 0", "device GPU:1"),
        "device /job:ps/task:1/device:CPU:0",
    ],
)
def test_a_placement_is_written_as_it_is_read(text: str) -> None:
    assert str(placement_from(f"  {text.replace('sharded', 'Sharded')} ")) == text
    assert placement_from(placement_from(text)) == placement_from(text)


@pytest.mark.parametrize("text", ["", "sharded(-1)", "sharded(0)", "task one", "gpu 0", 4])
def test_other_texts_than_placements_are_refused(text: Any) -> None:
    with pytest.raises(PlacementError, match=r"(device GPU:0|an integer of at least 1), got"):
        placement_from(text)


def test_rules_of_a_toml_table_decide() -> None:
    table = tomllib.loads(
        """
        "embedding/.*" = "sharded(2)"
        "embedding/items" = "task 1"     # the path itself goes before every expression
        "head/.*" = "balanced"
        """
    )
    assert rules_from(table)[0] == Rule("embedding/.*", Sharded(2))
    made = plan(SPECS, 2, rules=table)
    assert made.tasks_of("embedding/users") == (0, 1)
    assert made.tasks_of("embedding/items") == (1,)


@pytest.mark.parametrize("where", [{"tasks": 3}, {"devices": ["CPU:0", "CPU:1", "CPU:2"]}])
def test_a_piece_on_each_task_or_device(where: Any) -> None:
    rules = {"table": "sharded", "rows": Sharded(), "scale": Sharded()}
    specs = [VariableSpec("table", (7, 2)), VariableSpec("rows", (2,)), VariableSpec("scale", ())]
    made = plan(specs, rules=rules, **where)
    assert [shard.stop - shard.start for shard in made.shards_of("table")] == [3, 2, 2]
    assert made.tasks_of("table") == (0, 1, 2)
    assert len(made.tasks_of("rows")) == 2, "no more pieces than rows"
    assert len(made.tasks_of("scale")) == 1
    assert PlacementPlan.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"embedding/[": "task 0"}, "'embedding/[' is not a regular expression"),
        ({"embeding/users": "task 0"}, "'embeding/users' (task 0) matches no .* 'embedding/users'"),
        (
            {"embedding/.*": "task 0", ".*/users": "sharded(2)"},
            "match 'embedding/users': 'embedding/.*' (task 0) and '.*/users' (sharded(2)).",
        ),
        ([Rule("scale", OnTask(0)), Rule("scale", OnTask(1))], "two rules have the pattern"),
        ({"head/bias": "task 2"}, "'head/bias' cannot be on task 2: the cluster has 2 ps tasks"),
        (
            {"head/bias": "sharded(3)"},
            "'head/bias' of shape (2,) cannot be sharded(3): it has only 2 rows",
        ),
        ({"scale": "sharded(2)"}, "'scale' of shape () cannot be sharded(2): .* it is a scalar"),
        ({"scale": "mirrored"}, "'scale' cannot be mirrored on parameter servers"),
        ({"": "task 0"}, "pattern must be a string"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(rules: Any, named: str) -> None:
    # In the texts above only ".*" between spaces is an expression.
    pattern = " .* ".join(map(re.escape, named.split(" .* ")))
    with pytest.raises(PlacementError, match=pattern):
        plan(SPECS, 2, rules=rules)
