"""Which tensors of a step depend on rows of the batch, and where their rows are.

`RowTrace` finds where rows go from shapes. In a graph the number of rows of a batch is unknown,
and so are other sizes. To tell them apart, the operations that lead to a tensor are copied to a
scratch graph. There this replica's part has a prime number of rows, and the global batch another
prime. TensorFlow infers all shapes again; a dimension that is a multiple of one of the primes is
one of rows. The scratch graph never runs.

`BatchDependence` tells what does not depend on the batch, and so is the same on every replica:
positions made by `range`, a layer's constants, sums over replicas and all that is computed from
them. It walks backward from a tensor, through functions, branches and loops, to the batch; in
eager steps through a record of what was run.

By it gradients keep the slices that one device would have (`prepare_reduction`). Optimizers with
second moments square the slices of a sparse gradient (`tf.IndexedSlices`) one by one, so it
matters how many there are for a row of a table. Slices of the batch's rows stay apart, as on one
device. What each replica looks up by the same constant indices, as positions, is one lookup on
one device: its slices are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist_ext.training._tf_private import function_graph, is_stateful, recording_operations
from tfdist_ext.training.protocols import Structure

__all__ = [
    "BATCH",
    "CONSTANT",
    "DISTINCT",
    "PLACING",
    "SCATTERING",
    "BatchDependence",
    "Gradient",
    "PreparedReduction",
    "RowTrace",
    "finished",
    "follows_from",
    "may_compare_rows",
    "places_rows",
    "prepare_reduction",
    "sums_in_loss",
]


_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)


# Which output of an operation holds distinct numbers, as Keras and TensorFlow look up sparse ids.
_OF_DISTINCT = {
    **dict.fromkeys(("Unique", "UniqueV2"), 0),
    **{f"SparseSegment{combiner}GradV2": 1 for combiner in ("Mean", "Sum", "SqrtN")},
}


# Operations that put single rows into something without rows.
PLACING = {
    *("Concat", "ConcatV2", "DynamicStitch", "Pack", "Pad", "PadV2", "Reshape", "Unpack"),
    *("Gather", "GatherNd", "GatherV2", "Slice", "Split", "SplitV", "StridedSlice"),
    *("TensorScatterUpdate", "TensorStridedSliceUpdate", "XlaDynamicUpdateSlice"),
    *("TopK", "TopKV2"),
}


# Operations that write or add rows where indices say: of a variable, other rows on each replica.
# For a metric they are sums of rows, as others are.
SCATTERING = {
    *("ScatterNd", "SegmentMax", "SegmentMean", "SegmentMin", "SegmentSum", "SparseToDense"),
    *("TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub"),
    *("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", "UnsortedSegmentSum"),
}


# Operations behind which no single row is left: their result is a statistic of the rows.
_REDUCING = {
    *("All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum", "EuclideanNorm"),
    *("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "L2Loss"),
    *("Bincount", "DenseBincount", "Shape", "Size"),
}


# The number of inputs that are data, of operations whose other inputs are shapes or places.
_DATA_INPUTS = {
    **dict.fromkeys(("BroadcastTo", "ExpandDims", "Gather", "GatherNd", "GatherV2", "Pad"), 1),
    **dict.fromkeys(("PadV2", "Reshape", "Slice", "SplitV", "StridedSlice", "Tile"), 1),
    **dict.fromkeys(("TopKV2", "Transpose"), 1),
    **dict.fromkeys(("Fill", "OneHot", "Range", "RandomStandardNormal", "RandomUniform"), 0),
    "XlaDynamicUpdateSlice": 2,
}


_CALLS = (
    *("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If"),
    *("StatelessIf", "Case", "StatelessCase", "XlaLaunch"),
)


# Of a variable: dense, or slices of what was looked up.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


# A tensor as a graph knows it: id of the graph, name; of one that was made eagerly, its own id.
_Key = tuple[int, str] | int


class RowTrace:
    """A scratch copy of the operations that lead to tensors.

    Args:
        targets: symbolic tensors, of a step's graph or of graphs inside of it.
        batch: the tensors of this replica's part of the batch; axis 0 is the rows.
        gathered: results of `tfd.all_rows`.
        fixed: other tensors that are the same on all replicas.
        primes_from: which of the free primes are taken.

    Raises:
        ValueError: the shapes cannot be inferred.
    """

    def __init__(
        self,
        targets: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        gathered: Sequence[tf.Tensor] = (),
        fixed: Iterable[tf.Tensor] = (),
        primes_from: int = 0,
    ):
        graph = batch[0].graph
        roots, of_all = set(map(_key, batch)), set(map(_key, gathered))
        found = _Slice(targets, roots | of_all | set(map(_key, fixed)), graph)
        self._rows, self._all_rows = found.free_primes(primes_from)
        kinds = {tensor.op.type for tensor in batch} - {"Placeholder"}
        # Of another replica's batch: what is made of it is the same on all replicas.
        self.crosses_replicas = any(
            tensor.op.type in kinds for key, tensor in found.cut.items() if key not in roots
        )
        definition = tf.compat.v1.GraphDef(versions=graph.graph_def_versions)
        dependent = set()
        for key, tensor in found.cut.items():
            name, shape = found.name(tensor).split(":")[0], tensor.shape
            of_argument = tensor.graph is not graph and tensor.op.type == "Placeholder"
            of_part = key in roots or of_argument
            if (of_part or key in of_all) and shape.rank and shape[0] is None:
                shape = tf.TensorShape([self._rows if of_part else self._all_rows, *shape[1:]])
            if of_part or tensor.op.type in _CALLS:
                dependent.add(name)
            node = definition.node.add(op="Placeholder", name=name)
            node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(shape.as_proto())
        for op in found.operations:
            definition.node.append(found.node(op))
        with tf.Graph().as_default() as self.graph:
            tf.graph_util.import_graph_def(definition, name="")
        self._dependent = dependent
        for op in self.graph.get_operations():  # in the order of their making
            if any(tensor.op.name in dependent for tensor in op.inputs):
                dependent.add(op.name)
        self.targets = [self.graph.get_tensor_by_name(found.name(each)) for each in targets]

    def is_of_part(self, tensor: tf.Tensor) -> bool:
        """Whether a scratch tensor has this replica's rows in one of its dimensions."""
        if _dimensions(tensor, self._rows):
            return True
        known = tensor.shape.is_fully_defined() or _dimensions(tensor, self._all_rows)
        return not known and tensor.op.name in self._dependent

    def begins_with_rows(self) -> bool:
        """Whether the first target has one entry for each of this replica's rows."""
        shape = self.targets[0].shape
        return bool(shape.rank) and shape[0] == self._rows

    def entries_of_row(self) -> int | None:
        """How many entries the first target has for each of this replica's rows, if so many."""
        size = self.targets[0].shape.num_elements()
        return None if size is None or size % self._rows else size // self._rows

    def compares_rows(self) -> tf.Operation | None:
        """An operation that makes a dimension of this replica's rows beside another one."""
        for op in self.graph.get_operations():
            most = max((_dimensions(each, self._rows) for each in op.inputs), default=0)
            if most == 1 and any(_dimensions(each, self._rows) > 1 for each in op.outputs):
                return op
        return None


