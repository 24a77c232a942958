"""A traced step, cut where replicas meet: pure arithmetic on the nodes of a graph.

A step that sums over replicas in its middle cannot be one function for each replica. It is cut
into stages. The nodes of a stage were made after one meeting and before the next; replicas run a
stage each by itself, then meet, and run the next one with what they have agreed on.

What a step returns, or brings to a meeting, is computed as soon as it can be. Keras updates metrics
after the weights, from what was there before the gradients were summed: all of that would be passed
on through the meeting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = [
    "MeetingPoint",
    "Node",
    "Stage",
    "cut",
    "source_of",
    "tensor_name",
]


class Node(Protocol):
    """A node of a GraphDef.

    Attributes:
        name: its name, once in a graph.
        op: its type.
        input: "name" or "name:number" of each tensor that it takes, "^name" of nodes to wait for.
    """

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def input(self) -> Sequence[str]: ...


class MeetingPoint(NamedTuple):
    """A point of a step at which replicas meet.

    Attributes:
        brought: the tensors that a replica brings, as "name:number".
        results: names of the nodes that stand for what it gets.
    """

    brought: Sequence[str]
    results: Sequence[str]


@dataclass(frozen=True)
class Stage:
    """A part of a step between two meetings.

    Attributes:
        nodes: names, in the order of the graph.
        inputs: tensors from outside of it, as "name:number".
        outputs: its tensors that are used outside of it.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def cut(
    nodes: Sequence[Node],
    meetings: Sequence[MeetingPoint],
    given: Set[str],
    wanted: Sequence[str],
    ordered: Set[str] = frozenset(),
) -> list[Stage]:
    """The stages of a step: one more than meetings.

    Args:
        nodes: in the order in which they were made; a node's inputs may be made after it.
        meetings: in order.
        given: names of nodes whose outputs come from outside of the step.
        wanted: the tensors that the step returns, as "name:number".
        ordered: names of nodes that do more than compute; they stay where they were made.

    Raises:
        ValueError: a node that is needed before a meeting depends on its results.
    """
    results = {name: number for number, each in enumerate(meetings) for name in each.results}
    stage_of = _stages_of_nodes(nodes, meetings, results, given, wanted, ordered)
    inputs, outputs = _passed_on(nodes, meetings, results, stage_of, wanted)
    names = [
        tuple(node.name for node in nodes if stage_of.get(node.name) == number)
        for number in range(len(inputs))
    ]
    return [
        Stage(mine, tuple(taken), tuple(given_on))
        for mine, taken, given_on in zip(names, inputs, outputs, strict=True)
    ]


def _stages_of_nodes(
    nodes: Sequence[Node],
    meetings: Sequence[MeetingPoint],
    results: Mapping[str, int],
    given: Set[str],
    wanted: Sequence[str],
    ordered: Set[str],
) -> dict[str, int]:
    """The number of the stage in which each needed node is computed."""
    by_name = {node.name: node for node in nodes}
    brought = [tensor for each in meetings for tensor in each.brought]
    needed = _with_inputs(by_name, [*map(_node_of, [*wanted, *brought]), *ordered, *results])
    stage_of: dict[str, int] = {}
    current = 0
    for node in nodes:
        if node.name in results:
            current = results[node.name] + 1
        elif node.name in needed and node.name not in given:
            stage_of[node.name] = current
    for node in reversed(nodes):  # made later, and needed earlier
        _needed_by(stage_of, by_name, node.name)
    earliest = _earliest(nodes, stage_of, results, ordered)
    for name in map(_node_of, [*brought, *wanted]):
        if name in stage_of:
            stage_of[name] = min(stage_of[name], earliest[name])
            _needed_by(stage_of, by_name, name)
    return stage_of


def _passed_on(
    nodes: Sequence[Node],
    meetings: Sequence[MeetingPoint],
    results: Mapping[str, int],
    stage_of: Mapping[str, int],
    wanted: Sequence[str],
) -> tuple[list[dict[str, None]], list[dict[str, None]]]:
    """(inputs, outputs) of each stage, as ordered sets of tensors."""
    inputs: list[dict[str, None]] = [{} for _ in range(len(meetings) + 1)]
    outputs: list[dict[str, None]] = [{} for _ in inputs]

    def leaves(tensor: str, stage: int) -> bool:
        """Whether a tensor comes into a stage from outside; noted where it leaves its own."""
        source = _node_of(tensor)
        if max(stage_of.get(source, 0), results.get(source, -1) + 1) > stage:
            raise ValueError(f"{tensor} must be there before the meeting that it depends on")
        if stage_of.get(source) == stage:
            return False
        if source in stage_of:
            outputs[stage_of[source]][tensor] = None
        return True

    for node in nodes:
        if (stage := stage_of.get(node.name)) is not None:
            for name in node.input:
                if not name.startswith("^") and leaves(tensor_name(name), stage):
                    inputs[stage][tensor_name(name)] = None
    for number, meeting in enumerate(meetings):
        for tensor in meeting.brought:
            if not leaves(tensor, number):  # at the end of this stage
                outputs[number][tensor] = None
    for tensor in wanted:
        leaves(tensor, len(inputs))
    return inputs, outputs


def _with_inputs(by_name: Mapping[str, Node], names: Iterable[str]) -> set[str]:
    """Nodes, and all that they depend on."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += _needs(by_name[name])
    return found


def _earliest(
    nodes: Sequence[Node],
    stage_of: Mapping[str, int],
    results: Mapping[str, int],
    ordered: Set[str],
) -> dict[str, int]:
    """The first stage in which what a node takes is there, for each node."""
    earliest = {name: number + 1 for name, number in results.items()}
    for node in nodes:
        if node.name in ordered:
            earliest[node.name] = stage_of[node.name]
        elif node.name in stage_of:
            # What was made later stays where it is, and what is given is always there.
            stages = (earliest.get(name, stage_of.get(name, 0)) for name in _needs(node))
            earliest[node.name] = max(stages, default=0)
    return earliest


def source_of(tensor: str, nodes: Mapping[str, Node]) -> str:
    """The tensor that an identity of identities is."""
    while (node := nodes[_node_of(tensor)]).op == "Identity":
        tensor = tensor_name(next(name for name in node.input if not name.startswith("^")))
    return tensor


def _needed_by(stage_of: dict[str, int], by_name: Mapping[str, Node], name: str) -> None:
    """Move what a node needs to its stage, or an earlier one."""
    todo = [name]
    while todo:
        name = todo.pop()
        stage = stage_of.get(name)
        if stage is None:
            continue
        for source in _needs(by_name[name]):
            if stage_of.get(source, -1) > stage:
                stage_of[source] = stage
                todo.append(source)


def tensor_name(name: str) -> str:
    """An input of a node as "name:number"; what it waits for has a name of its own."""
    return name if ":" in name else f"{name}:0"


def _needs(node: Node) -> list[str]:
    """Names of the nodes that a node takes tensors of, or waits for."""
    return [_node_of(name.removeprefix("^")) for name in node.input]


def _node_of(tensor: str) -> str:
    return tensor.split(":")[0]
