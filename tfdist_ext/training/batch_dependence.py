"""Which tensors of a replica's step depend on its part of the batch, told from the graph.

What does not depend on it is the same on every replica: positions made by `range`, a layer's
constants, sums over replicas and all that is computed from them. What is looked up by such indices
brings the same slices on each replica, where one device has them once.

The walk goes backward from a tensor, through functions, branches and loops, to the batch. In eager
steps it goes through a record of what was run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist_ext.training._tf_private import function_graph, is_stateful, recording_operations

__all__ = ["BATCH", "CONSTANT", "DISTINCT", "BatchDependence"]

# What indices are, on several replicas.
BATCH = "batch"  # of each replica's rows
CONSTANT = "constant"  # the same on every replica
DISTINCT = "distinct"  # of each replica's rows, without duplicates

# How a tensor depends on the batch.
_SAME = 0  # not at all
_SHAPE = 1  # a shape, of which the first number counts rows
_VARIES = 2

_READS = frozenset(  # of the stateful operations, those whose result follows from what they get
    [
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "PartitionedCall",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "StatefulPartitionedCall",
        "If",
        "While",
        "VarHandleOp",
    ]
)
_SAME_NUMBERS = frozenset(["Cast", "Identity", "PreventGradient", "Snapshot", "StopGradient"])
_SAME_ORDER = _SAME_NUMBERS | {"ExpandDims", "Reshape", "Squeeze"}


def _no_attribute(name: str) -> Any:
    raise KeyError(name)


class _Operation(NamedTuple):
    """One operation, of a graph or run eagerly."""

    type: str
    inputs: Sequence[Any]
    output: int  # which of its outputs
    attribute: Callable[[str], Any]
    graph: Any = None


_CONSTANT_OPERATION = _Operation("Const", (), 0, _no_attribute)


class BatchDependence:
    """What depends on the batch in one replica's step.

    Args:
        batch: what the step gets, a structure of tensors.
        part_size: rows of the part where that is known when the step is traced, else None.
    """

    def __init__(self, batch: Any, part_size: int | None = None):
        self._part_size = part_size
        self._states: dict[Any, int] = {}
        self._captures: dict[int, dict[str, Any]] = {}  # id of a graph -> name inside -> outside
        self._recorded: dict[int, _Operation] = {}
        self._alive: list[Any] = []  # eager tensors are known by their ids
        self._set(_leaves(batch), _VARIES)

    def set_equal(self, values: Any) -> None:
        """Tell that these tensors are the same on every replica."""
        self._set(_leaves(values), _SAME)

    def is_equal(self, value: Any) -> bool:
        """Whether a tensor, or IndexedSlices, is the same on every replica."""
        return all(self._state(leaf) == _SAME for leaf in _leaves(value))

    def parts_of(self, indices: Any) -> list[tuple[Any, str]]:
        """(part, kind) of indices that were concatenated, as those of several lookups are."""
        operation = self._source(indices)
        if operation.type == "ConcatV2" and tf.get_static_value(operation.inputs[-1]) == 0:
            return [part for each in operation.inputs[:-1] for part in self.parts_of(each)]
        return [(indices, self._kind(indices))]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Scope of an eager step, in which what is run is recorded."""
        with recording_operations(self._record):
            yield

    def _record(
        self, kind: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: Sequence[Any]
    ) -> None:
        for number, output in enumerate(outputs):
            self._recorded[id(output)] = _Operation(kind, inputs, number, attributes.__getitem__)
        self._alive.extend(outputs)

    def _kind(self, indices: Any) -> str:
        if self._state(indices) != _SAME:
            return DISTINCT if self._is_distinct(indices) else BATCH
        return BATCH if self._repeats_by_row(indices) else CONSTANT

    def _is_distinct(self, indices: Any) -> bool:
        source = self._source(indices)
        return source.type in ("Unique", "UniqueV2") and source.output == 0

    def _source(self, indices: Any) -> _Operation:
        """The operation that has made these numbers, in this order."""
        operation = self._operation(indices)
        while operation.type in _SAME_ORDER:
            operation = self._operation(operation.inputs[0])
        return operation

    def _repeats_by_row(self, indices: Any) -> bool:
        """Whether each index is there for each row: constants made with the part's known size."""
        size = self._part_size
        if size is None or size < 2:
            return False
        values = self._constant_value(indices)
        if values is None or not values.size:
            return False
        _, counts = np.unique(values, return_counts=True)
        return bool((counts % size == 0).all())

    def _state(self, tensor: Any) -> int:
        """How a tensor depends on the batch."""
        stack = [tensor]
        while stack:
            key = _key(stack[-1])
            if key not in self._states:
                operation = self._operation(stack[-1])
                missing = self._missing(operation)
                if missing is not None:
                    stack.append(missing)
                    continue
                self._states[key] = self._outcome(operation)
            stack.pop()
        return self._states[_key(tensor)]

    def _missing(self, operation: _Operation) -> Any:
        """An input of which it is still to be found out; None where that is not needed."""
        states = [self._states.get(_key(each)) for each in operation.inputs]
        if _VARIES in states and operation.type not in _BY_OUTPUT:
            return None
        unknown = (i for i, s in zip(operation.inputs, states, strict=True) if s is None)
        return next(unknown, None)

    def _outcome(self, operation: _Operation) -> int:
        if operation.type == "Placeholder":  # an argument of which nothing is known
            return _VARIES
        if is_stateful(operation.type) and operation.type not in _READS:
            return _VARIES  # random numbers, data, Python
        states = [self._states.get(_key(each), _SAME) for each in operation.inputs]
        if max(states, default=_SAME) == _SAME:
            return _SAME
        return _BY_OUTPUT.get(operation.type, _joined)(self, operation, states)

    def _operation(self, tensor: Any) -> _Operation:
        if not tf.is_symbolic_tensor(tensor):
            return self._recorded.get(id(tensor), _CONSTANT_OPERATION)
        outer = self._captured(tensor)
        if outer is not None:  # from outside of this function
            return _Operation("Identity", (outer,), 0, _no_attribute)
        made_by = tensor.op
        return _Operation(
            made_by.type, made_by.inputs, tensor.value_index, made_by.get_attr, made_by.graph
        )

    def _captured(self, tensor: Any) -> Any:
        if tensor.op.type != "Placeholder":
            return None
        captures = getattr(tensor.graph, "captures", ())
        known = self._captures.get(id(tensor.graph), {})
        if len(known) != len(captures):
            known = {inner.name: outer for outer, inner in captures}
            self._captures[id(tensor.graph)] = known
        return known.get(tensor.name)

    def _set(self, tensors: Iterable[Any], state: int) -> None:
        for tensor in tensors:
            self._states[_key(tensor)] = state
            self._alive.append(tensor)

    def _constant_value(self, tensor: Any) -> Any:
        """The numbers of a tensor that depends on constants alone, else None; an array."""
        if not tf.is_symbolic_tensor(tensor):
            return None if tensor.dtype == tf.resource else tensor.numpy()
        value = tf.get_static_value(tensor)
        if value is not None:
            return value
        outer = self._captured(tensor)
        if outer is not None:
            return self._constant_value(outer)
        made_by = tensor.op
        run = getattr(tf.raw_ops, made_by.type, None)
        if run is None or is_stateful(made_by.type) or len(made_by.outputs) > 1:
            return None
        inputs = [self._constant_value(each) for each in made_by.inputs]
        if any(each is None for each in inputs):
            return None
        definition = made_by.op_def
        named: dict[str, Any] = {}
        for each in definition.input_arg:
            number = made_by.get_attr(each.number_attr) if each.number_attr else 1
            named[each.name] = inputs[:number] if each.number_attr else inputs[0]
            del inputs[:number]
        told_by_inputs = {
            a for each in definition.input_arg for a in (each.type_attr, each.number_attr)
        }
        for attribute in definition.attr:
            if attribute.name not in told_by_inputs:
                named[attribute.name] = made_by.get_attr(attribute.name)
        with tf.init_scope():
            return run(**named).numpy()


