"""Which tensors of a step are the same on every replica, and which have rows of the batch.

A tensor is the same on every replica if it does not follow from the replica's part of the batch
(`EqualTensors`). That is reachability in the graph: what is computed from the part, from random
numbers with a state, or by Python may differ. Sums over replicas are the same on all of them. A
tensor that is equal but not known to be does no harm in a mean over replicas, which leaves equal
values as they are.

It matters for the slices of a sparse gradient (`tf.IndexedSlices`), because optimizers with second
moments square slices one by one. Slices of the batch's rows stay apart, as on one device. What all
replicas look up by the same constant indices, such as positions, is one lookup on one device, so
these slices are summed (`with_slots`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from tfdist_ext.data.rows import Structure

__all__ = [
    "EqualTensors",
    "Gradient",
    "blocks_of_rows",
    "compared_rows",
    "first_size",
    "follows_from",
    "merged",
    "places_rows",
    "with_slots",
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
        batch: what the step gets, a structure of tensors. They differ.
    """

    def __init__(self, batch: Structure):
        self._known: dict[_Key, bool] = {}
        self._alive: list[tf.Tensor] = []  # the ids of eager tensors are their keys
        self._set(batch, equal=False)

    def add(self, values: Structure) -> None:
        """Note that these tensors are the same on every replica."""
        self._set(values, equal=True)

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

    def _set(self, values: Structure, *, equal: bool) -> None:
        for tensor in _leaves(values):
            self._known[_key(tensor)] = equal
            self._alive.append(tensor)


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


def _tensors_before(targets: Sequence[tf.Tensor]) -> Iterator[tf.Tensor]:
    """Yields tensors of a graph, and all tensors from which they are computed."""
    waiting, seen = list(targets), set[_Key]()
    while waiting:
        tensor = waiting.pop()
        if _key(tensor) not in seen:
            seen.add(_key(tensor))
            yield tensor
            waiting += tensor.op.inputs


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
            ranges = [_behind(each, _SAME_ORDER).op.type == "Range" for each in inputs]
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


# Operations that put rows into others, and those that add rows where indices say. On each replica
# they write other rows of a variable. For a metric, sums at indices are sums of rows as others are.
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
    waiting, seen = [value], set[_Key]()
    while waiting:
        tensor = waiting.pop()
        if _key(tensor) in seen or equal.has(tensor):
            continue
        seen.add(_key(tensor))
        if _unknown_sizes(tensor) or tensor.op.type in kinds:
            return str(tensor.op.type)
        waiting += [each for each in tensor.op.inputs if each.shape == value.shape]
    return None


def first_size(shape: tf.Tensor) -> tf.Tensor:
    """The tensor that gives the first number of a shape: a scalar, or a shape itself."""
    return _behind(shape, ("Cast", "ConcatV2", "Identity", "Pack"))


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

_SAME_ORDER = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient")

_INDICES = 1 << 32  # more than a table has rows
_PLACES = 1 << 24  # more than a lookup that is the same on all replicas has indices


def with_slots(
    gradients: Sequence[Gradient], equal: EqualTensors
) -> tuple[list[Gradient], list[int]]:
    """Returns gradients and the slots of their slices, both to be summed over replicas.

    The slices of one slot and one index are one slice on one device. A slice of a row of the batch
    has the slot -1, and stays apart.

    Returns:
        The gradients, and after them the slots. The gradients, by number, that have slots.
    """
    slots = {
        number: _slots(gradient, equal)
        for number, gradient in enumerate(gradients)
        if isinstance(gradient, tf.IndexedSlices)
    }
    slots = {number: each for number, each in slots.items() if each is not None}
    return [*gradients, *slots.values()], list(slots)


def _slots(gradient: tf.IndexedSlices, equal: EqualTensors) -> tf.IndexedSlices | None:
    """Returns the slots of a gradient's slices, which may come from several lookups."""
    parts = _concatenated(gradient.indices)
    kinds = [_kind_of(each, equal) for each in parts]
    if set(kinds) == {"rows"}:
        return None
    slots = []
    for number, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        size = tf.size(part, tf.int64)
        places = tf.range(size) if kind == "equal" else tf.zeros([size], tf.int64)
        slots.append(places - 1 if kind == "rows" else number * _PLACES + places)
    shape = gradient.dense_shape
    return tf.IndexedSlices(
        tf.concat(slots, 0), gradient.indices, None if shape is None else shape[:1]
    )


def merged(sums: Sequence[Gradient], numbers: Sequence[int]) -> list[Gradient]:
    """Returns sums of gradients, with the slices that one device would have.

    Args:
        sums: of the gradients and slots that `with_slots` returned.
        numbers: of the gradients that have slots.
    """
    count = len(sums) - len(numbers)
    found = list(sums[:count])
    for number, slots in zip(numbers, sums[count:], strict=True):
        total = found[number]
        if not isinstance(total, tf.IndexedSlices):  # a StrategyTemplate's sum may be dense
            continue
        apart = -1 - tf.range(tf.size(slots.values, tf.int64))
        keys = tf.where(slots.values < 0, apart, slots.values) * _INDICES
        keys, places = tf.unique(keys + tf.cast(total.indices, tf.int64), tf.int64)
        found[number] = tf.IndexedSlices(
            tf.math.unsorted_segment_sum(total.values, places, tf.size(keys)),
            tf.cast(keys % _INDICES, total.indices.dtype),
            total.dense_shape,
        )
    return found


def _concatenated(indices: tf.Tensor) -> list[tf.Tensor]:
    made_by = _behind(indices, _SAME_ORDER).op if tf.is_symbolic_tensor(indices) else None
    if made_by is None or not _is_concatenation(made_by):
        return [indices]
    return [part for each in made_by.inputs[:-1] for part in _concatenated(each)]


def _kind_of(indices: tf.Tensor, equal: EqualTensors) -> Literal["equal", "distinct", "rows"]:
    if equal.has(indices):
        return "equal"
    if not tf.is_symbolic_tensor(indices):
        return "rows"
    source = _behind(indices, _SAME_ORDER)
    return "distinct" if _OF_DISTINCT.get(source.op.type) == source.value_index else "rows"


def _behind(tensor: tf.Tensor, kinds: Collection[str]) -> tf.Tensor:
    """The tensor to which operations of these types were applied, one after another."""
    while tensor.op.type in kinds:
        tensor = tensor.op.inputs[0]
    return tensor
