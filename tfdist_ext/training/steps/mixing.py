"""Operations of a step that mix rows of the batch, and therefore depend on how it is split.

A replica's step sees only its own rows. What puts them in another order, compares them with each
other, or divides by a statistic of them, gives other numbers than one device. `mixed_rows` finds
such operations in the graph of a step by the types in the tables of this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext.training.steps.rows import (
    SAME_ORDER,
    EqualTensors,
    Key,
    behind,
    rows_of,
    tensor_key,
    tensors_before,
    unknown_sizes,
)


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
    statistics: Mapping[Key, bool],
) -> str | None:
    """Returns what an operation before these tensors does to mix rows of the part, and its name.

    Returns None if no operation mixes rows.

    Args:
        exact: by the key of a tensor that is computed over all rows, the tensors before it to go
            on with.
        statistics: by the key of a tensor, whether it is a statistic of the part's rows, as far as
            that is known.
    """
    known = dict(statistics)

    def inputs(tensor: tf.Tensor) -> Iterable[tf.Tensor]:
        return itertools.filterfalse(equal.has, exact.get(tensor_key(tensor), tensor.op.inputs))

    for tensor in tensors_before(itertools.filterfalse(equal.has, targets), inputs):
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
        related = [_is_statistic(factor, equal, known) for factor in factors]
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
        if op.type in ("Size", "StridedSlice") and (
            op.type == "Size" or op.inputs[0].op.type == "Shape"
        ):
            return "a count"
        waiting += op.inputs if op.type in _LINEAR else ()
    return None
