"""The plan itself: its table, another model, and a plan as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_models import criteo_tables, resnet50
from test_planning import SPECS, models, ruled

from tfdist_ext.placement import Owned, PlacementError, PlacementPlan, VariableSpec, plan

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def test_the_table_shows_variables_tasks_and_the_budget() -> None:
    specs = [
        *resnet50(),
        VariableSpec("a", (10_000_000, 250)),
        VariableSpec("b", (20_000_000, 250)),
    ]
    text = str(plan(specs, 3, rules={"a": "task 0", "conv1_.*": "sharded(1)"}, budget="20GB"))
    for line in (
        "322 variables, 28.23 GiB with optimizer slots, on 3 ps tasks",
        "ps 0  9.41 GiB  11.57 GiB    1.000",
        "imbalance 1.000 (fullest over mean bytes)",
        "budget 18.63 GiB each",
        "b                           (20000000, 250)     18.63 GiB  2 pieces: ps 1, ps 2",
        "a                           (10000000, 250)      9.31 GiB  ps 0",
    ):
        assert line in text
    loads = str(plan(SPECS, 2))
    assert "load" in loads.splitlines()[2]
    assert "imbalance of load 1.000" in loads
    devices = str(plan(SPECS, devices=["CPU:0", "GPU:0"], default=lambda _: Owned()))
    assert "on every device, slots on CPU:0" in devices


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


def test_an_unknown_path_is_refused_with_a_known_one() -> None:
    with pytest.raises(PlacementError, match=r"no variable 'user'.* 'users'"):
        plan(SPECS, 2).tasks_of("user")


@QUICK
@given(st.data(), models(), st.integers(1, 9))
def test_a_plan_is_read_back_from_its_json(
    data: st.DataObject, specs: list[VariableSpec], tasks: int
) -> None:
    rules = data.draw(ruled(specs, tasks))
    budget = sum(spec.bytes for spec in specs) if data.draw(st.booleans()) else None
    made = plan(specs, tasks, rules=rules, budget=budget)
    again = PlacementPlan.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    # Another editor's spaces and line ends are no change.
    assert PlacementPlan.from_json(json.dumps(json.loads(made.to_json()))) == made


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "Plan again with this package"),
        ({"tasks": 1}, "was changed and cannot be read"),
        ({"variables": [{"on": [0]}]}, "was changed and cannot be read"),
        ({"variables": [{"path": "a", "shape": [4], "held": "pieces", "on": [-1]}]}, "no task -1"),
    ],
)
def test_changed_json_is_refused(change: dict[str, Any], named: str) -> None:
    content = json.loads(plan(SPECS, 2).to_json())
    with pytest.raises(PlacementError, match=named):
        PlacementPlan.from_json(json.dumps(content | change))


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, 3])
def test_other_texts_than_plans_are_refused(text: Any) -> None:
    with pytest.raises(PlacementError, match="the placement plan") as error:
        PlacementPlan.from_json(text)
    assert len(str(error.value)) < 500


def test_the_picture_shows_tasks_and_large_variables(tmp_path: Path) -> None:
    specs = [*criteo_tables(), VariableSpec("odd$x_{/$<k>&", (2_000_000, 16), slots=2)]
    made = plan(specs, 2, rules={"table_2/embeddings": "sharded(2)"})
    made.save_picture(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert "table_2/embeddings  1.81 GiB" in text
    assert "odd$x_{/$&lt;k&gt;&amp;" in text
    for word in (">ps 0<", ">ps 1<", "GiB of variables and slots"):
        assert word in text
    plan(specs, 64).save_picture(tmp_path / "plan.PNG")
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")
    plan(specs[:3], devices=["CPU:0", "GPU:0"], default=lambda _: Owned()).save_picture(
        tmp_path / "d.svg"
    )
    assert ">GPU:0<" in (tmp_path / "d.svg").read_text(encoding="utf-8")
    with pytest.raises(PlacementError, match=r"a \.svg or a \.png file, got .*plan.pdf"):
        made.save_picture(tmp_path / "plan.pdf")
    with pytest.raises(PlacementError, match="cannot be written"):
        made.save_picture(tmp_path / "no" / "plan.svg")


def test_a_picture_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlacementError, match=r"Install matplotlib\.\nHelp: "):
        plan([VariableSpec("a", (4, 4))], 2).save_picture(tmp_path / "plan.svg")
    assert not (tmp_path / "plan.svg").exists()
