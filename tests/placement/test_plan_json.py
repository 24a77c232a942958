"""A plan as JSON: equal when it is read back, and an error when it was changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import models, ruled

from tfdist_ext.placement import Owned, PlacementError, PlacementPlan, VariableSpec, plan

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)
SPECS = [
    VariableSpec("users", (1000, 16), slots=2, load=3.0),
    VariableSpec("items", (100, 16), slots=2),
    VariableSpec("head/kernel", (16, 4), slots=1),
    VariableSpec("steps", (), "int64", trainable=False),
]


@QUICK
@given(st.data(), models(), st.integers(1, 9))
def test_json_round_trip(data: st.DataObject, specs: list[VariableSpec], tasks: int) -> None:
    rules = data.draw(ruled(specs, tasks))
    budget = sum(spec.bytes for spec in specs) if data.draw(st.booleans()) else None
    made = plan(specs, tasks, rules=rules, budget=budget)
    again = PlacementPlan.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    # Another editor's spaces and line ends are no change.
    assert PlacementPlan.from_json(json.dumps(json.loads(made.to_json()))) == made


def test_json_of_devices_is_one_line_for_each_variable() -> None:
    made = plan(
        SPECS,
        devices=["CPU:0", "GPU:0"],
        rules={"users": "device CPU:0"},
        default=lambda _: Owned(),
    )
    text = made.to_json()
    assert PlacementPlan.from_json(text) == made
    assert sum('{"path"' in line for line in text.splitlines()) == len(SPECS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "Plan again with this package"),
        ({"tasks": 3}, "was changed after it was written"),
    ],
)
def test_json_that_was_changed(change: dict[str, Any], named: str) -> None:
    content = json.loads(plan(SPECS, 2).to_json())
    with pytest.raises(PlacementError, match=named):
        PlacementPlan.from_json(json.dumps(content | change))
    content["variables"][0]["on"] = [1]
    with pytest.raises(PlacementError, match="was changed after it was written"):
        PlacementPlan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, 3])
def test_text_that_is_no_plan(text: Any) -> None:
    with pytest.raises(PlacementError, match="the placement plan") as error:
        PlacementPlan.from_json(text)
    assert len(str(error.value)) < 500
