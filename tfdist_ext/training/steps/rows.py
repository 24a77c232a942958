"""Which tensors of a step are the same on every replica, and which have rows of the batch.

A tensor is the same on every replica if it does not follow from the replica's part of the batch
(`EqualTensors`). That is reachability in the graph: what is computed from the part, from random
numbers with a state, or by Python may differ. Sums over replicas are the same on all of them. If
an equal tensor is not recognized, it is averaged over replicas, which changes nothing.

It matters for the slices of a sparse gradient (`tf.IndexedSlices`), because optimizers with second
moments square slices one by one. Slices of the batch's rows stay apart, as on one device. What all
replicas look up by the same constant indices, such as positions, is one lookup on one device, so
these slices are summed (`Lookups`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from tfdist_ext.data.pipelines import Structure

__all__ = [
    "SAME_ORDER",
    "EqualTensors",
    "Gradient",
    "Lookups",
    "behind",
    "blocks_of_rows",
    "compared_rows",
    "first_size",
    "follows_from",
    "places_rows",
    "with_unknown_rows",
]


# Of a variable: dense, or slices of what was looked up.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

# A tensor as a graph knows it: id of the graph, name. An eager tensor: its own id.
_Key: TypeAlias = tuple[int, str] | int

# Stateful operations whose result follows from their inputs.
_READS = {
    *("LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather"),
    *("ResourceGatherNd", "VarHandleOp"),
}


class EqualTensors:
    """The tensors of a replica's step that are the same on every replica.

    Args:
        batch: tensors that may differ.
    """

    def __init__(self, batch: Structure = ()):
        self._known: dict[_Key, bool] = {}
        self._alive: list[tf.Tensor] = []  # the ids of eager tensors are their keys
        self.add(batch, equal=False)

    def add(self, values: Structure, *, equal: bool = True) -> None:
        """Note that these tensors are the same on every replica, or may differ."""
        for tensor in _leaves(values):
            self._known[_key(tensor)] = equal
            self._alive.append(tensor)

    def has(self, values: Structure | Gradient) -> bool:
        """Whether these tensors are known to be the same on every replica."""
        return all(map(self._is_equal, _leaves(values)))

    def _is_equal(self, tensor: tf.Tensor) -> bool:
        if not tf.is_symbolic_tensor(tensor):  # nothing tells what an eager tensor follows from
            return self._known.get(_key(tensor), False)
        stack = [tensor]
        while stack:
            key, inputs = _key(stack[-1]), _inputs(stack[-1])
            found = [None] if inputs is None else [self._known.get(_key(each)) for each in inputs]
            if key in self._known or inputs is None or False in found or None not in found:
                self._known.setdefault(key, all(found))
                stack.pop()
            else:
                stack.append(inputs[found.index(None)])
        return self._known[_key(tensor)]


def _inputs(tensor: tf.Tensor) -> Sequence[tf.Tensor] | None:
    """The symbolic tensors that a tensor follows from; None if that is not known."""
    op = tensor.op
    if op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        outer = [outer for outer, inner in captures if inner is tensor]
        return [each for each in outer if tf.is_symbolic_tensor(each)] if outer else None
    if op.op_def.is_stateful and op.type not in _READS:  # random numbers, data, Python
        return None
    if op.type == "IdentityN":
        return [op.inputs[tensor.value_index]]
    return [] if _is_other_size(tensor) else op.inputs


def _is_other_size(tensor: tf.Tensor) -> bool:
    """Whether a tensor holds sizes of a shape other than its number of rows."""
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


def _leaves(values: Structure | Gradient) -> list[tf.Tensor]:
    leaves = tf.nest.flatten(values, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]


def _key(tensor: tf.Tensor) -> _Key:
    return (id(tensor.graph), tensor.name) if tf.is_symbolic_tensor(tensor) else id(tensor)


def follows_from(value: tf.Tensor, sources: Sequence[tf.Tensor]) -> bool:
    """Whether a value of a graph is computed from any of these tensors of the graph."""
    wanted = set(map(_key, sources))
    return any(_key(tensor) in wanted for tensor in _tensors_before([value]))


def _tensors_before(
    targets: Iterable[tf.Tensor], follows: Callable[[tf.Tensor], bool] = lambda _: True
) -> Iterator[tf.Tensor]:
    """Yields tensors of a graph, and all tensors from which they are computed.

    Args:
        follows: whether to go on to an input.
    """
    waiting, seen = list(targets), set[_Key]()
    while waiting:
        tensor = waiting.pop()
        if _key(tensor) not in seen:
            seen.add(_key(tensor))
            yield tensor
            waiting += filter(follows, tensor.op.inputs)


# Operations by which losses compare rows with each other.
_COMPARING = {
    *("BatchMatMulV2", "Einsum", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual"),
    *("MatMul", "NotEqual", "SquaredDifference", "Sub"),
}


def compared_rows(targets: Sequence[tf.Tensor], equal: EqualTensors) -> str | None:
    """Returns the name of an operation that compares a part's rows with each other, or None.

    It makes two dimensions of unknown size from two tensors that have one each. Neither of them is
    equal on all replicas, nor a range of numbers, as in a mask of lengths.
    """
    for tensor in _tensors_before([each for each in targets if tf.is_symbolic_tensor(each)]):
        inputs = tensor.op.inputs
        if tensor.op.type in _COMPARING and _unknown_sizes(tensor) == 2:
            ranges = [behind(each, SAME_ORDER).op.type == "Range" for each in inputs]
            one_each = [_unknown_sizes(each) for each in inputs] == [1, 1]
            if one_each and not any(ranges) and not any(map(equal.has, inputs)):
                return str(tensor.op.name)
    return None


def _unknown_sizes(tensor: tf.Tensor) -> int:
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

    for tensor in _tensors_before(filter(follows, [value]), follows):
        if _unknown_sizes(tensor) or tensor.op.type in kinds:
            return str(tensor.op.type)
    return None


def first_size(shape: tf.Tensor) -> tf.Tensor:
    """The tensor that gives the first number of a shape: a scalar, or a shape itself."""
    return behind(shape, ("Cast", "ConcatV2", "Identity", "Pack"))


def blocks_of_rows(size: tf.Tensor) -> int:
    """Returns how many tensors of rows were concatenated to the one that has a shape.

    Two for a discriminator's batch of real and generated images.

    Args:
        size: a shape, or the tensor itself.
    """
    while size.op.inputs:
        if _is_concatenation(size.op) and size.shape.rank and size.shape[0] is None:
            return sum(map(blocks_of_rows, size.op.inputs[:-1]))
        of_rows = [each for each in size.op.inputs if each.shape.rank and each.shape[0] is None]
        size = (of_rows or size.op.inputs)[0]
    return 1


def _is_concatenation(op: tf.Operation) -> bool:
    return op.type == "ConcatV2" and tf.get_static_value(op.inputs[-1]) == 0


# Which output of an operation has distinct numbers. Keras and TensorFlow look up sparse ids by it.
_OF_DISTINCT = {
    **dict.fromkeys(("Unique", "UniqueV2"), 0),
    **{f"SparseSegment{combiner}GradV2": 1 for combiner in ("Mean", "Sum", "SqrtN")},
}

SAME_ORDER = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient")

_INDICES = 1 << 32  # more than a table has rows


class Lookups:
    """A gradient as parts that are summed over replicas: one for each lookup of a table.

    On one device, a lookup by the same indices on all replicas, or by distinct ids, has one slice
    for each index. The key of such a slice is its place in the lookup and its index.

    Attributes:
        parts: the gradient itself, or slices of each lookup.
        has_keys: for each part, whether its indices are keys, of which one device has one slice.
    """

    def __init__(self, gradient: Gradient, equal: EqualTensors):
        self.parts: list[Gradient] = [gradient]
        self.has_keys = [False]
        if not isinstance(gradient, tf.IndexedSlices):
            return
        lookups = _concatenated(gradient.indices)
        kinds = [_kind_of(each, equal) for each in lookups]
        if set(kinds) == {"rows"}:
            return
        sizes = tf.stack([tf.size(each) for each in lookups])
        values = tf.split(gradient.values, sizes, num=len(lookups))
        indices = tf.split(gradient.indices, sizes, num=len(lookups))
        self.has_keys = [kind != "rows" for kind in kinds]
        self.parts = []
        for kind, value, index in zip(kinds, values, indices, strict=True):
            keys, shape = index, gradient.dense_shape
            if kind != "rows":
                place = tf.range(tf.size(index, tf.int64)) if kind == "equal" else 0
                keys, shape = place * _INDICES + tf.cast(index, tf.int64), None
            self.parts.append(tf.IndexedSlices(value, keys, shape))
        self._indices, self._shape = gradient.indices.dtype, gradient.dense_shape

    def joined(self, sums: Sequence[Gradient]) -> Gradient:
        """Returns the gradient, from the sums of its parts, with the slices of one device."""
        if not any(self.has_keys):
            return sums[0]
        slices = [
            self._merged(each) if has_keys else each
            for each, has_keys in zip(sums, self.has_keys, strict=True)
        ]
        if any(not isinstance(each, tf.IndexedSlices) for each in slices):
            return tf.add_n(list(map(tf.convert_to_tensor, slices)))  # by a StrategyTemplate
        values = tf.concat([each.values for each in slices], 0)
        return tf.IndexedSlices(values, tf.concat([x.indices for x in slices], 0), self._shape)

    def _merged(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        keys, places = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(keys))
        return tf.IndexedSlices(values, tf.cast(keys % _INDICES, self._indices), self._shape)


def _concatenated(indices: tf.Tensor) -> list[tf.Tensor]:
    made_by = behind(indices, SAME_ORDER).op if tf.is_symbolic_tensor(indices) else None
    if made_by is None or not _is_concatenation(made_by):
        return [indices]
    return [part for each in made_by.inputs[:-1] for part in _concatenated(each)]


def _kind_of(indices: tf.Tensor, equal: EqualTensors) -> Literal["equal", "distinct", "rows"]:
    if equal.has(indices):
        return "equal"
    if not tf.is_symbolic_tensor(indices):
        return "rows"
    source = behind(indices, SAME_ORDER)
    return "distinct" if _OF_DISTINCT.get(source.op.type) == source.value_index else "rows"


def behind(tensor: tf.Tensor, kinds: Collection[str]) -> tf.Tensor:
    """The tensor to which operations of these types were applied, one after another."""
    while tensor.op.type in kinds:
        tensor = tensor.op.inputs[0]
    return tensor