def _dimensions(tensor: tf.Tensor, rows: int) -> int:
    """In how many of its dimensions a scratch tensor has rows, of which there are so many."""
    sizes = tensor.shape.as_list() if tensor.shape.rank else []
    return sum(bool(size) and size % rows == 0 for size in sizes)


def may_place_rows(value: tf.Tensor) -> bool:
    """Whether a `RowTrace` of it is worth its time: unknown sizes end in what is no statistic."""

    def unknown(tensor: tf.Tensor) -> bool:
        return not tensor.shape.is_fully_defined()

    def ends(op: tf.Operation) -> bool:
        return op.type not in _REDUCING

    return unknown(value) or places_rows(value, unknown, ends) is not None


def places_rows(
    value: tf.Tensor,
    has_rows: Callable[[tf.Tensor], bool],
    places: Callable[[tf.Operation], bool],
) -> tf.Operation | None:
    """The operation by which single rows came into a tensor without rows, if there is one."""
    waiting, seen = [value], set()
    while waiting:
        tensor = waiting.pop()
        op = tensor.op
        if op.name in seen:
            continue
        seen.add(op.name)
        data = list(op.inputs)[: _DATA_INPUTS.get(op.type)]
        with_rows = [each for each in data if has_rows(each)]
        if with_rows and places(op):
            return op
        if op.type not in _REDUCING:
            waiting += [each for each in data if not has_rows(each)]
    return None


