"""Where the rows of a batch go in a traced step, found from shapes.

In a graph the number of rows of a batch is unknown, and so are other sizes. To tell them apart, the
operations that lead to a tensor are copied to a scratch graph. There this replica's part has a
prime number of rows, and the global batch another prime. TensorFlow infers all shapes again; a
dimension that is a multiple of one of the primes is one of rows. The scratch graph never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["RowTrace", "may_compare_rows", "places_rows"]

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)

# Operations that put single rows into something without rows.
_PLACING = {
    "Concat",
    "ConcatV2",
    "DynamicStitch",
    "Gather",
    "GatherNd",
    "GatherV2",
    "Pack",
    "Pad",
    "PadV2",
    "Reshape",
    "Slice",
    "Split",
    "SplitV",
    "StridedSlice",
    "TensorScatterUpdate",
    "TensorStridedSliceUpdate",
    "TopK",
    "TopKV2",
    "Unpack",
    "XlaDynamicUpdateSlice",
}
# Operations behind which no single row is left: their result is a statistic of the rows.
_REDUCING = {
    *("All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum", "EuclideanNorm"),
    *("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "L2Loss"),
    *("Bincount", "DenseBincount", "ScatterNd", "TensorScatterAdd", "TensorScatterSub"),
    *("SegmentSum", "SegmentMean", "UnsortedSegmentSum", "UnsortedSegmentMax", "Shape", "Size"),
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

HasRows = Callable[[tf.Tensor], bool]


class RowTrace:
    """A scratch copy of the operations that lead to tensors.

    Args:
        targets: symbolic tensors, of a step's graph or of graphs inside of it.
        batch: the tensors of this replica's part of the batch; axis 0 is the rows.
        gathered: results of `tfd.all_rows`.
        fixed: other tensors that are the same on all replicas.

    Raises:
        ValueError: the shapes cannot be inferred.
    """

    def __init__(
        self,
        targets: Sequence[tf.Tensor],
        batch: Sequence[tf.Tensor],
        gathered: Sequence[tf.Tensor] = (),
        fixed: Iterable[tf.Tensor] = (),
    ):
        graph = batch[0].graph
        roots, of_all = set(map(_name_of, batch)), set(map(_name_of, gathered))
        found = _Slice(targets, roots | of_all | set(map(_name_of, fixed)), graph)
        self._rows, self._all_rows = _primes_for(found)
        kinds = {tensor.op.type for tensor in batch} - {"Placeholder"}
        # Of another replica's batch: what is made of it is the same on all replicas.
        self.crosses_replicas = any(
            tensor.op.type in kinds for key, tensor in found.cut.items() if key not in roots
        )
        definition = tf.compat.v1.GraphDef(versions=graph.graph_def_versions)
        dependent = set()
        for key, tensor in found.cut.items():
            shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
            of_argument = tensor.graph is not graph and tensor.op.type == "Placeholder"
            if key in roots or of_argument:
                shape = _with_rows(shape, self._rows)
            elif key in of_all:
                shape = _with_rows(shape, self._all_rows)
            if key in roots or of_argument or tensor.op.type in _CALLS:
                dependent.add(found.name(tensor).split(":")[0])
            node = definition.node.add(op="Placeholder", name=found.name(tensor).split(":")[0])
            node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
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
        if tensor.shape.rank is None:
            return tensor.op.name in self._dependent
        sizes = tensor.shape.as_list()
        if any(size and size % self._rows == 0 for size in sizes):
            return True
        of_all = any(size and size % self._all_rows == 0 for size in sizes)
        return None in sizes and not of_all and tensor.op.name in self._dependent

    def compares_rows(self) -> tf.Operation | None:
        """An operation that makes a dimension of this replica's rows beside another one."""

        def dimensions(tensor: tf.Tensor) -> int:
            sizes = [] if tensor.shape.rank is None else tensor.shape.as_list()
            return sum(bool(size) and size % self._rows == 0 for size in sizes)

        for op in self.graph.get_operations():
            most = max(map(dimensions, op.inputs), default=0)
            if most == 1 and any(dimensions(output) > 1 for output in op.outputs):
                return op
        return None


