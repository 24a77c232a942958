"""Cutting a step at its sums over replicas: the stages compute what the whole step does."""

from __future__ import annotations

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.strategies.shared_step import cut
from tfdist_ext.strategies.traced_replica import NotSharedError


def node(name: str, op: str = "Add", takes: str = "") -> tf.compat.v1.NodeDef:
    return tf.compat.v1.NodeDef(name=name, op=op, input=takes.split())


STEP = [
    node("x", "Placeholder"),
    node("w", "Placeholder"),
    node("forward", takes="x w:0"),
    node("loss", takes="forward"),
    node("gradient", takes="loss forward:1"),
    node("sum", "PlaceholderWithDefault", "gradient"),
    node("update", takes="w sum ^loss"),
]
SUM = (["gradient:0"], ["sum"])


def test_nodes_stay_between_the_sync_points_where_they_were_made() -> None:
    nodes = [
        *STEP,
        node("one", "Const"),
        node("metric", takes="forward one"),
        node("result", takes="metric"),
        node("note", takes="forward"),
    ]
    first, second = cut(nodes, [SUM], {"x", "w"}, ["metric:0"], {"update", "note"})
    assert first.nodes == {"forward", "loss", "gradient"}
    assert second.nodes == {"update", "one", "metric", "note"}  # nobody needs the result
    assert set(first.outputs) == {"forward:0", "gradient:0"}
    assert set(second.inputs) == {"w:0", "sum:0", "forward:0"}


def test_a_sum_that_depends_on_itself_is_refused() -> None:
    nodes = [
        node("x", "Placeholder"),
        node("loop", "While", "x late"),
        node("sum", "PlaceholderWithDefault", "x"),
        node("late", takes="sum"),
    ]
    with pytest.raises(NotSharedError, match="uses the sum over replicas 'sum' before"):
        cut(nodes, [(["loop:0"], ["sum"])], {"x"}, ["late:0"])


Step = tuple[list[tf.compat.v1.NodeDef], list[tuple[list[str], list[str]]], list[str], set[str]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A step whose nodes add up their inputs, with sync points between them."""
    nodes = [node("argument", "Placeholder"), node("constant", "Const")]
    points = []
    for number in range(draw(st.integers(1, 25))):
        names = [one.name for one in nodes]
        takes = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        if draw(st.integers(0, 4)) == 0:
            brought = list(dict.fromkeys(takes))
            results = [f"result{number}_{i}" for i in range(len(brought))]
            nodes += [
                node(result, "PlaceholderWithDefault", name)
                for result, name in zip(results, brought, strict=True)
            ]
            points.append(([f"{name}:0" for name in brought], results))
        else:
            nodes.append(node(f"node{number}", takes=" ".join(takes)))
    names = [one.name for one in nodes]
    wanted = draw(st.lists(st.sampled_from(names), min_size=1))
    stateful = {name for name in names if name.startswith("node") and draw(st.booleans())}
    return nodes, points, [f"{name}:0" for name in wanted], stateful


@given(steps())
@settings(max_examples=100, deadline=None)
def test_stages_compute_what_the_step_does(step: Step) -> None:
    """With a reduction that doubles, stage by stage and as a whole."""
    nodes, points, wanted, stateful = step
    whole: dict[str, int] = {"argument:0": 1, "constant:0": 5}
    for one in nodes[2:]:
        values = [whole[f"{name}:0"] for name in one.input]
        whole[f"{one.name}:0"] = sum(values) * (2 if one.op.startswith("Placeholder") else 1)

    stages = cut(nodes, points, {"argument"}, wanted, stateful)
    assert len(stages) == len(points) + 1
    assert stateful <= set().union(*(stage.nodes for stage in stages))
    known = {"argument:0": 1}
    for number, stage in enumerate(stages):
        if number:
            brought, results = points[number - 1]
            known |= {f"{r}:0": 2 * known[b] for b, r in zip(brought, results, strict=True)}
        used = {f"{name}:0" for one in nodes if one.name in stage.nodes for name in one.input}
        assert used.issuperset(stage.inputs)
        inside = {name: known[name] for name in stage.inputs}  # a KeyError is a failure
        for one in nodes:
            if one.name in stage.nodes:
                values = [inside[f"{name}:0"] for name in one.input]
                inside[f"{one.name}:0"] = 5 if one.op == "Const" else sum(values)
        known |= {name: inside[name] for name in stage.outputs}
    assert [known[name] for name in wanted] == [whole[name] for name in wanted]