def may_compare_rows(targets: Sequence[tf.Tensor], batch: Sequence[tf.Tensor]) -> bool:
    """Whether a `RowTrace` of them is worth its time: an unknown size comes beside another one."""

    def unknown(tensor: tf.Tensor) -> int:
        return 0 if tensor.shape.rank is None else tensor.shape.as_list().count(None)

    found = _Slice(targets, set(map(_key, batch)), batch[0].graph)
    return any(
        unknown(output) > max([1, *map(unknown, op.inputs)])
        for op in found.operations
        for output in op.outputs
    )


_ADDED = ("AddN", "AddV2", "Identity", "Neg", "Sub")
_SCALED = ("DivNoNan", "Mul", "RealDiv")


def sums_in_loss(target: tf.Tensor) -> Iterator[tuple[tf.Tensor, bool]]:
    """The tensors whose plain sums are terms of a loss, times or over constants.

    With each comes whether it is the divisor in a ratio of two sums or means.
    """
    waiting = [target]
    while waiting:
        op = waiting.pop().op
        terms = [each for each in map(_before_casts, op.inputs) if each.op.type != "Const"]
        is_ratio = [term.op.type in ("Mean", "Sum") for term in terms] == [True, True]
        if op.type == "Sum":
            yield op.inputs[0], False
        elif op.type in _ADDED or (op.type in _SCALED and len(terms) == 1):
            waiting += terms
        elif op.type in ("DivNoNan", "RealDiv") and is_ratio:
            yield terms[1].op.inputs[0], True


def _before_casts(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Cast":
        tensor = tensor.op.inputs[0]
    return tensor


def follows_from(value: tf.Tensor, sources: Sequence[tf.Tensor]) -> bool:
    """Whether a value of a graph is computed from any of these tensors of the graph."""
    wanted, waiting, seen = set(map(_key, sources)), [value], set[_Key]()
    while waiting:
        tensor = waiting.pop()
        if _key(tensor) in wanted:
            return True
        if _key(tensor) not in seen:
            seen.add(_key(tensor))
            waiting += tensor.op.inputs
    return False


class _Slice:
    """The operations that lead to tensors, across the graphs in which they are.

    Args:
        stops: the keys of tensors that are not followed back.
        graph: the outermost graph to look at; None: all of them.

    Attributes:
        operations: those that can be copied.
        cut: by key, the tensors with which they begin: batches, variables, results of functions.
    """

    def __init__(self, targets: Sequence[tf.Tensor], stops: set[_Key], graph: tf.Graph | None):
        self.operations: list[tf.Operation] = []
        self.cut: dict[_Key, tf.Tensor] = {}
        self._captured: dict[_Key, tf.Tensor] = {}  # placeholder -> tensor of the outer graph
        self._numbers: dict[int, int] = {}  # of graphs, by id
        waiting, seen, copied = list(targets), set(), set()
        while waiting:
            tensor = waiting.pop()
            key = _key(tensor)
            if key in seen:
                continue
            seen.add(key)
            op = tensor.op
            outer = None if tensor.graph is graph else _captured_as(tensor)
            if key in stops:
                self.cut[key] = tensor
            elif outer is not None and tf.is_symbolic_tensor(outer):
                self._captured[key] = outer
                waiting.append(outer)
            elif _begins(op):
                self.cut[key] = tensor
            elif (id(op.graph), op.name) not in copied:
                copied.add((id(op.graph), op.name))
                self.operations.append(op)
                waiting.extend(op.inputs)

    def name(self, tensor: tf.Tensor) -> str:
        """The name of a tensor in the scratch graph."""
        while _key(tensor) in self._captured:
            tensor = self._captured[_key(tensor)]
        name = self._name(tensor.op)
        if _key(tensor) in self.cut:
            return f"cut/{name}_{tensor.value_index}:0"
        return f"{name}:{tensor.value_index}"

    def node(self, op: tf.Operation) -> tf.compat.v1.NodeDef:
        """An operation as it is in the scratch graph."""
        return _copied_node(op, self._name(op), map(self.name, op.inputs))

    def free_primes(self, begin: int) -> tuple[int, int]:
        """Two primes that divide no known size."""
        outputs = [output for op in self.operations for output in op.outputs]
        shapes = [each.shape for each in (*outputs, *self.cut.values()) if each.shape.rank]
        sizes = {size for shape in shapes for size in shape.as_list() if size}
        free = [prime for prime in _PRIMES if all(size % prime for size in sizes)][begin:]
        if len(free) < 2:
            raise ValueError("no two primes are left for the rows")
        return free[0], free[1]

    def _name(self, op: tf.Operation) -> str:
        number = self._numbers.setdefault(id(op.graph), len(self._numbers))
        return f"graph_{number}/{op.name}"


def _copied_node(op: tf.Operation, name: str, inputs: Iterable[str]) -> tf.compat.v1.NodeDef:
    """An operation for another graph, on no device and without private attributes."""
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(op.node_def)
    node.name = name
    node.device = ""
    node.input[:] = inputs
    for private in [attribute for attribute in node.attr if attribute.startswith("_")]:
        del node.attr[private]
    return node


def _captured_as(tensor: tf.Tensor) -> tf.Tensor | None:
    """The tensor outside of a function that a placeholder of its graph stands for."""
    if tensor.op.type != "Placeholder":
        return None
    captures = getattr(tensor.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is tensor), None)


