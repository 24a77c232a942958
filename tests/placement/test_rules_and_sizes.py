"""What users write: sizes, variables, placements and rules; and what cannot be right."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.placement import (
    Balanced,
    Mirrored,
    OnDevice,
    OnTask,
    Owned,
    Placement,
    PlacementError,
    PlacementPlan,
    Rule,
    Sharded,
    VariableSpec,
    parse_size,
    placement_from,
    plan,
    rules_from,
    size_text,
)

QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)
SPECS = [
    VariableSpec("embedding/users", (1000, 8)),
    VariableSpec("embedding/items", (500, 8)),
    VariableSpec("head/kernel", (16, 2)),
    VariableSpec("head/bias", (2,)),
    VariableSpec("scale", ()),
]


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        (" 8 ", 8),
        ("1 B", 1),
        ("8GiB", 8 * 2**30),
        (" 8 gib ", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5TiB", 3 * 2**39),
        ("0.1kB", 100),
        ("0.3KiB", 307),  # a part of a byte is dropped
        ("2PiB", 2**51),
    ],
)
def test_sizes(written: int | str, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written",
    [
        "",
        "GiB",
        "8G",
        "-1GB",
        "8 GiB each",
        "1.5",
        "1e9",
        "٣GB",
        "9" * 30,
        -1,
        True,
        2.5,
        None,
    ],
)
def test_what_is_no_size(written: Any) -> None:
    with pytest.raises(PlacementError, match="budget must be a size") as error:
        parse_size(written)
    assert len(str(error.value)) < 300


@QUICK
@given(st.integers(0, 2**60))
def test_a_size_for_people_reads_back_to_half_a_percent(size: int) -> None:
    assert abs(parse_size(size_text(size)) - size) <= 0.005 * size
    assert parse_size(f"{size} B") == size


def test_sizes_for_people() -> None:
    sizes = (0, 1023, 1024, 4096, 2**20 - 6, 2**20 - 2, 5 * 2**29, 2**60)
    assert [size_text(size) for size in sizes] == [
        *("0 B", "1023 B", "1.00 KiB", "4.00 KiB", "1023.99 KiB", "1.00 MiB", "2.50 GiB"),
        "1024.00 PiB",  # there is no larger unit
    ]


def test_bytes_of_a_variable() -> None:
    spec = VariableSpec("table", (10, 3), "bfloat16", slots=2, slot_bytes=7)
    assert (spec.bytes, spec.weight_bytes, spec.row_bytes) == (3 * 60 + 7, 60, 18)
    # Ten rows in four pieces are 3, 3, 2, 2: as TensorFlow's embedding_lookup computes.
    assert spec.piece_bytes(4) == [3 * 18 + 7, 3 * 18, 2 * 18, 2 * 18]
    assert spec.largest_piece(4) == 61
    assert VariableSpec("step", (), "int64").bytes == 8
    assert VariableSpec("words", (4,), "string").bytes == 64
    assert VariableSpec("none", (0, 5)).bytes == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"path": ""}, "path must be a text that is not empty"),
        ({"path": 3}, "path must be a text"),
        ({"shape": (None, 3)}, "'v' must be an integer of at least 0"),
        ({"shape": (-1,)}, "every dimension of 'v'"),
        ({"shape": (2.5,)}, "every dimension of 'v'"),
        ({"shape": 7}, "every dimension of 'v'"),
        ({"dtype": "float31"}, 'Did you mean "float32"'),
        ({"slots": -1}, "slots of 'v'"),
        ({"slots": True}, "slots of 'v'"),
        ({"slot_bytes": 1.5}, "slot_bytes of 'v'"),
        ({"load": float("nan")}, "load of 'v'"),
        ({"load": -1}, "load of 'v'"),
        (
            {"shape": (2**40, 2**40)},
            r"'v' must have at most 2\*\*60 bytes, got the shape \(",
        ),
    ],
)
def test_what_is_no_variable(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(PlacementError, match=named):
        VariableSpec(**({"path": "v", "shape": (2, 3)} | arguments))


PLACEMENTS = st.one_of(
    st.sampled_from([Mirrored(), Owned(), Balanced()]),
    st.builds(Sharded, st.one_of(st.none(), st.integers(1, 10**9 - 1))),
    st.builds(OnTask, st.integers(0, 10**9 - 1)),
    st.builds(
        OnDevice, st.from_regex(r"(/job:ps/task:[0-9]/device:)?[CG]PU:[0-9]", fullmatch=True)
    ),
)


@QUICK
@given(PLACEMENTS)
def test_a_placement_is_written_as_it_is_read(placement: Placement) -> None:
    assert placement_from(str(placement)) == placement
    assert placement_from(f"  {str(placement).replace('sharded', 'Sharded')} ") == placement


@pytest.mark.parametrize(
    "text", ["", "sharded()", "sharded(-1)", "task", "task one", "gpu 0", 4, None]
)
def test_what_is_no_placement(text: Any) -> None:
    with pytest.raises(
        PlacementError, match=r"a placement must be written as .* device GPU:0, got"
    ):
        placement_from(text)


@pytest.mark.parametrize("make", [lambda: Sharded(0), lambda: OnTask(-1), lambda: OnTask(True)])
def test_placements_check_their_numbers(make: Any) -> None:
    with pytest.raises(PlacementError, match=r"must be .*, got "):
        make()


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
    assert {path: rule.pattern for path, rule in made.fixed.items()} == {
        "embedding/users": "embedding/.*",
        "embedding/items": "embedding/items",
    }


def test_a_rule_for_the_path_settles_two_expressions() -> None:
    rules = {"head/.*": "task 0", ".*/bias": "sharded(2)", "head/bias": "task 1"}
    assert plan(SPECS, 2, rules=rules).tasks_of("head/bias") == (1,)
    # Expressions match whole paths: "head" in the middle of one is no match.
    made = plan(
        [VariableSpec("head", (2,)), VariableSpec("a/head/b", (2,))], 2, rules={"hea.": "task 1"}
    )
    assert list(made.fixed) == ["head"]


def test_a_path_that_is_no_expression_is_still_a_path() -> None:
    made = plan([VariableSpec("a(b", (2,)), VariableSpec("c", (2,))], 2, rules={"a(b": "task 1"})
    assert made.tasks_of("a(b") == (1,)


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
        ({"embedding/[": "task 0"}, "got 'embedding/['"),
        ({"embeding/users": "task 0"}, "'embeding/users' (task 0) matches no .* 'embedding/users'"),
        ({"embedding": "task 0"}, "'embedding' .* matches no variable"),  # a full match only
        (
            {"embedding/.*": "task 0", ".*/users": "sharded(2)"},
            "match 'embedding/users', got 'embedding/.*' (task 0) and '.*/users' (sharded(2)).",
        ),
        (
            [Rule("scale", OnTask(0)), Rule("scale", OnTask(1))],
            "got 'scale' twice",
        ),
        ({"head/bias": "task 2"}, "the task of 'head/bias' must be from 0 to 1, got 2"),
        ({"head/bias": "sharded(3)"}, "'head/bias' must .* got shape (2,): it has only 2 rows"),
        ({"scale": "sharded(2)"}, "'scale' must .* to be sharded(2), got .* it is a scalar"),
        ({"scale": "mirrored"}, "'scale' on parameter servers must .* got mirrored, which"),
        ({"scale": "owned"}, "'scale' on parameter servers must .* got owned, which"),
        ({"scale": "device CPU:0"}, "'scale' on parameter servers must .* got device CPU:0, which"),
        ({"scale": "everywhere"}, "the rule 'scale': .* got 'everywhere'"),
        ({"scale": 3}, "the rule 'scale': a placement must be"),
        ({"": "task 0"}, "pattern must be a text"),
        (["scale"], 'rules must be Rule("pattern", placement)'),
    ],
)
def test_rules_that_cannot_be(rules: Any, named: str) -> None:
    # In the texts above only ".*" between spaces is an expression.
    pattern = " .* ".join(map(re.escape, named.split(" .* ")))
    with pytest.raises(PlacementError, match=pattern):
        plan(SPECS, 2, rules=rules)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tasks": 0}, "number of parameter servers must be an integer from 1"),
        ({"tasks": "4"}, "number of parameter servers"),
        ({}, "a plan must be for a number of parameter servers .* or for devices="),
        ({"tasks": 2, "devices": ["CPU:0"]}, "one of the two"),
        ({"devices": []}, "at least one name"),
        ({"devices": "CPU:0"}, "a list of names"),
        ({"devices": ["cpu:0", "/device:CPU:0"]}, "each once"),
        ({"tasks": 2, "budget": "much"}, "budget must be a size, got 'much'"),
        ({"tasks": 2, "budget": ["1GB"]}, "budget must be one size, or one .*got 1 sizes"),
        ({"tasks": 2, "budget": ["1GB", "x"]}, r"budget\[1\] must be a size"),
        ({"tasks": 2, "policy": "gready"}, 'policy must be .* got .gready.* "greedy"'),
        ({"tasks": 2, "policy": 7}, "policy must be a known name or .*got 7"),
        ({"tasks": 2, "default": lambda spec: None}, "default must be or return a Placement"),
        ({"devices": ["CPU:0"], "rules": {"scale": "task 0"}}, "must be on a device, got task 0"),
        ({"devices": ["CPU:0"], "rules": {"scale": "device GPU:0"}}, "got device GPU:0.*CPU:0"),
    ],
)
def test_plans_that_cannot_be(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(PlacementError, match=named):
        plan(SPECS, **arguments)


def test_variables_are_variables_and_have_different_paths() -> None:
    with pytest.raises(
        PlacementError,
        match=r"variable must have a path of its .*got 'scale' twice\. Rules and plans",
    ):
        plan([*SPECS, SPECS[-1]], 2)
    with pytest.raises(PlacementError, match="specs must be VariableSpec"):
        plan(["scale"], 2)  # type: ignore[list-item]
