"""Which tensors of a step have rows of the batch, and which operations mix the rows.

A tensor is the same on every replica if it does not follow from the replica's part of the batch
(`EqualTensors`). That is reachability in the graph: what is computed from the part, from random
numbers with a state, or by Python may differ. Sums over replicas are the same on all of them. If
an equal tensor is not recognized, it is averaged over replicas, which changes nothing.

`rows_of` says how a tensor holds the rows of the part. A replica's step sees only these rows. What
puts them in another order, compares them with each other, or divides by a statistic of them, gives
other numbers than one device (`mixed_rows`). All of this goes by the types of operations, in the
tables of this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import Structure

# Of a variable: dense, or slices of what was looked up.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

# A tensor as a graph knows it: the graph, and the name in the graph.
Key: TypeAlias = tuple[Any, str]

# Stateful operations whose result follows from their inputs.
_READS = {
    *("LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather"),
    *("ResourceGatherNd", "VarHandleOp"),
}


class Rows(NamedTuple):
    """How a tensor of a step holds the rows of the part.

    Attributes:
        axis: the dimension of the rows.
        blocks: how often all rows follow one another in this dimension, as two times in
            `tf.concat([x, x], 0)`; 0 if that is not known.
        is_selection: the dimension holds selected rows, or entries of rows. Its length is not a
            fixed number for each row.
    """

    axis: int
    blocks: int = 1
    is_selection: bool = False


class EqualTensors:
    """The tensors of a replica's step that are the same on every replica, as all eager ones are.

    Args:
        batch: tensors that may differ.

    Attributes:
        rows: how some tensors hold rows, by their keys; see `rows_of`.
    """

    def __init__(self, batch: Structure = ()):
        self._known: dict[Key, bool] = {}
        self.rows: dict[Key, Rows] = {}
        self.add(batch, equal=False)

    def add(self, values: Structure, *, equal: bool = True) -> None:
        """Note that these tensors are the same on every replica, or may differ."""
        for tensor in symbolic_tensors(values):
            self._known[tensor_key(tensor)] = equal

    def has(self, values: Structure | Gradient) -> bool:
        """Whether these tensors are known to be the same on every replica."""
        return all(map(self._is_equal, symbolic_tensors(values)))

    def _is_equal(self, tensor: tf.Tensor) -> bool:
        stack = [tensor]
        while stack:
            key, inputs = tensor_key(stack[-1]), _inputs(stack[-1])
            known = [None] if inputs is None else [self._known.get(tensor_key(x)) for x in inputs]
            if key in self._known or inputs is None or False in known or None not in known:
                self._known.setdefault(key, all(known))
                stack.pop()
            else:
                stack.append(inputs[known.index(None)])
        return self._known[tensor_key(tensor)]


def _inputs(tensor: tf.Tensor) -> Sequence[tf.Tensor] | None:
    """The symbolic tensors that a tensor follows from; None if that is not known."""
    op = tensor.op
    if op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outer = [outer for outer, inner in captures if inner is tensor]
        return [tensor for tensor in outer if tf.is_symbolic_tensor(tensor)] if outer else None
    if op.op_def.is_stateful and op.type not in _READS:  # random numbers, data, Python
        return None
    if op.type == "IdentityN":
        return [op.inputs[tensor.value_index]]
    return [] if _is_other_size(tensor) else op.inputs


def _is_other_size(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a rank, or a size of another dimension than the first."""
    op = tensor.op
    if op.type not in ("StridedSlice", "Unpack") or op.inputs[0].op.type != "Shape":
        return op.type == "Rank"
    if op.type == "Unpack":
        return bool(tensor.value_index > 0)
    begin, stride = tf.get_static_value(op.inputs[1]), tf.get_static_value(op.inputs[3])
    if begin is None or stride is None or stride[0] < 0 or op.get_attr("begin_mask"):
        return False
    rank = op.inputs[0].op.inputs[0].shape.rank
    return bool(begin[0] > 0 or (rank is not None and -rank < begin[0] < 0))


