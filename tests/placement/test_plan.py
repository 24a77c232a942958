"""The plan itself: on devices, as a table, a picture and JSON, and for another model."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_models import criteo_tables, resnet50
from test_planner import models, ruled

from tfdist_ext.placement import (
    Balanced,
    Mirrored,
    Owned,
    PlacementError,
    PlacementPlan,
    VariableSpec,
    plan,
)

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)
SPECS = [
    VariableSpec("users", (1000, 16), slots=2, load=3.0),
    VariableSpec("items", (100, 16), slots=2),
    VariableSpec("head/kernel", (16, 4), slots=1, slot_bytes=40),
    VariableSpec("steps", (), "int64", trainable=False),
]


def test_the_devices_of_one_machine() -> None:
    made = plan(
        SPECS,
        devices=["CPU:0", "/device:gpu:0", "GPU:1"],
        rules={"users": "device cpu:0", "items": "owned"},
        default=Mirrored(),
    )
    assert made.names() == ("CPU:0", "GPU:0", "GPU:1")
    assert made.tasks_of("users") == (0,)
    assert made.tasks_of("items") == made.tasks_of("head/kernel") == (0, 1, 2)
    assert made.shards_of("steps") == ((0, 0, 1), (1, 0, 1), (2, 0, 1))
    # The slots of an owned variable are on one device: not on the one that has the table.
    owner = made.owner_of("items")
    assert owner in (1, 2)
    assert made.owner_of("users") is None
    everywhere = 6400 + (16 * 4 * 4 * 2 + 40) + 8
    expected = [everywhere + 1000 * 16 * 4 * 3, everywhere, everywhere]
    expected[owner] += 2 * 6400
    assert made.bytes_by_task == tuple(expected)
    # A copy serves its own replica; a single one serves all.
    assert made.load_by_task == (3, 0, 0)


def test_owners_are_balanced_and_nothing_is_cut_on_one_machine() -> None:
    specs = [VariableSpec(f"w{i}", (100, 10), slots=2) for i in range(8)]
    made = plan(specs, devices=["GPU:0", "GPU:1"], default=Owned())
    assert made.bytes_by_task == (8 * 4000 + 4 * 8000,) * 2
    made = plan(specs[:1], devices=["GPU:0", "GPU:1"])
    assert made.tasks_of("w0") == (0,)
    assert made.imbalance == 2
    # By size, as a function says; and a rule may ask for pieces.
    made = plan(
        [*specs, VariableSpec("big", (1000, 10))],
        devices=["GPU:0", "GPU:1"],
        rules={"big": "sharded(2)"},
        default=lambda spec: Mirrored() if spec.path == "w0" else Balanced(),
    )
    assert made.tasks_of("w0") == made.tasks_of("big") == (0, 1)
    assert len(made.tasks_of("w1")) == 1
    with pytest.raises(PlacementError, match=r"GPU:0 would hold .* For 2 devices") as error:
        plan(specs, devices=["GPU:0", "GPU:1"], default=Owned(), budget=60_000)
    assert error.value.smallest_budget == 8 * 4000 + 4 * 8000


def test_owners_of_nothing_share_the_work_and_take_no_room() -> None:
    """Of variables without slots each device has a copy, and the owner has no byte more."""
    bare = [VariableSpec(f"bare{i}", (100,)) for i in range(4)]
    specs = [*bare, VariableSpec("slotted", (100,), slots=1)]
    made = plan(specs, devices=["GPU:0", "GPU:1"], default=Owned(), budget=[2000, 4000])
    assert made.bytes_by_task == (2000, 2400)
    assert made.owner_of("slotted") == 1
    # There is room for all on one device, but work is shared.
    assert sorted(made.owner_of(spec.path) or 0 for spec in bare) == [0, 0, 1, 1]
    made = plan(specs, devices=["GPU:0", "GPU:1"], default=Owned(), budget=[2000, 2400])
    assert made.bytes_by_task == (2000, 2400)
    with pytest.raises(PlacementError) as error:
        plan(specs, devices=["GPU:0", "GPU:1"], default=Owned(), budget=2399)
    assert error.value.smallest_budget == 2400
    odd = [VariableSpec("odd", (100,), slot_bytes=30)]  # slots of another shape alone
    made = plan(odd, devices=["GPU:0", "GPU:1"], default=Owned(), budget=[400, 430])
    assert made.bytes_by_task == (400, 430)


def test_the_table() -> None:
    specs = [
        *resnet50(),
        VariableSpec("a", (10_000_000, 250)),
        VariableSpec("b", (20_000_000, 250)),
    ]
    text = str(plan(specs, 3, rules={"a": "task 0", "conv1_.*": "sharded(1)"}, budget="20GB"))
    for line in (
        "322 variables, 28.23 GiB with optimizer slots, on 3 ps tasks, placed by policy balanced",
        "ps 0  9.41 GiB    1.000",
        "18.63 GiB",  # the budget
        "imbalance 1.000 (fullest over mean bytes)",
        "b                           (20000000, 250)     18.63 GiB  2 pieces: ps 1, 2",
        "a                           (10000000, 250)      9.31 GiB  ps 0",
        "conv1_.*  sharded(1)  6 variables",
        "a         task 0      1 variable",
    ):
        assert line in text
    assert "no placement is below" not in text
    small = [VariableSpec("t", (8,)), VariableSpec("w", (4,))]
    lines = str(plan(small, 2, rules={"t": "sharded(2)", "w": "task 1"})).splitlines()
    assert lines[2].split() == ["bytes", "of", "mean", "variables", "shards"]
    assert lines[3].split() == ["ps", "0", "16", "B", "0.667", "1", "1"]
    assert lines[4].split() == ["ps", "1", "32", "B", "1.333", "2", "1"]
    many = str(plan(criteo_tables(), 1000))
    assert len(many.splitlines()) < 40
    loads = str(plan(SPECS, 2))
    assert "load" in loads.splitlines()[2]
    assert "imbalance of load 1.000" in loads
    devices = str(plan(SPECS, devices=["CPU:0", "GPU:0"], default=Owned()))
    assert "on every device, owner CPU:0" in devices


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
    made = plan(SPECS, devices=["CPU:0", "GPU:0"], rules={"users": "device CPU:0"}, default=Owned())
    text = made.to_json()
    assert PlacementPlan.from_json(text) == made
    assert sum('{"path"' in line for line in text.splitlines()) == len(SPECS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "another kind of file"),
        ({"version": 2}, "must be of version 1, got version 2"),
        ({"tasks": 0}, "'tasks' must be an integer of at least 1, got 0"),
        ({"tasks": 3}, "its content is not what its sha256 says"),
        ({"policy": None}, r"'policy' must be a name, got None\. Plan again, with rules"),
        ({"budgets": [1]}, r"'budgets' must have 2 entries, got 1\. Plan again, with rules"),
        (
            {"budgets": ["1GB", 3]},
            r"'budgets' must be a list of bytes .*got \['1GB', 3\]\. Plan again, with",
        ),
        ({"variables": {}}, r"'variables' must be a list, got \{\}\. Plan again, with rules"),
        ({"variables": [3]}, r"variables\[0\] must be an object"),
        ({"fingerprint": "0" * 64}, "not those of its fingerprint"),
        ({"sha256": None}, "not what its sha256 says"),
        ({"note": "mine"}, "not what its sha256 says"),
    ],
)
def test_json_that_was_changed(change: dict[str, Any], named: str) -> None:
    content = json.loads(plan(SPECS, 2).to_json()) | change
    with pytest.raises(PlacementError, match=named):
        PlacementPlan.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"path": "items"}, "each path must stand once"),
        ({"path": 3}, r"variables\[0\] .*path must be a text"),
        ({"path": "people"}, "not those of its fingerprint"),
        ({"shape": [1001, 16]}, "not those of its fingerprint"),
        ({"shape": "big"}, r"variables\[0\] \('users'\): every dimension"),
        ({"dtype": "float31"}, "a dtype must be one"),
        ({"tasks": [2]}, r"\('users'\) must be on tasks below 2, got \(2,\)"),
        ({"tasks": []}, "must be on 1 to .* tasks, got 0"),
        ({"tasks": None}, r"variables\[0\]"),
        ({"tasks": [1]}, "not what its sha256 says"),
        ({"slots": 1}, "not what its sha256 says"),
        ({"held": "somewhere"}, "somewhere"),
        ({"rule": ["users", "task one"]}, "a placement must be written"),
    ],
)
def test_a_variable_that_was_changed(change: dict[str, Any], named: str) -> None:
    content = json.loads(plan(SPECS, 2).to_json())
    content["variables"][0] |= change
    with pytest.raises(PlacementError, match=f"changed after it was written.*{named}"):
        PlacementPlan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, "9" * 10_000, b"{}"])
def test_text_that_is_no_plan(text: Any) -> None:
    with pytest.raises(PlacementError, match="the placement plan") as error:
        PlacementPlan.from_json(text)
    assert len(str(error.value)) < 400


def test_a_plan_for_another_model_names_the_differences() -> None:
    made = plan(SPECS, 2)
    made.check(reversed(SPECS))
    assert made.fingerprint == plan(SPECS[::-1], 3).fingerprint
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
        PlacementError, match="must be for 1 ps tasks, got one for the devices CPU:0"
    ):
        plan(SPECS, devices=["CPU:0"]).check_tasks(1)
    with pytest.raises(PlacementError, match=r"no variable 'user'.* 'users'"):
        made.tasks_of("user")


def test_the_picture(tmp_path: Path) -> None:
    specs = [*criteo_tables(), VariableSpec("odd$x_{/$<k>&", (2_000_000, 16), slots=2)]
    made = plan(specs, 2, budget="4GiB", rules={"table_2/embeddings": "sharded(2)"})
    made.save_picture(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    # In both bars, and in the list of the largest ones.
    assert text.count(">table_2/embeddings<") == 2
    assert "table_2/embeddings  1.81 GiB" in text
    assert "odd$x_{/$&lt;k&gt;&amp;" in text
    for word in (">ps 0<", ">ps 1<", ">budget<", "GiB of variables and slots"):
        assert word in text
    made.save_picture(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text
    heights = {}
    for tasks in (64, 1000):
        file = tmp_path / f"{tasks}.PNG"
        plan(specs, tasks, budget=["9GiB"] * tasks).save_picture(file)
        head = file.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        heights[tasks] = struct.unpack(">II", head[16:24])[1]
    assert heights[64] > 64 * 30  # room for a name in every bar
    assert heights[1000] < 4000  # of so many, the fullest and the emptiest
    plan(SPECS, devices=["CPU:0", "GPU:0"], default=Owned()).save_picture(tmp_path / "d.svg")
    assert ">GPU:0<" in (tmp_path / "d.svg").read_text(encoding="utf-8")
    plan([], 2).save_picture(tmp_path / "nothing.svg")
    with pytest.raises(PlacementError, match=r"a \.svg or a \.png file, got .*plan.pdf"):
        made.save_picture(tmp_path / "plan.pdf")
    with pytest.raises(PlacementError, match="cannot be written"):
        made.save_picture(tmp_path / "no" / "plan.svg")


def test_a_picture_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlacementError, match=r"install matplotlib\.$"):
        plan([VariableSpec("a", (4, 4))], 2).save_picture(tmp_path / "plan.svg")
    assert not (tmp_path / "plan.svg").exists()


def test_a_picture_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    code = f"""
import sys
import matplotlib
before = matplotlib.rcParams.copy()
from tfdist_ext.placement import VariableSpec, plan
plan([VariableSpec("a", (4, 4))], 2).save_picture({str(tmp_path / "a.svg")!r})
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules, "it would choose a backend for the process"
assert not {{"tensorflow", "keras"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