def _begins(op: tf.Operation) -> bool:
    """Whether an operation is left out, and its results taken as they are."""
    kinds = {tensor.dtype.base_dtype for tensor in (*op.inputs, *op.outputs)}
    return (
        op.type == "Placeholder"
        or op.type in _CALLS
        or op.type.startswith("Collective")
        or not kinds.isdisjoint({tf.resource, tf.variant})
    )


# What indices are, on several replicas.
BATCH = "batch"  # of each replica's rows


CONSTANT = "constant"  # the same on every replica


DISTINCT = "distinct"  # of each replica's rows, without duplicates


# How a tensor depends on the batch.
_SAME = 0  # not at all


_SHAPE = 1  # a shape, of which the first number counts rows


_VARIES = 2


# Of the stateful operations, those whose result follows from what they get.
_READS = {
    *("LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather"),
    *("ResourceGatherNd", "VarHandleOp", "PartitionedCall", "StatefulPartitionedCall"),
    *("If", "While"),
}


_GATHERS = frozenset(["GatherV2", "ResourceGather"])


# Operations that make more entries of rows than there are rows.
_JOINS = frozenset(["ConcatV2", "Reshape", "Tile"])


# Which input is the shape of the result.
_SHAPE_INPUTS = {"Fill": 0, "BroadcastTo": 1}


_SAME_NUMBERS = frozenset(["Cast", "Identity", "PreventGradient", "Snapshot", "StopGradient"])


_SAME_ORDER = _SAME_NUMBERS | {"ExpandDims", "Reshape", "Squeeze"}


class _Operation(NamedTuple):
    """One operation, of a graph or run eagerly.

    Attributes:
        type: such as "MatMul".
        inputs: its input tensors.
        output: the number of the output that is looked at.
        attribute: name -> value of an attribute of the operation.
        graph: that it is in; None if it ran eagerly.
    """

    type: str
    inputs: Sequence[tf.Tensor]
    output: int = 0
    attribute: Callable[[str], Any] = lambda _: None
    graph: tf.Graph | None = None

    def function(self, attribute: str) -> tf.Graph | None:
        """The graph of a function that it calls; None where that is not known."""
        return function_graph(self.graph, self.attribute(attribute).name)