def symbolic_tensors(values: Structure | Gradient) -> list[tf.Tensor]:
    """Returns the tensors of a graph in a structure."""
    leaves = tf.nest.flatten(values, expand_composites=True)
    return list(filter(tf.is_symbolic_tensor, leaves))


def tensor_key(tensor: tf.Tensor) -> Key:
    return tensor.graph, tensor.name


def follows_from(value: tf.Tensor, sources: Sequence[tf.Tensor]) -> bool:
    """Whether a value of a graph is computed from any of these tensors of the graph."""
    wanted = set(map(tensor_key, sources))
    before = tensors_before([value], lambda tensor: tensor.op.inputs)
    return any(tensor_key(tensor) in wanted for tensor in before)


def tensors_before(
    targets: Iterable[tf.Tensor],
    inputs: Callable[[tf.Tensor], Iterable[tf.Tensor]],
    seen: set[Key] | None = None,
) -> Iterator[tf.Tensor]:
    """Yields tensors of a graph, each once, and all tensors from which they are computed.

    Args:
        inputs: returns the inputs of a tensor to go on with.
        seen: the keys of tensors to leave out; gets those that are yielded.
    """
    waiting, seen = list(targets), set() if seen is None else seen
    while waiting:
        tensor = waiting.pop()
        if tensor_key(tensor) not in seen:
            seen.add(tensor_key(tensor))
            yield tensor
            waiting += inputs(tensor)


def unknown_sizes(tensor: tf.Tensor) -> int:
    """How many dimensions of a tensor have an unknown size."""
    return 0 if tensor.shape.rank is None else tensor.shape.as_list().count(None)


