"""Cuts a traced step into stages, between which replicas sum their values.

A step that sums over replicas cannot be one function that each replica calls. It is cut at each
sum, a sync point. Each replica runs a stage by itself; then the replicas sum, and each runs the
next stage with the sums.

A node belongs to the stage between the sync points where it was made, or to an earlier stage that
needs it: the gradient of a loop gives the loop inputs that are made after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from graphlib import TopologicalSorter
from typing import NamedTuple

import tensorflow as tf


class NotSharedError(Exception):
    """The step cannot be traced once for all replicas; the message says why."""


class Stage(NamedTuple):
    """A part of a step between two sync points.

    Attributes:
        nodes: names of its nodes.
        inputs: tensors from outside of the stage, as "name:number", in order.
        outputs: its tensors that are used outside of the stage, in order.
    """

    nodes: set[str]
    inputs: dict[str, None]
    outputs: dict[str, None]


def cut(
    nodes: Sequence[tf.compat.v1.NodeDef],
    sync_points: Sequence[tuple[Sequence[str], Sequence[str]]],
    inputs: Iterable[str],
    wanted: Sequence[str],
    stateful: Set[str] = frozenset(),
) -> list[Stage]:
    """The stages of a step: one more than sync points.

    Args:
        nodes: in the order in which they were made. Inputs of a node may be made after it.
        sync_points: in order, (tensors that a replica brings, names of the nodes that stand for
            what it gets).
        inputs: names of the input nodes of the graph.
        wanted: the tensors that the step returns, as "name:number".
        stateful: names of nodes that have effects.

    Raises:
        NotSharedError: a tensor is needed for a sum over replicas that it depends on.
    """
    by_name = {node.name: node for node in nodes}
    results = {name: i for i, (_, got) in enumerate(sync_points, 1) for name in got}
    leaving = [(tensor, i) for i, (brought, _) in enumerate(sync_points) for tensor in brought]
    leaving += [(tensor, len(sync_points)) for tensor in wanted]
    made_in: dict[str, int] = {}
    current = 0
    for node in nodes:
        current = made_in[node.name] = results.get(node.name, current)

    order = _in_order(by_name, [*stateful, *results, *(_node_of(tensor) for tensor, _ in leaving)])
    outside = {*inputs, *results}
    stage_of: dict[str, int] = {}
    needed: dict[str, int] = {}  # the first stage that uses a node
    for name in reversed(order):
        if name not in outside:
            stage_of[name] = stage = min(made_in[name], needed.get(name, made_in[name]))
            for source in _sources(by_name[name]):
                needed[source] = min(needed.get(source, stage), stage)
    for name, number in results.items():
        if needed.get(name, number) < number:
            raise NotSharedError(
                f"the step uses the sum over replicas {name!r} before the sum is computed"
            )

    stages = _stages(by_name, stage_of, len(sync_points) + 1)
    for tensor, _ in leaving:
        if (source := _node_of(tensor)) in stage_of:
            stages[stage_of[source]].outputs[tensor] = None
    return stages


def _stages(
    by_name: Mapping[str, tf.compat.v1.NodeDef], stage_of: Mapping[str, int], count: int
) -> list[Stage]:
    """The stages, with the tensors that they pass to each other."""
    stages = [Stage(set(), {}, {}) for _ in range(count)]
    for name, number in stage_of.items():
        stages[number].nodes.add(name)
        for tensor in map(tensor_name, by_name[name].input):
            source = _node_of(tensor)
            if not tensor.startswith("^") and stage_of.get(source) != number:
                stages[number].inputs[tensor] = None
                if source in stage_of:
                    stages[stage_of[source]].outputs[tensor] = None
    return stages


def _in_order(by_name: Mapping[str, tf.compat.v1.NodeDef], names: Iterable[str]) -> list[str]:
    """These nodes and all nodes that they depend on, each after its inputs."""
    sources: dict[str, list[str]] = {}
    todo = list(names)
    while todo:
        if (name := todo.pop()) not in sources:
            sources[name] = _sources(by_name[name])
            todo += sources[name]
    return list(TopologicalSorter(sources).static_order())


def tensor_name(name: str) -> str:
    """An input of a node as "name:number"; a control input "^name" is returned as "^name:0"."""
    return name if ":" in name else f"{name}:0"


def _sources(node: tf.compat.v1.NodeDef) -> list[str]:
    """Names of the nodes that a node takes tensors from or waits for."""
    return [_node_of(name.removeprefix("^")) for name in node.input]


def _node_of(tensor: str) -> str:
    return tensor.split(":")[0]
