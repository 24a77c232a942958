"""Random numbers of one device: each replica draws the rows of its part of the batch.

On one device a dropout mask, or a layer's noise, is drawn for the whole batch. TensorFlow's
stateless generators count, so a replica can draw its rows of that tensor without the rows before
them: it begins at a later counter (`_from_counter`). `keras.random`, Keras's layers and `tf.random`
all draw by operations of a few types. The step makes another operation in place of each of them.

A dimension of a tensor that is drawn holds the batch if its size depends on the part of the batch.
It has the same number of entries for each row, one after another. If tensors of rows are
concatenated or tiled, such as generated and real images, each replica draws its rows of each of
them. Of selected rows, the replicas count how many each has. A shape in which the rows cannot be
found, and a literal batch size, are errors.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.initial_values import counter_at, group_size
from tfdist_ext.training._keras_private import (
    OPERATION,
    SHUFFLE,
    Original,
    replaces,
    substitutes,
)
from tfdist_ext.training.steps.context import StepContext, gather_rows
from tfdist_ext.training.steps.rows import SAME_ORDER, Rows, behind, tensor_key

# Arguments of a distribution, which may have numbers for each row.
_PARAMETERS = frozenset(["alpha", "counts", "lam", "logits", "probs"])


def _rows_drawn(context: StepContext, shape: tf.Tensor, known: tf.TensorShape) -> Rows | None:
    """Returns how a tensor of this shape holds the rows of the part; None if it has none.

    Args:
        known: what is known of the shape while the step is traced.
    """
    if context.replicas == 1 or known.rank == 0:
        return None
    if context.on_tpu:
        return context.rows_of(tf.zeros(known))
    if not tf.is_symbolic_tensor(shape):
        shape = tf.constant(shape)
    if known.rank and known[0] == (context.batch_size or 1) and known[0] > 1:
        raise TrainingError(
            f"A step draws random numbers of shape {known}, whose first dimension is the batch size"
            " as a number, but a replica has fewer rows. Write keras.ops.shape(x)[0] in place of"
            f" {known[0]}. If the numbers do not belong to rows, draw them with a first dimension"
            " of 1, and reshape them."
        )
    source = behind(shape, ("Cast", "Identity"))
    if source.op.type == "Shape":
        held = [context.rows_of(source.op.inputs[0])]
    elif source.op.type == "Pack":
        sizes = enumerate(source.op.inputs)
        held = [_rows_of_size(context, axis, size) for axis, size in sizes]
    else:
        is_equal = context.equal.has(behind(source, ("Cast", "ConcatV2", "Identity", "Pack")))
        held = [None if is_equal else Rows(0)]
    dimensions = [rows for rows in held if rows is not None]
    if len(dimensions) > 1 or any(not rows.blocks for rows in dimensions):
        raise TrainingError(
            f"A step draws random numbers of shape {known}, in which the rows of the batch cannot"
            " be found. Draw them with the rows as the first dimension, as in"
            " keras.random.normal((keras.ops.shape(x)[0], 3, 8)), and transpose or reshape them."
        )
    return dimensions[0] if dimensions else None


def _rows_of_size(context: StepContext, axis: int, size: tf.Tensor) -> Rows | None:
    """How a dimension holds rows, if its size is `size`."""
    size = behind(size, ("Cast", "Identity"))
    if size.op.type == "StridedSlice" and size.op.inputs[0].op.type == "Shape":
        rows = context.rows_of(size.op.inputs[0].op.inputs[0])
        index = tf.get_static_value(size.op.inputs[1])
        if index is not None:
            rank = size.op.inputs[0].shape[0] or 0
            is_row = rows is not None and (index[0] % rank if rank else index[0]) == rows.axis
            return rows._replace(axis=axis) if rows is not None and is_row else None
    return None if context.equal.has(size) else Rows(axis)


def _span(
    context: StepContext, length: tf.Tensor, rows: Rows
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns (first entry, entries, entries of all parts) of one block of a dimension.

    Args:
        length: of the dimension on this replica.
    """
    if rows.is_selection:
        entries = context.where_nonempty(length, 0)
        before, total = context.sums.before_and_all(entries[tf.newaxis])
        return before[0], length, tf.maximum(total[0], before[0] + length)
    before, global_rows = context.position()
    entries = -(-length // (rows.blocks * context.rows_read))  # of a row
    return before * entries, context.rows_read * entries, global_rows * entries


def _own_rows(
    context: StepContext, op: str, whole: tf.Tensor, arguments: dict[str, Any]
) -> tf.Tensor:
    """Draws this part's rows of what one device would draw, or all where it has no rows.

    Without this, replicas that share a trace would draw the same by `tf.random.normal` after
    `tf.random.set_seed`.

    Args:
        whole: what the operation draws with these arguments.
    """
    shape = arguments["shape"] if "shape" in arguments else tf.shape(arguments["logits"])
    rows = _rows_drawn(context, shape, whole.shape)
    if rows is None:
        return whole
    if op in _BY_COUNTER and rows.axis == 0 and rows.blocks == 1:
        drawn = _from_counter(context, op, whole, rows, **arguments)
    else:
        drawn = _part_of_all(context, op, whole, rows, **arguments)
    drawn = tf.ensure_shape(drawn, whole.shape)
    context.equal.rows[tensor_key(drawn)] = rows
    return drawn


def _from_counter(
    context: StepContext,
    op: str,
    whole: tf.Tensor,
    rows: Rows,
    *,
    shape: tf.Tensor,
    counter: tf.Tensor,
    **named: Any,
) -> tf.Tensor:
    """Draws this part's rows alone: the generator begins at the counter of the first row."""
    sizes = tf.cast(shape, tf.int64)
    group = group_size(whole.dtype)
    width = tf.reduce_prod(sizes[1:])
    first = _span(context, sizes[0], rows)[0] * width
    dropped = first % group
    start = counter_at(counter, first - dropped, op, whole.dtype)
    # A replica begins with a whole group, and drops the values before its own.
    length = sizes[0] * width
    values = getattr(tf.raw_ops, op)(**named, shape=[length + group - 1], counter=start)
    return tf.reshape(tf.slice(values, [dropped], [length]), shape)


def _part_of_all(
    context: StepContext, op: str, whole: tf.Tensor, rows: Rows, **named: Any
) -> tf.Tensor:
    """Draws everything, with any parameters for the rows of other replicas."""
    shape = named["shape"] if "shape" in named else tf.shape(whole)
    sizes, axis = tf.cast(shape, tf.int64), rows.axis
    first, length, total = _span(context, sizes[axis], rows)
    for name in _PARAMETERS & named.keys():
        value = tf.convert_to_tensor(named[name])
        if value.shape.rank == whole.shape.rank and value.shape[axis] in (None, whole.shape[axis]):
            around = [[0, 0]] * value.shape.rank
            around[axis] = [first, total - first - length]
            named[name] = tf.pad(value, around, constant_values=1)
    if "shape" in named:
        named["shape"] = tf.concat([sizes[:axis], [rows.blocks * total], sizes[axis + 1 :]], 0)
    inner = tf.reduce_prod(sizes[axis + 1 :])
    blocks = tf.reshape(getattr(tf.raw_ops, op)(**named), [-1, total, inner])
    return tf.reshape(blocks[:, first : first + length], tf.shape(whole))


@replaces(SHUFFLE)
def shuffle(
    context: StepContext, original: Original, x: Any, axis: int = 0, seed: Any = None
) -> tf.Tensor:
    """Shuffles the rows of all replicas.

    The numbers of this part's rows (`arange(batch_size)`) become numbers of rows in the global
    batch. `rows_at` finds these rows.
    """
    x = keras.ops.convert_to_tensor(x)
    rows = context.rows_of(x)
    if axis != 0 or rows is None or rows.axis != 0:
        return original(x, axis, seed)
    before, _ = context.position()
    source = behind(x, ("Cast", "Identity")).op
    are_numbers = source.type == "Range" and tf.get_static_value(source.inputs[0]) == 0
    of_batch = x + tf.cast(before, x.dtype) if are_numbers else x
    with substitutes({random_operation: None}):
        shuffled = original(gather_rows(context, [of_batch])[0], 0, seed)
    own = shuffled[before : before + context.rows_read]
    own.set_shape(x.shape)
    if are_numbers:
        context.row_numbers.append(own)
    return own


def rows_at(context: StepContext, x: Any, indices: Any, axis: int | None) -> Any:
    """Returns the tensor in which `indices` are looked up: `x`, or the rows of all replicas."""
    if axis not in (0, None) or not context.row_numbers:
        return x
    shuffled = behind(indices, SAME_ORDER)  # before a cast or a reshape
    if not any(shuffled is numbers for numbers in context.row_numbers):
        return x
    return gather_rows(context, [keras.ops.convert_to_tensor(x)])[0]


@replaces("tensorflow:gather")
def gather(
    context: StepContext,
    original: Original,
    params: Any,
    indices: Any,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """Finds rows of other replicas by the indices that a shuffle returned."""
    return original(rows_at(context, params, indices, named.get("axis")), indices, *more, **named)


# Operations whose counter is an argument: a replica begins at the counter of its first row.
_BY_COUNTER = (
    "StatelessRandomUniformV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
)

# Operations that have another order: each replica draws everything. So it does where an operation
# has a state.
_WHOLE = (
    "StatelessRandomGammaV3",
    "StatelessRandomBinomial",
    "StatelessRandomPoisson",
    "StatelessMultinomial",
)

_STATEFUL = ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal")


@replaces(OPERATION, only={*_BY_COUNTER, *_WHOLE, *_STATEFUL})
def random_operation(
    context: StepContext, original: Original, op: str, **named: Any
) -> tuple[Any, ...]:
    """Creates all operations; those that draw random numbers draw the rows of the part.

    Args:
        original: as TensorFlow's generated gen_*_ops.py call it: type, and arguments by name.
    """
    *description, outputs = original(op, **named)
    named.pop("name", None)
    with substitutes({random_operation: None}):
        return (*description, [_own_rows(context, op, outputs[0], named)])


def refuse_to_draw(original: Original, op: str, **named: Any) -> Any:
    """In an update, a stateful operation would make the copies of a variable different."""
    if op not in _STATEFUL:
        return original(op, **named)
    raise TrainingError(
        "An optimizer draws random numbers with tf.random, which are not the same on all replicas."
        " Use keras.random with a keras.random.SeedGenerator that is an attribute of the optimizer."
    )