def with_unknown_rows(batch: Structure) -> Structure:
    """A batch in a graph, whose first dimension has an unknown size.

    The number of a part's rows would otherwise become a constant, equal on every replica.
    """

    def hidden(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not tf.is_symbolic_tensor(leaf):
            return leaf
        if not leaf.shape.rank or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return tf.nest.map_structure(hidden, batch)


# Operations that write or add rows where indices say: on each replica other rows.
_PLACING = {"TensorScatterUpdate", "TensorStridedSliceUpdate", "XlaDynamicUpdateSlice"}
_SCATTERING = {
    *("ScatterNd", "SegmentMax", "SegmentMean", "SegmentMin", "SegmentSum", "SparseToDense"),
    *("TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub"),
    *("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", "UnsortedSegmentSum"),
}


def places_rows(value: tf.Tensor, equal: EqualTensors, *, is_metric: bool) -> str | None:
    """Returns the type of the operation that writes a part's rows to a variable, or None.

    Such an operation has an unknown size, or it updates a slice.
    """
    kinds = _PLACING if is_metric else _PLACING | _SCATTERING

    def follows(tensor: tf.Tensor) -> bool:
        return tensor.shape == value.shape and not equal.has(tensor)

    before = tensors_before([value], lambda tensor: filter(follows, tensor.op.inputs))
    for tensor in before if follows(value) else ():
        if unknown_sizes(tensor) or tensor.op.type in kinds:
            return str(tensor.op.type)
    return None


_SELECTING = {"DynamicPartition", "Unique", "UniqueV2", "Where"}
_STITCHING = {"DynamicStitch", "ParallelDynamicStitch"}  # puts partitions back in order
_GATHERING = {"GatherNd", "GatherV2", "ResourceGather"}
_REDUCING = {"All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"}


def rows_of(tensor: tf.Tensor, equal: EqualTensors) -> Rows | None:
    """Returns how a tensor of a graph holds the rows of the part; None if it has no rows.

    The rows of the batch are in its first dimension. From there, the operations that lead to the
    tensor are followed. An operation that is not known keeps the dimension.
    """
    if equal.has(tensor) and tensor_key(tensor) not in equal.rows:
        return None
    path = []
    ends = _SELECTING | _STITCHING
    while (key := tensor_key(tensor)) not in equal.rows and tensor.op.type not in ends:
        if (source := _source_of_rows(tensor, equal)) is None:
            break
        path.append((tensor, source))
        tensor = source
    if not unknown_sizes(tensor) or (equal.has(tensor) and key not in equal.rows):
        return None
    rows: Rows | None = equal.rows.get(key, _rows_at_first(tensor, equal))
    for result, source in reversed(path):
        if rows is not None:
            rows = _rows_after(result, source, rows, equal)
        shape = result.shape.as_list() if result.shape.rank else [None]
        if rows is not None and (rows.axis >= len(shape) or shape[rows.axis] is not None):
            rows = Rows(shape.index(None), blocks=0) if None in shape else None
    return rows


def _rows_at_first(tensor: tf.Tensor, equal: EqualTensors) -> Rows:
    """How a tensor holds rows that is not followed further."""
    if tensor.op.type in _SELECTING:
        return Rows(0, is_selection=True)
    if tensor.op.type == "TensorListStack" and _is_stack_of_words(tensor, equal):
        return Rows(1)
    return Rows(tensor.shape.as_list().index(None) if tensor.shape.rank else 0)


def _is_stack_of_words(tensor: tf.Tensor, equal: EqualTensors) -> bool:
    """Whether a loop over the words of sequences has stacked what it computed for each word."""
    handle = tensor.op.inputs[0]
    while handle.op.type in ("Identity", "StatelessWhile", "While"):
        handle = handle.op.inputs[handle.value_index]
    if handle.op.type != "TensorListReserve" or tensor.shape.as_list()[1:2] != [None]:
        return False
    size = behind(handle.op.inputs[1], ("Cast", "Identity"))
    if size.op.type != "StridedSlice" or size.op.inputs[0].op.type != "Shape":
        return equal.has(size)
    looped = size.op.inputs[0].op.inputs[0]
    rows, place = rows_of(looped, equal), tf.get_static_value(size.op.inputs[1])
    return rows is not None and place is not None and place[0] % looped.shape.rank != rows.axis


def _source_of_rows(tensor: tf.Tensor, equal: EqualTensors) -> tf.Tensor | None:
    """The input of an operation from which its result has unknown sizes."""
    op = tensor.op
    if op.type in _GATHERING and unknown_sizes(op.inputs[1]) and not equal.has(op.inputs[1]):
        return op.inputs[1]
    if op.inputs and op.inputs[0].op.type == "Shape":  # such as noise, drawn with this shape
        return op.inputs[0].op.inputs[0]
    of_part = (source for source in op.inputs if unknown_sizes(source) and not equal.has(source))
    return next(of_part, None)


def _rows_after(
    result: tf.Tensor, source: tf.Tensor, rows: Rows, equal: EqualTensors
) -> Rows | None:
    """How the result of an operation holds the rows of one of its inputs."""
    op, axis, rank = result.op, rows.axis, source.shape.rank or 0
    constants = [tf.get_static_value(value) for value in op.inputs[1:]]
    if op.type == "Transpose" and constants[0] is not None:
        return rows._replace(axis=constants[0].tolist().index(axis))
    if op.type == "Tile":
        times = None if constants[0] is None else int(constants[0][axis])
        packed = op.inputs[1].op
        if times is None and packed.type == "Pack":
            times = tf.get_static_value(packed.inputs[axis])
        return rows._replace(blocks=0 if times is None else rows.blocks * int(times))
    if op.type in ("OneHot", "Pack") or (op.type == "ExpandDims" and constants[0] is not None):
        added = int(constants[0]) if op.type == "ExpandDims" else op.get_attr("axis")
        return rows._replace(axis=axis + (added % (rank + 1) <= axis))
    if op.type == "ConcatV2" and constants[-1] is not None and constants[-1] % rank == axis:
        parts = [rows_of(part, equal) for part in op.inputs[:-1]]
        is_known = all(part and part.axis == axis and not part.is_selection for part in parts)
        blocks = [part.blocks for part in parts if part is not None]
        return rows._replace(blocks=sum(blocks) if is_known and all(blocks) else 0)
    if op.type == "Reshape":
        return _rows_after_reshape(result, source, rows)
    if op.type in _REDUCING and constants[0] is not None:
        gone = [int(number) % rank for number in np.reshape(constants[0], [-1])]
        keeps = op.type not in ("ArgMax", "ArgMin") and op.get_attr("keep_dims")
        return rows if keeps and axis not in gone else _without(rows, gone)
    if op.type == "Squeeze":
        sizes = source.shape.as_list() if rank else []
        gone = [number % rank for number in op.get_attr("squeeze_dims")]
        return _without(rows, gone or [i for i, size in enumerate(sizes) if size == 1])
    if op.type == "Einsum":
        return _rows_after_einsum(op, source, rows)
    if op.type in ("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"):
        return rows
    if op.type == "Unpack":
        return _without(rows, [op.get_attr("axis") % rank])
    if op.type == "MatMul":
        is_left = source is op.inputs[0]
        is_transposed = op.get_attr("transpose_a" if is_left else "transpose_b")
        is_contracted = is_transposed == (axis == (0 if is_left else 1))
        return None if is_contracted else rows._replace(axis=0 if is_left else 1)
    if op.type == "StridedSlice":
        return _rows_after_slice(op, rows)
    if op.type in _GATHERING:
        return _rows_after_gather(result, source, rows)
    missing = (result.shape.rank or rank) - rank  # of dimensions, which broadcasting adds
    return rows._replace(axis=axis + max(missing, 0))


def _without(rows: Rows, dimensions: Collection[int]) -> Rows | None:
    """Returns the rows after dimensions were removed; None if theirs is one of them."""
    if rows.axis in dimensions:
        return None
    return rows._replace(axis=rows.axis - sum(number < rows.axis for number in dimensions))


def _rows_after_reshape(result: tf.Tensor, source: tf.Tensor, rows: Rows) -> Rows:
    before, after = source.shape.as_list(), result.shape.rank and result.shape.as_list()
    if not after:
        return rows
    if rows.axis == 0 and after[0] == rows.blocks and after[1:2] == [None]:
        return Rows(1)
    is_kept = rows.axis < len(after) and before[: rows.axis] == after[: rows.axis]
    if is_kept and after[rows.axis] is None:
        return rows
    ahead = before[: rows.axis]
    if after[0] is None and None not in ahead:  # dimensions before the rows are merged with them
        return rows._replace(axis=0, blocks=rows.blocks * int(np.prod(ahead)))
    return Rows(after.index(None) if None in after else 0, 0)


def _rows_after_einsum(op: tf.Operation, source: tf.Tensor, rows: Rows) -> Rows | None:
    equation = tf.compat.as_str(op.get_attr("equation")).replace(" ", "")
    terms, _, result = equation.partition("->")
    number = next(i for i, tensor in enumerate(op.inputs) if tensor is source)
    if "." in equation:
        return rows._replace(blocks=0)
    letter = terms.split(",")[number][rows.axis]
    return rows._replace(axis=result.index(letter)) if letter in result else None


def _rows_after_gather(result: tf.Tensor, source: tf.Tensor, rows: Rows) -> Rows | None:
    """Rows after a lookup, of its indices or of the table in which they are looked up."""
    op, axis = result.op, rows.axis
    of_indices = source is op.inputs[1]
    if op.type == "GatherNd":
        return rows if of_indices else None
    batch = op.get_attr("batch_dims")
    at = 0 if op.type == "ResourceGather" else tf.get_static_value(op.inputs[2])
    if at is None:
        return rows._replace(blocks=0)
    at = int(at) % (op.inputs[0].shape.rank or 1) if op.type == "GatherV2" else 0
    if of_indices:
        return rows if axis < batch else rows._replace(axis=axis + at - batch)
    if at == axis:
        return Rows(axis, is_selection=True) if result.shape[axis] is None else None
    added = (op.inputs[1].shape.rank or 0) - batch - 1
    return rows._replace(axis=axis + (added if at < axis else 0))


def _rows_after_slice(op: tf.Operation, rows: Rows) -> Rows | None:
    """Returns the rows after a slice `x[...]`, from its entries for the dimensions."""
    masks = {name: op.get_attr(f"{name}_mask") for name in ("shrink_axis", "new_axis", "ellipsis")}
    begin, end = op.get_attr("begin_mask"), op.get_attr("end_mask")
    axis, dimension = 0, 0  # of the result, and of the input
    for place in range(int(op.inputs[1].shape[0] or 0)):
        has = {name: bool(mask >> place & 1) for name, mask in masks.items()}
        if has["ellipsis"]:
            break
        if has["new_axis"]:
            axis += 1
            continue
        if dimension == rows.axis:
            if has["shrink_axis"]:
                return None
            is_whole = begin >> place & 1 and end >> place & 1
            return rows._replace(axis=axis) if is_whole else Rows(axis, is_selection=True)
        axis += not has["shrink_axis"]
        dimension += 1
    return rows._replace(axis=rows.axis - dimension + axis)


SAME_ORDER = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient")


def behind(tensor: tf.Tensor, kinds: Collection[str]) -> tf.Tensor:
    """The tensor to which operations of these types were applied, one after another."""
    while tensor.op.type in kinds:
        tensor = tensor.op.inputs[0]
    return tensor


def _of_input(number: int) -> Callable[[tf.Operation], Collection[int]]:
    """The dimensions that a constant input of an operation names."""

    def axes(op: tf.Operation) -> Collection[int]:
        value = tf.get_static_value(op.inputs[number])
        return [] if value is None else np.reshape(value, [-1]).tolist()

    return axes


def _reversed(op: tf.Operation) -> Collection[int]:
    strides = tf.get_static_value(op.inputs[3])
    return [] if strides is None else np.flatnonzero(strides < 0).tolist()


# Operations that put entries in another order -> the dimensions in which they do.
_ORDERING: dict[str, Callable[[tf.Operation], Collection[int]]] = {
    "Cumprod": _of_input(1),
    "Cumsum": _of_input(1),
    "CumulativeLogsumexp": _of_input(1),
    "RandomShuffle": lambda op: [0],
    "ReverseV2": _of_input(1),
    "Roll": _of_input(2),
    "StridedSlice": _reversed,
    "TopKV2": lambda op: [-1],
}

# Operations by which losses compare rows with each other.
_COMPARING = {
    *("BatchMatMulV2", "Einsum", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual"),
    *("MatMul", "NotEqual", "SquaredDifference", "Sub"),
}

# Operations by which rows are set in relation to a statistic of all rows, such as their mean.
_DIVIDING = {"DivNoNan", "RealDiv", "Xdivy"}
_RELATING = _DIVIDING | {"Maximum", "Minimum", "Mul", "Pow", "SquaredDifference", "Sub"}

# Operations that are not linear: of a mean over rows they are not the mean over replicas.
_NOT_LINEAR = {"Maximum", "Minimum", "Pow", "SquaredDifference", *_DIVIDING} | {
    *("Abs", "Exp", "Expm1", "Log", "Log1p", "Reciprocal", "Relu", "Rsqrt", "Sigmoid"),
    *("Softplus", "Sqrt", "Square", "Tanh"),
}

_EXTREMES = {"Max", "Min", "Prod"}

_SIZES = {"Rank", "Shape", "ShapeN", "Size"}


def mixed_rows(
    targets: Iterable[tf.Tensor],
    equal: EqualTensors,
    exact: Mapping[Key, Sequence[tf.Tensor]],
    statistics: dict[Key, bool],
    checked: set[Key],
) -> str | None:
    """Returns what an operation before these tensors does to mix rows of the part, and its name.

    Returns None if no operation mixes rows.

    Args:
        exact: by the key of a tensor that is computed over all rows, the tensors before it to go
            on with.
        statistics: by the key of a tensor, whether it is a statistic of the part's rows, as far as
            that is known.
        checked: the keys of tensors that were before earlier targets; gets those before these.
    """

    def inputs(tensor: tf.Tensor) -> Iterable[tf.Tensor]:
        return itertools.filterfalse(equal.has, exact.get(tensor_key(tensor), tensor.op.inputs))

    for tensor in tensors_before(itertools.filterfalse(equal.has, targets), inputs, checked):
        op = tensor.op
        if tensor_key(tensor) in exact:
            continue
        if op.type in _ORDERING and _is_along_rows(op, _ORDERING[op.type], equal):
            return f"puts rows of the batch in another order, in {op.name!r}"
        if op.type in _COMPARING and _compares_rows(tensor, equal):
            return f"compares rows of the batch with each other, in {op.name!r}"
        if op.type == "Mean" and _is_along_rows(op, _of_input(1), equal, only_selected=True):
            return f"takes the mean of selected rows, in {op.name!r}"
        is_extreme = op.type in _EXTREMES and tensor.dtype.is_floating
        if is_extreme and _is_along_rows(op, _of_input(1), equal):
            return f"{_STATISTIC}, in {op.name!r}"
        if op.type not in _RELATING | _NOT_LINEAR or not op.inputs[0].dtype.is_floating:
            continue
        # Numbers divided by others are linear in the former only.
        factors = op.inputs[1:] if op.type in _DIVIDING else op.inputs
        related = [_is_statistic(factor, equal, statistics) for factor in factors]
        is_related = any(map(unknown_sizes, op.inputs)) or (op.type == "Mul" and all(related))
        if any(related) and (is_related or op.type in _NOT_LINEAR):
            return f"{_STATISTIC}, in {op.name!r}"
    return None


_STATISTIC = "relates values to a statistic of the batch"


def _is_along_rows(
    op: tf.Operation,
    dimensions: Callable[[tf.Operation], Collection[int]],
    equal: EqualTensors,
    *,
    only_selected: bool = False,
) -> bool:
    """Whether an operation works along the dimension of the rows, or of selected rows.

    Args:
        dimensions: returns those along which the operation works.
    """
    rows = rows_of(op.inputs[0], equal)
    if rows is None or (only_selected and not rows.is_selection):
        return False
    rank = op.inputs[0].shape.rank or 1
    return rows.axis in [axis % rank for axis in dimensions(op)]


def _compares_rows(tensor: tf.Tensor, equal: EqualTensors) -> bool:
    """Whether an operation makes two dimensions of rows from two tensors that have one each.

    Neither of them is equal on all replicas, nor a range of numbers, as in a mask of lengths.
    """
    inputs = tensor.op.inputs
    if unknown_sizes(tensor) != 2 or [unknown_sizes(source) for source in inputs] != [1, 1]:
        return False
    ranges = [behind(source, SAME_ORDER).op.type == "Range" for source in inputs]
    return not any(ranges) and not any(map(equal.has, inputs))


def _is_statistic(tensor: tf.Tensor, equal: EqualTensors, known: dict[Key, bool]) -> bool:
    """Whether a tensor without rows is computed from the values of this part's rows.

    Args:
        known: earlier results, by key of a tensor.
    """
    if unknown_sizes(tensor) or tensor.shape.rank is None:
        return False
    waiting, seen = [tensor], dict[Key, None]()
    result = False
    while waiting and not result:
        key = tensor_key(source := waiting.pop())
        if known.get(key) is False or key in seen:
            continue
        seen[key] = None
        if known.get(key) or unknown_sizes(source) or source.shape.rank is None:
            result = True
        elif source.op.type in _SIZES:
            rows = rows_of(source.op.inputs[0], equal)
            result = rows is not None and rows.is_selection
        elif not equal.has(source):
            waiting += source.op.inputs
    known.update(dict.fromkeys([tensor_key(tensor)] if result else seen, result))
    return result


_LINEAR = {"AddN", "AddV2", "Cast", "Identity", "Mul", "Neg", "Reshape", "Sub"}


def adds_rows(value: tf.Tensor, equal: EqualTensors) -> str | None:
    """Returns what a value adds up over this part's rows: "a sum" or "a count"; None for neither.

    A mean is neither of them, as all that is divided.
    """
    waiting = [value]
    while waiting:
        tensor = waiting.pop()
        op = tensor.op
        if unknown_sizes(tensor) or equal.has(tensor):
            continue
        if op.type == "Sum" and _is_along_rows(op, _of_input(1), equal):
            return "a sum"
        if op.type == "Size" or (op.type == "StridedSlice" and op.inputs[0].op.type == "Shape"):
            return "a count"
        waiting += op.inputs if op.type in _LINEAR else ()
    return None