class BatchDependence:
    """The tensors that depend on the batch in one replica's step.

    Args:
        batch: what the step gets, a structure of tensors.
        part_size: rows of the part where that is known when the step is traced, else None.
    """

    def __init__(self, batch: Structure, part_size: int | None = None):
        self._part_size = part_size
        self._states: dict[_Key, int] = {}
        self._blocks_known: dict[_Key, int] = {}
        self._recorded: dict[int, _Operation] = {}
        self._alive: list[tf.Tensor] = []  # eager tensors are known by their ids
        self._set(_leaves(batch), _VARIES)

    def set_equal(self, values: Structure) -> None:
        """Tell that these tensors are the same on every replica."""
        self._set(_leaves(values), _SAME)

    def is_equal(self, value: Gradient) -> bool:
        """Whether a tensor, or IndexedSlices, is the same on every replica."""
        return all(self._state(leaf) == _SAME for leaf in _leaves(value))

    def parts_of(self, indices: tf.Tensor) -> list[tuple[tf.Tensor, str]]:
        """(part, kind) of indices that were concatenated, as those of several lookups are."""
        operation = self._source(indices)
        if operation.type == "ConcatV2" and tf.get_static_value(operation.inputs[-1]) == 0:
            return [part for each in operation.inputs[:-1] for part in self.parts_of(each)]
        return [(indices, self._kind(indices))]

    def blocks_of_rows(self, shape: tf.Tensor) -> int:
        """How many tensors, one after another, give the size of a shape's first dimension.

        0 where it does not depend on the batch.
        """
        size = self._first_of(shape)
        if self._state(size) == _SAME:
            return 0
        return self._blocks_of_size(size)

    def joined_rows(self, size: int) -> tf.Tensor | None:
        """The last tensor of so many entries that was made of rows, one after another.

        Where sizes are numbers, it tells what a number counts.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        operations = [] if graph is None else graph.get_operations()
        made = self._alive if graph is None else [op.outputs[0] for op in operations if op.outputs]
        for tensor in reversed(made):
            fits = bool(tensor.shape.rank) and tensor.shape[0] == size
            is_join = fits and self._operation(tensor).type in _JOINS
            if is_join and self._state(tensor) == _VARIES:
                return tensor
        return None

    def are_row_numbers(self, tensor: tf.Tensor) -> bool:
        """Whether these are the numbers from 0 to a size that depends on the batch."""
        operation = self._source(tensor)
        return operation.type == "Range" and tf.get_static_value(operation.inputs[0]) == 0

    def _first_of(self, shape: tf.Tensor) -> tf.Tensor:
        """The tensor that gives the first number of a shape: a scalar, or a shape itself."""
        while True:
            operation = self._operation(shape)
            if operation.type in ("Pack", "ConcatV2", *_SAME_NUMBERS):
                shape = operation.inputs[0]
            else:
                return shape

    def _blocks_of_size(self, size: tf.Tensor) -> int:
        operation = self._operation(size)
        if operation.type == "Shape":
            return self.blocks_in(operation.inputs[0])
        if operation.type in ("AddV2", "Add"):
            return sum(map(self._blocks_of_size, operation.inputs))
        if operation.type in ("StridedSlice", *_SAME_NUMBERS):
            return self._blocks_of_size(operation.inputs[0])
        return 1

    def blocks_in(self, tensor: tf.Tensor) -> int:
        """How many tensors are one after another in the first dimension of a tensor."""
        passed = []
        while (key := _key(tensor)) not in self._blocks_known:
            passed.append(key)
            operation = self._operation(tensor)
            if operation.type == "ConcatV2" and tf.get_static_value(operation.inputs[-1]) == 0:
                count = sum(map(self.blocks_in, operation.inputs[:-1]))
                break
            if operation.type in _SHAPE_INPUTS:
                shape = operation.inputs[_SHAPE_INPUTS[operation.type]]
                count = self._blocks_of_size(self._first_of(shape))
                break
            before = self._before(operation)
            if before is None:
                count = 1
                break
            tensor = before
        else:
            count = self._blocks_known[key]
        self._blocks_known.update(dict.fromkeys(passed, count))
        return count

    def _before(self, operation: _Operation) -> tf.Tensor | None:
        """The input that gives the first dimension of an operation's output; None if unknown."""
        if operation.type in _GATHERS:
            return operation.inputs[1]
        if operation.type in _CALLS or operation.type in ("Pack", "Shape", "Tile"):
            return None
        return next((each for each in operation.inputs if self._may_have_rows(each)), None)

    def _may_have_rows(self, tensor: tf.Tensor) -> bool:
        """Whether its first dimension may count rows of the part."""
        if not tensor.shape.rank:
            return False
        size = tensor.shape[0]
        return size is None or bool(self._part_size and size % self._part_size == 0)

    def recording(self) -> AbstractContextManager[None]:
        """Scope of an eager step, in which what is run is recorded."""
        return recording_operations(self._record)

    def _record(
        self,
        kind: str,
        inputs: Sequence[tf.Tensor],
        attributes: dict[str, Any],
        outputs: Sequence[tf.Tensor],
    ) -> None:
        for number, output in enumerate(outputs):
            self._recorded[id(output)] = _Operation(kind, inputs, number, attributes.__getitem__)
        self._alive.extend(outputs)

    def _kind(self, indices: tf.Tensor) -> str:
        if self._state(indices) == _SAME:
            return BATCH if self._repeats_by_row(indices) else CONSTANT
        source = self._source(indices)
        return DISTINCT if _OF_DISTINCT.get(source.type) == source.output else BATCH

    def _source(self, indices: tf.Tensor) -> _Operation:
        """The operation that has made these numbers, in this order."""
        operation = self._operation(indices)
        while operation.type in _SAME_ORDER:
            operation = self._operation(operation.inputs[0])
        return operation

    def _repeats_by_row(self, indices: tf.Tensor) -> bool:
        """Whether each index is there for each row: constants made with the part's known size."""
        size = self._part_size
        if size is None or size < 2:
            return False
        values = self._constant_value(indices)
        if values is None or not values.size:
            return False
        _, counts = np.unique(values, return_counts=True)
        return bool((counts % size == 0).all())

    def _state(self, tensor: tf.Tensor) -> int:
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

    def _missing(self, operation: _Operation) -> tf.Tensor | None:
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
        return _BY_OUTPUT.get(operation.type, _joined)(operation, states)

    def _operation(self, tensor: tf.Tensor) -> _Operation:
        if not tf.is_symbolic_tensor(tensor):
            return self._recorded.get(id(tensor), _Operation("Const", ()))
        outer = _captured_as(tensor)
        if outer is not None:  # from outside of this function
            return _Operation("Identity", (outer,))
        op = tensor.op
        return _Operation(op.type, op.inputs, tensor.value_index, op.get_attr, op.graph)

    def _set(self, tensors: Iterable[tf.Tensor], state: int) -> None:
        for tensor in tensors:
            self._states[_key(tensor)] = state
            self._alive.append(tensor)

    def _constant_value(self, tensor: tf.Tensor) -> np.ndarray | None:
        """The numbers of a tensor that depends on constants alone, else None; an array."""
        if not tf.is_symbolic_tensor(tensor):
            return None if tensor.dtype == tf.resource else tensor.numpy()
        value = tf.get_static_value(tensor)
        if value is not None:
            return value
        found = _Slice([tensor], set(), None)
        given = {found.name(each): tf.get_static_value(each) for each in found.cut.values()}
        unknown = any(value is None for value in given.values())
        if unknown or any(is_stateful(op.type) for op in found.operations):
            return None
        nodes = map(found.node, found.operations)
        graph = tf.compat.v1.GraphDef(node=nodes, versions=tensor.graph.graph_def_versions)
        run = functools.partial(
            tf.graph_util.import_graph_def, graph, given, [found.name(tensor)], name=""
        )
        with tf.init_scope():
            return tf.function(run, autograph=False)()[0].numpy()


