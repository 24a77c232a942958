"""Cutting a step where replicas meet: stages compute what the whole step does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.strategies.stages import MeetingPoint, cut


@dataclass
class _Node:
    name: str
    op: str = "Add"
    input: list[str] = field(default_factory=list)


_STEP = [
    _Node("x", "Placeholder"),
    _Node("w", "Placeholder"),
    _Node("forward", input=["x", "w:0"]),
    _Node("loss", input=["forward"]),
    _Node("gradient", input=["loss", "forward:1"]),
    _Node("sum", "PlaceholderWithDefault", ["gradient"]),
    _Node("update", input=["w", "sum", "^loss"]),
]


def test_what_was_made_later_and_is_needed_earlier_moves() -> None:
    """The gradient of a loop gives the loop inputs that are made after it."""
    nodes = [
        _Node("x", "Placeholder"),
        _Node("loop", "While", ["x", "list"]),
        _Node("sum", "PlaceholderWithDefault", ["loop"]),
        _Node("size", "Const"),
        _Node("list", "EmptyTensorList", ["size"]),
        _Node("gradient", input=["sum", "loop:1"]),
    ]
    first, second = cut(nodes, [MeetingPoint(["loop:0"], ["sum"])], {"x"}, ["gradient:0"])
    assert first.nodes == ("loop", "size", "list")
    assert second.nodes == ("gradient",)


def test_what_a_step_returns_is_computed_as_soon_as_it_can_be() -> None:
    """Metrics, after the update: one value goes out, not all that it was computed from."""
    nodes = [
        *_STEP,
        _Node("one", "Const"),
        _Node("metric", input=["forward", "one"]),
        _Node("all", "Pack", ["metric", "loss"]),
        _Node("of weights", input=["sum", "metric"]),
        _Node("result", input=["all"]),
        _Node("note", input=["forward"]),
    ]
    meeting, wanted = MeetingPoint(["gradient:0"], ["sum"]), ["all:0", "of weights:0"]
    first, second = cut(nodes, [meeting], {"x", "w"}, wanted, {"update", "note"})
    assert first.nodes == ("forward", "loss", "gradient", "one", "metric", "all")
    assert second.nodes == ("update", "of weights", "note")  # nobody needs the result
    assert first.outputs == ("metric:0", "forward:0", "gradient:0", "all:0")


def test_what_is_brought_to_a_meeting_is_computed_as_soon_as_it_can_be() -> None:
    """Statistics that are summed after the update do not wait for it."""
    nodes = [
        *_STEP,
        _Node("statistics", input=["forward"]),
        _Node("sum of statistics", "PlaceholderWithDefault", ["statistics"]),
        _Node("follow", input=["w", "sum of statistics"]),
    ]
    meetings = [
        MeetingPoint(["gradient:0"], ["sum"]),
        MeetingPoint(["statistics:0"], ["sum of statistics"]),
    ]
    stages = cut(nodes, meetings, {"x", "w"}, ["loss:0"], {"update", "follow"})
    assert [stage.nodes[-1] for stage in stages] == ["statistics", "update", "follow"]


def test_what_is_needed_before_the_meeting_that_gives_it() -> None:
    nodes = [
        _Node("x", "Placeholder"),
        _Node("loop", "While", ["x", "late"]),
        _Node("sum", "PlaceholderWithDefault", ["loop"]),
        _Node("late", input=["sum"]),
    ]
    with pytest.raises(ValueError, match=r"sum:0 must be there before the meeting"):
        cut(nodes, [MeetingPoint(["loop:0"], ["sum"])], {"x"}, ["late:0"])


@st.composite
def _steps(draw: st.DrawFn) -> tuple[list[_Node], list[MeetingPoint], list[str]]:
    """A step whose nodes add up their inputs, with meetings between them."""
    nodes = [_Node("given", "Placeholder")]
    meetings = []
    for number in range(draw(st.integers(1, 25))):
        names = [node.name for node in nodes]
        takes = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        if draw(st.integers(0, 4)) == 0:
            brought = list(dict.fromkeys(takes))
            results = [f"result{number}_{i}" for i in range(len(brought))]
            nodes += [
                _Node(result, "PlaceholderWithDefault", [name])
                for result, name in zip(results, brought, strict=True)
            ]
            meetings.append(MeetingPoint([f"{name}:0" for name in brought], results))
        else:
            nodes.append(_Node(f"node{number}", input=takes))
    wanted = draw(st.lists(st.sampled_from([node.name for node in nodes]), min_size=1))
    return nodes, meetings, [f"{name}:0" for name in wanted]


@given(_steps())
@settings(max_examples=100, deadline=None)
def test_stages_compute_what_the_step_does(
    step: tuple[list[_Node], list[MeetingPoint], list[str]],
) -> None:
    """With a meeting that doubles what it gets, stage by stage and as a whole."""
    nodes, meetings, wanted = step
    whole: dict[str, int] = {"given:0": 1}
    for node in nodes[1:]:
        values = [whole[f"{name}:0"] for name in node.input]
        whole[f"{node.name}:0"] = sum(values) * (2 if node.op.startswith("Placeholder") else 1)

    stages = cut(nodes, meetings, {"given"}, wanted)
    assert len(stages) == len(meetings) + 1
    by_name = {node.name: node for node in nodes}
    known = {"given:0": 1}
    for number, stage in enumerate(stages):
        if number:
            brought, results = meetings[number - 1]
            known |= {f"{r}:0": 2 * known[b] for b, r in zip(brought, results, strict=True)}
        used = {f"{each}:0" for name in stage.nodes for each in by_name[name].input}
        assert used.issuperset(stage.inputs)
        inside = {name: known[name] for name in stage.inputs}  # a KeyError is a failure
        for name in stage.nodes:
            inside[f"{name}:0"] = sum(inside[f"{each}:0"] for each in by_name[name].input)
        known |= {name: inside[name] for name in stage.outputs}
    assert [known[name] for name in wanted] == [whole[name] for name in wanted]