def _joined(_: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    """Of an operation whose outputs depend on all that it gets."""
    same_numbers = operation.type in _SAME_NUMBERS
    return max(states) if same_numbers else _VARIES


def _of_its_input(_: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    return states[operation.output]


def _shape(_: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    return _SHAPE if states[operation.output] == _VARIES else _SAME


def _nothing(*_: Any) -> int:
    return _SAME


def _slice_of_shape(_: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    if states[0] != _SHAPE or max(states[1:]) != _SAME:
        return _VARIES
    begin, stride = (
        tf.get_static_value(operation.inputs[1]),
        tf.get_static_value(operation.inputs[3]),
    )
    if begin is None or stride is None or len(begin) != 1 or stride[0] != 1:
        return _VARIES
    first = 0 if operation.attribute("begin_mask") else int(begin[0])
    if first < 0:
        rank = operation.inputs[0].shape[0]
        if rank is None:
            return _VARIES
        first += rank
    if first > 0:
        return _SAME
    return _VARIES if operation.attribute("shrink_axis_mask") else _SHAPE


def _number_of_shape(_: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    return _SAME if states[0] == _SHAPE and operation.output > 0 else _VARIES


def _gathered(_: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    places = tf.get_static_value(operation.inputs[1])
    if states[0] != _SHAPE or places is None or places.size == 0:
        return _VARIES
    return _SAME if (places > 0).all() else _VARIES


def _call(self: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    graph = function_graph(operation.graph, operation.attribute("f").name)
    return _VARIES if graph is None else _of_function(graph, states, [operation.output])[0]


def _branch(self: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    if states[0] != _SAME:
        return _VARIES
    graphs = [
        function_graph(operation.graph, operation.attribute(name).name)
        for name in ("then_branch", "else_branch")
    ]
    if None in graphs:
        return _VARIES
    return max(_of_function(graph, states[1:], [operation.output])[0] for graph in graphs)


def _loop(self: BatchDependence, operation: _Operation, states: Sequence[int]) -> int:
    body = function_graph(operation.graph, operation.attribute("body").name)
    condition = function_graph(operation.graph, operation.attribute("cond").name)
    if body is None or condition is None:
        return _VARIES
    states = list(states)
    while True:
        after = _of_function(body, states, range(len(states)))
        after = [max(pair) for pair in zip(states, after, strict=True)]
        if after == states:
            break
        states = after
    turns = _of_function(condition, states, [0])[0]
    return states[operation.output] if turns == _SAME else _VARIES


def _of_function(graph: Any, states: Sequence[int], outputs: Iterable[int]) -> list[int]:
    """How outputs of a function depend on the batch when its inputs do in the given ways."""
    inside = BatchDependence(())
    for tensor, state in zip(graph.inputs, states, strict=True):
        inside._set([tensor], state)
    return [inside._state(graph.outputs[number]) for number in outputs]


_BY_OUTPUT: dict[str, Callable[[BatchDependence, _Operation, Sequence[int]], int]] = {
    "IdentityN": _of_its_input,
    "Shape": _shape,
    "ShapeN": _shape,
    "Rank": _nothing,
    "StridedSlice": _slice_of_shape,
    "Unpack": _number_of_shape,
    "GatherV2": _gathered,
    "PartitionedCall": _call,
    "StatefulPartitionedCall": _call,
    "If": _branch,
    "StatelessIf": _branch,
    "While": _loop,
    "StatelessWhile": _loop,
}


def _leaves(values: Any) -> list[Any]:
    leaves = tf.nest.flatten(values, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def _key(tensor: Any) -> Any:
    return (id(tensor.graph), tensor.name) if tf.is_symbolic_tensor(tensor) else id(tensor)