# How an output depends on the batch, by how the inputs do.
_Rule: TypeAlias = Callable[[_Operation, Sequence[int]], int]


def _joined(operation: _Operation, states: Sequence[int]) -> int:
    """Of an operation whose outputs depend on all that it gets."""
    return max(states) if operation.type in _SAME_NUMBERS else _VARIES


def _shape(operation: _Operation, states: Sequence[int]) -> int:
    return _SHAPE if states[operation.output] == _VARIES else _SAME


def _slice_of_shape(operation: _Operation, states: Sequence[int]) -> int:
    if states[0] != _SHAPE or max(states[1:]) != _SAME:
        return _VARIES
    begin, stride = (tf.get_static_value(operation.inputs[number]) for number in (1, 3))
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


def _number_of_shape(operation: _Operation, states: Sequence[int]) -> int:
    return _SAME if states[0] == _SHAPE and operation.output > 0 else _VARIES


def _gathered(operation: _Operation, states: Sequence[int]) -> int:
    places = tf.get_static_value(operation.inputs[1])
    if states[0] != _SHAPE or places is None or places.size == 0:
        return _VARIES
    return _SAME if (places > 0).all() else _VARIES


def _call(operation: _Operation, states: Sequence[int]) -> int:
    return _of_function(operation.function("f"), states, [operation.output])[0]


def _branch(operation: _Operation, states: Sequence[int]) -> int:
    if states[0] != _SAME:
        return _VARIES
    graphs = map(operation.function, ("then_branch", "else_branch"))
    return max(_of_function(graph, states[1:], [operation.output])[0] for graph in graphs)


def _loop(operation: _Operation, states: Sequence[int]) -> int:
    states, before = list(states), None
    while states != before:
        before = states
        after = _of_function(operation.function("body"), states, range(len(states)))
        states = list(map(max, states, after))
    turns = _of_function(operation.function("cond"), states, [0])[0]
    return states[operation.output] if turns == _SAME else _VARIES