def may_place_rows(value: tf.Tensor) -> bool:
    """Whether a `RowTrace` of it is worth its time: unknown sizes end in what is no statistic."""

    def unknown(tensor: tf.Tensor) -> bool:
        return tensor.shape.rank is None or None in tensor.shape.as_list()

    def ends(op: tf.Operation) -> bool:
        return op.type not in _REDUCING

    return unknown(value) or places_rows(value, unknown, ends) is not None


def places_rows(
    value: tf.Tensor,
    has_rows: HasRows,
    places: Callable[[tf.Operation], bool] = lambda op: op.type in _PLACING,
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

    found = _Slice(targets, set(map(_name_of, batch)), batch[0].graph)
    return any(
        unknown(output) > max([1, *map(unknown, op.inputs)])
        for op in found.operations
        for output in op.outputs
    )


class _Slice:
    """The operations that lead to tensors, across the graphs in which they are.

    Attributes:
        operations: those that can be copied.
        cut: by key, the tensors with which they begin: batches, variables, results of functions.
    """

    def __init__(self, targets: Sequence[tf.Tensor], stops: set[Any], graph: Any):
        self.operations: list[tf.Operation] = []
        self.cut: dict[Any, tf.Tensor] = {}
        self._captured: dict[Any, tf.Tensor] = {}  # placeholder -> the tensor of the outer graph
        self._graphs: list[Any] = []
        waiting, seen, copied = list(targets), set(), set()
        while waiting:
            tensor = waiting.pop()
            key = _name_of(tensor)
            if key in seen:
                continue
            seen.add(key)
            op = tensor.op
            outer = None if tensor.graph is graph else _captured_as(tensor)
            if key in stops:
                self.cut[key] = tensor
            elif outer is not None:
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
        while _name_of(tensor) in self._captured:
            tensor = self._captured[_name_of(tensor)]
        name = self._name(tensor.op)
        if _name_of(tensor) in self.cut:
            return f"cut/{name}_{tensor.value_index}:0"
        return f"{name}:{tensor.value_index}"

    def node(self, op: tf.Operation) -> Any:
        """An operation as it is in the scratch graph."""
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(op.node_def)
        node.name = self._name(op)
        node.device = ""
        del node.input[:]
        node.input.extend(self.name(tensor) for tensor in op.inputs)
        for name in [name for name in node.attr if name.startswith("_")]:
            del node.attr[name]
        return node

    def sizes(self) -> Iterator[int]:
        """All sizes that are known."""
        outputs = [output for op in self.operations for output in op.outputs]
        for tensor in [*outputs, *self.cut.values()]:
            yield from filter(None, tensor.shape.as_list() if tensor.shape.rank else ())

    def _name(self, op: tf.Operation) -> str:
        if not any(graph is op.graph for graph in self._graphs):
            self._graphs.append(op.graph)
        number = next(n for n, graph in enumerate(self._graphs) if graph is op.graph)
        return f"graph_{number}/{op.name}"


def _name_of(tensor: tf.Tensor) -> tuple[int, str]:
    return id(tensor.graph), tensor.name


def _captured_as(tensor: tf.Tensor) -> tf.Tensor | None:
    """The tensor of the outer graph that a placeholder of a function's graph stands for."""
    if tensor.op.type != "Placeholder":
        return None
    for outer, inner in getattr(tensor.graph, "captures", ()):
        if inner is tensor and tf.is_symbolic_tensor(outer):
            return outer
    return None


def _begins(op: tf.Operation) -> bool:
    """Whether an operation is left out, and its results taken as they are."""
    kinds = {tensor.dtype.base_dtype for tensor in (*op.inputs, *op.outputs)}
    return (
        op.type == "Placeholder"
        or op.type in _CALLS
        or op.type.startswith("Collective")
        or not kinds.isdisjoint({tf.resource, tf.variant})
    )


def _with_rows(shape: list[int | None] | None, rows: int) -> list[int | None] | None:
    if not shape or shape[0] is not None:
        return shape
    return [rows, *shape[1:]]


def _primes_for(found: _Slice) -> tuple[int, int]:
    """Two primes that divide no known size."""
    sizes = set(found.sizes())
    free = [prime for prime in _PRIMES if not any(size % prime == 0 for size in sizes)]
    if len(free) < 2:
        raise ValueError("no two primes are left for the rows")
    return free[0], free[1]
