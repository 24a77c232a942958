"""Random numbers of one device: each replica draws the rows of its part of the batch.

On one device a dropout mask, or a layer's noise, is drawn for the whole batch. TensorFlow's
stateless generators count, so a replica can draw its rows of that tensor without the rows before
them: it begins at a later counter (`_drawn`). `keras.random`, Keras's layers and `tf.random` all
draw by operations of a few types. The step makes another operation in place of each of them.

The first dimension of a tensor that is drawn is the batch if its size is unknown while the step is
traced and depends on the part of the batch. The tensor has the same number of entries for each row
of the part, and the entries of a row are one after another. If tensors of rows are concatenated,
such as generated and real images, each replica draws its rows of each of them. A literal batch size
is an error.

In an eager step all sizes are numbers. There the first dimension is the batch if it is the number
of the part's rows or a multiple of that number. Any other tensor is the same on all replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.initial_values import counter_at, group_size
from tfdist_ext.training._keras_private import (
    Original,
    substitutes,
)
from tfdist_ext.training.steps.context import StepContext, gather_rows
from tfdist_ext.training.steps.rows import SAME_ORDER, behind, blocks_of_rows, first_size

__all__ = ["RANDOM", "REFUSED_IN_UPDATES", "rows_at"]


# Arguments of a distribution, which may have numbers for each row.
_PARAMETERS = frozenset(["alpha", "counts", "lam", "logits", "probs"])


def _blocks_of_rows(context: StepContext, shape: tf.Tensor, known: tf.TensorShape) -> int:
    """Returns how many tensors of this part's rows, one after another, a shape begins with, or 0.

    Args:
        known: what is known of the shape while the step is traced.
    """
    if context.replicas == 1 or known.rank == 0:
        return 0
    if tf.is_symbolic_tensor(shape) and (known.rank is None or known[0] is None):
        return 0 if context.equal.has(first_size(shape)) else blocks_of_rows(shape)
    if tuple(known) in context.weight_shapes:
        return 0
    if context.graph is not None and known[0] == context.batch_size and known[0] > 1:
        raise TrainingError(
            f"A step draws random numbers of shape {known}, whose first dimension is the batch size"
            " as a number, but a replica has fewer rows. Write keras.ops.shape(x)[0] in place of"
            f" {known[0]}. If the numbers do not belong to rows, draw them with a first dimension"
            " of 1, and reshape them."
        )
    # In an eager step all sizes are numbers. A multiple is several entries of each row.
    if context.size is None or known[0] % context.size:
        return 0
    return 1 if context.size > 1 or known[0] == 1 else 0


def _drawn(
    context: StepContext,
    draw: Original,
    whole: tf.Tensor,
    *,
    shape: tf.Tensor,
    counter: tf.Tensor,
    op: str,
    **named: Any,
) -> tf.Tensor:
    """Draws this part's rows of what one device would draw, or all where it has no rows.

    Args:
        draw: the operation of `tf.raw_ops`.
        whole: what the operation draws with these arguments.
        op: the type of the operation.
    """
    if not (blocks := _blocks_of_rows(context, shape, whole.shape)):
        return whole
    sizes = tf.cast(shape, tf.int64)
    group = group_size(whole.dtype)
    width = tf.reduce_prod(sizes[1:])
    entries = -(-sizes[0] // (blocks * context.rows_read))  # of a row in a block
    before, global_rows = context.position()
    length = -(-sizes[0] // blocks) * width
    pieces = []
    for block in range(blocks):
        first = (block * global_rows + before) * entries * width
        dropped = first % group
        start = counter_at(counter, first - dropped, op, whole.dtype)
        # A replica begins with a whole group, and drops the values before its own.
        values = draw(**{**named, "shape": [length + group - 1], "counter": start})
        pieces.append(tf.slice(values, [dropped], [length]))
    drawn = tf.concat(pieces, 0)[: sizes[0] * width]
    return tf.ensure_shape(tf.reshape(drawn, shape), whole.shape)


def _drawn_whole(context: StepContext, draw: Original, whole: tf.Tensor, **named: Any) -> tf.Tensor:
    """Draws for all rows, and returns this part's: for other generators.

    Everything is drawn, with any parameters for the rows of other replicas. Without this, replicas
    that share a trace would draw the same by `tf.random.normal` after `tf.random.set_seed`.
    """
    shape = named["shape"] if "shape" in named else tf.shape(named["logits"])
    if not _blocks_of_rows(context, shape, whole.shape):
        return whole
    sizes = tf.cast(shape, tf.int64)
    before, global_rows = context.position()
    entries = -(-sizes[0] // context.rows_read)
    first, of_all = before * entries, global_rows * entries
    for name in _PARAMETERS & named.keys():
        value = tf.convert_to_tensor(named[name])
        if value.shape.rank == whole.shape.rank and value.shape[0] in (None, whole.shape[0]):
            around = [[first, of_all - first - sizes[0]], *[[0, 0]] * (value.shape.rank - 1)]
            named[name] = tf.pad(value, around, constant_values=1)
    if "shape" in named:
        named["shape"] = tf.concat([[of_all], sizes[1:]], 0)
    drawn = draw(**named)[first : first + sizes[0]]
    return tf.ensure_shape(drawn, whole.shape)


def _shuffled(
    context: StepContext, original: Original, x: Any, axis: int = 0, seed: Any = None
) -> tf.Tensor:
    """Shuffles the rows of the global batch, and returns this replica's part of them.

    The numbers of this part's rows (`arange(batch_size)`) become numbers of rows in the global
    batch. `rows_at` finds these rows.
    """
    x = keras.ops.convert_to_tensor(x)
    has_rows = not context.equal.has(x) if x.shape[0] is None else x.shape[0] == context.size
    if axis != 0 or context.replicas == 1 or not has_rows:
        return original(x, axis, seed)
    before, _ = context.position()
    are_numbers = _are_row_numbers(x)
    rows = x + tf.cast(before, x.dtype) if are_numbers else x
    # In an eager step the number of all rows is a multiple of the part's.
    with substitutes(dict.fromkeys(_BY_COUNTER)):
        shuffled = original(gather_rows(context, [rows])[0], 0, seed)
    mine = shuffled[before : before + context.rows_read]
    mine.set_shape(x.shape)
    if are_numbers:
        context.row_numbers.append(mine)
    return mine


def _are_row_numbers(x: tf.Tensor) -> bool:
    if not tf.is_symbolic_tensor(x):
        return x.shape.rank == 1 and np.array_equal(x, np.arange(x.shape[0]))
    while x.op.type in ("Cast", "Identity"):
        x = x.op.inputs[0]
    return x.op.type == "Range" and tf.get_static_value(x.op.inputs[0]) == 0


def rows_at(context: StepContext, x: Any, indices: Any, axis: int | None) -> Any:
    """Returns the tensor in which `indices` are looked up: `x`, or the rows of all replicas."""
    if axis not in (0, None) or not _are_shuffled_numbers(context, indices):
        return x
    return gather_rows(context, [keras.ops.convert_to_tensor(x)])[0]


def _are_shuffled_numbers(context: StepContext, indices: Any) -> bool:
    """Whether indices are what a shuffle returned, also after a cast or a reshape."""
    if context.row_numbers and tf.is_symbolic_tensor(indices):
        indices = behind(indices, SAME_ORDER)
    return any(indices is each for each in context.row_numbers)


def _gather(
    context: StepContext,
    original: Original,
    params: Any,
    indices: Any,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """Calls `tf.gather`; of the rows of all replicas, where these are shuffled."""
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


def _refuse_to_draw(draw: Original, whole: tf.Tensor, **named: Any) -> NoReturn:
    raise TrainingError(
        "An optimizer draws random numbers with tf.random, which are not the same on all replicas."
        " Use keras.random with a keras.random.SeedGenerator that is an attribute of the optimizer."
    )


# In an update: the copies of a variable would become different.
REFUSED_IN_UPDATES = dict.fromkeys(_STATEFUL, _refuse_to_draw)


# What replaces functions and operations that draw random numbers, by key or by the operation's
# type. Each gets the step's context first.
RANDOM: dict[str, Callable[..., Any]] = {
    **{op: functools.partial(_drawn, op=op) for op in _BY_COUNTER},
    **dict.fromkeys([*_WHOLE, *_STATEFUL], _drawn_whole),
    "gather": _gather,
    "shuffle": _shuffled,
}