def _of_function(
    graph: tf.Graph | None, states: Sequence[int], outputs: Sequence[int]
) -> list[int]:
    """How outputs of a function depend on the batch when its inputs do in the given ways."""
    if graph is None:
        return [_VARIES] * len(outputs)
    inside = BatchDependence(())
    for tensor, state in zip(graph.inputs, states, strict=True):
        inside._set([tensor], state)
    return [inside._state(graph.outputs[number]) for number in outputs]


_BY_OUTPUT: dict[str, _Rule] = {
    "IdentityN": lambda operation, states: states[operation.output],
    "Shape": _shape,
    "ShapeN": _shape,
    "Rank": lambda *_: _SAME,
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


def _leaves(values: Structure | Gradient) -> list[tf.Tensor]:
    leaves = tf.nest.flatten(values, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def _key(tensor: tf.Tensor) -> _Key:
    return (id(tensor.graph), tensor.name) if tf.is_symbolic_tensor(tensor) else id(tensor)


_INDICES = 1 << 32  # more than a table has rows


class PreparedReduction(NamedTuple):
    """One gradient, ready to be summed over replicas.

    Attributes:
        values: to be summed.
        finish: makes the gradient from the sums.
    """

    values: list[Gradient]
    finish: Callable[[list[Gradient]], Gradient]


def prepare_reduction(gradient: Gradient, dependence: BatchDependence) -> PreparedReduction:
    """Prepare a replica's dense or sparse gradient, which is scaled by its fraction already."""
    if not isinstance(gradient, tf.IndexedSlices):
        return PreparedReduction([gradient], lambda reduced: reduced[0])
    parts = dependence.parts_of(gradient.indices)
    if len(parts) == 1:
        return _of_one_lookup(gradient, parts[0][1])
    # The lookups of one table, concatenated by TensorFlow.
    sizes = tf.stack([tf.size(indices) for indices, _ in parts])
    values = tf.split(gradient.values, sizes, num=len(parts))
    indices = tf.split(gradient.indices, sizes, num=len(parts))
    lookups = [
        _of_one_lookup(tf.IndexedSlices(v, i, gradient.dense_shape), kind)
        for v, i, (_, kind) in zip(values, indices, parts, strict=True)
    ]
    return PreparedReduction(
        [value for lookup in lookups for value in lookup.values],
        lambda reduced: _together(finished(lookups, reduced)),
    )


def finished(gradients: Sequence[PreparedReduction], reduced: Iterable[Gradient]) -> list[Gradient]:
    """The gradients, of all their `values` in order, each reduced."""
    rest = iter(reduced)
    return [each.finish([next(rest) for _ in each.values]) for each in gradients]


def _of_one_lookup(slices: tf.IndexedSlices, kind: str) -> PreparedReduction:
    if kind == BATCH:
        return PreparedReduction([slices], lambda reduced: reduced[0])
    if kind == CONSTANT:
        # An index may be there several times, and a sequence be longer on another worker.
        places = tf.range(tf.size(slices.indices, tf.int64))
        places = tf.IndexedSlices(places, slices.indices, slices.dense_shape[:1])
        return PreparedReduction([slices, places], lambda reduced: _summed(*reduced))
    return PreparedReduction([slices], lambda reduced: _summed(reduced[0]))


def _summed(slices: Gradient, places: tf.IndexedSlices | None = None) -> Gradient:
    """One slice for each index, or for each pair of index and place."""
    if not isinstance(slices, tf.IndexedSlices):
        return slices  # a strategy of the user's has made it dense
    keys = tf.cast(slices.indices, tf.int64)
    if places is not None:
        keys += places.values * _INDICES
    keys, number = tf.unique(keys, tf.int64)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(slices.values, number, tf.size(keys)),
        tf.cast(keys % _INDICES, slices.indices.dtype),
        slices.dense_shape,
    )


def _together(lookups: list[Gradient]) -> Gradient:
    if not all(isinstance(slices, tf.IndexedSlices) for slices in lookups):
        return tf.add_n([tf.convert_to_tensor(slices) for slices in lookups])
    return tf.IndexedSlices(
        tf.concat([slices.values for slices in lookups], 0),
        tf.concat([slices.indices for slices in lookups], 0),
        lookups[0].dense_shape,
    )
