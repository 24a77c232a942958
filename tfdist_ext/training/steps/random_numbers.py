"""Random numbers of one device: each replica draws the rows of its part of the batch.

On one device a dropout mask, or a layer's noise, is drawn for the whole batch. TensorFlow's
stateless generators count, so a replica can draw its rows of that tensor without the rows before
them: it begins at a later counter. `keras.random`, Keras's layers and `tf.random.stateless_...`
all draw by a few functions, which are replaced (`_drawn`).

The first dimension of a tensor that is drawn is the batch if its size is unknown while the step is
traced, follows from the size of the batch, and is a multiple of the part's rows when the step runs.
The entries of a row are one after another. If tensors of rows were concatenated, such as generated
and real images, each of them has its rows. The batch size as a number is an error.

In an eager step all sizes are numbers. There the first dimension is the batch if it is the number
of the part's rows or a multiple of that number. Any other tensor is the same on all replicas.

Without a seed Keras draws from one generator of the calling thread, which it would make in the
thread of each replica, inside of the step. So each replica has one that begins where that of the
calling thread is, and leaves it where one device would have (`Seeds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.placement.live.initial_values import counter_at, group_size
from tfdist_ext.strategies.traced_replica import copy_number
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.steps.context import StepContext, gather_rows
from tfdist_ext.training.steps.rows import blocks_of_rows, first_size, has_rows_of

__all__ = ["RANDOM", "Seeds", "rows_at"]


# Name of a function that keeps a state -> that of tf.random which keeps none.
_STATELESS = {
    "random_standard_normal": "stateless_normal",
    "random_uniform": "stateless_uniform",
    "random_uniform_int": "stateless_uniform",
    "truncated_normal": "stateless_truncated_normal",
}

# Arguments of a distribution, which may have numbers for each row.
_PARAMETERS = frozenset(["alpha", "counts", "probs", "lam"])


@dataclass
class Seeds:
    """What a worker's replicas draw from where no seed is given.

    Attributes:
        devices: of the replicas; none where Keras's own generator serves.
        from_chief: gives the chief's number on every worker; None where there is one worker.
        generators: of each replica, from the first draw on.
    """

    devices: Sequence[str]
    from_chief: Callable[[Any], Any] | None = None
    generators: list[keras.random.SeedGenerator] = field(default_factory=list)
    _has_begun: bool = False

    def of_replica(
        self, original: Callable[[], keras.random.SeedGenerator]
    ) -> keras.random.SeedGenerator:
        """The generator of the running replica."""
        if not self.devices:
            return original()
        self.generators = self.generators or self._new()
        return self.generators[copy_number() % len(self.generators)]

    def begin(self) -> None:
        """Begin where the calling thread's generator is; every worker must call."""
        if not self.devices or (self.from_chief and self._has_begun):
            return
        self._has_begun = True
        self.generators = self.generators or self._new()
        state = kp.global_seed_generator().state.numpy()
        if self.from_chief:
            state = self.from_chief(state)
        for generator in self.generators:
            generator.state.assign(state)

    def forget(self) -> None:
        """Begin anew where the calling thread's generator is; every worker must call."""
        self._has_begun = False

    def end(self) -> None:
        """Leave the calling thread's generator where the replicas' generators are."""
        if self.generators:
            kp.global_seed_generator().state.assign(self.generators[0].state.numpy())

    def _new(self) -> list[keras.random.SeedGenerator]:
        def generator(device: str) -> keras.random.SeedGenerator:
            with tf.device(device):
                return keras.random.SeedGenerator(0)

        # A new thread is outside of all scopes and graphs that are open in this one.
        with ThreadPoolExecutor(1) as thread:
            return list(thread.map(generator, self.devices))


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
            f"A step draws random numbers of shape {known}, which begins with the batch size as a"
            " number, but a replica has fewer rows. Write keras.ops.shape(x)[0] in place of"
            f" {known[0]}. If the numbers do not belong to rows, draw them with a first dimension"
            " of 1, and reshape them."
        )
    # In an eager step all sizes are numbers. A multiple is several entries of each row.
    if context.size is None or known[0] % context.size:
        return 0
    return 1 if context.size > 1 or known[0] == 1 else 0


def _drawn(
    context: StepContext,
    original: Callable[..., tf.Tensor],
    shape: tf.Tensor,
    *,
    counter: tf.Tensor,
    **named: Any,
) -> tf.Tensor:
    """What one device would draw: this part's rows of it, or all where it has no rows."""
    whole = original(shape, counter=counter, **named)
    named.pop("name", None)
    if not (blocks := _blocks_of_rows(context, shape, whole.shape)):
        return whole
    op = "".join(word.title() for word in original.__name__.split("_"))
    sizes = tf.cast(shape, tf.int64)
    width = whole.shape[1:].num_elements()  # None where it is not known
    size = tf.reduce_prod(sizes) if width is None else sizes[0] * width
    length = -(-size // blocks)
    entries = length // context.rows_read  # of a row in a block
    before, global_rows = context.position()
    is_batch = sizes[0] % (blocks * context.rows_read) == 0
    group = group_size(whole.dtype)
    aligned = blocks == 1 and width is not None and width % group == 0
    pieces = []
    for block in range(blocks):
        first = tf.where(is_batch, (block * global_rows + before) * entries, block * length)
        skipped = 0 if aligned else first % group
        values = original(
            [length if aligned else length + group - 1],
            counter=counter_at(counter, first - skipped, op, whole.dtype),
            **named,
        )
        pieces.append(values if aligned else tf.slice(values, [skipped], [length]))
    drawn = pieces[0] if blocks == 1 else tf.concat(pieces, 0)[:size]
    drawn = tf.reshape(drawn, shape)
    drawn.set_shape(whole.shape)
    return drawn


def _drawn_by_parameters(
    context: StepContext, original: Callable[..., tf.Tensor], shape: tf.Tensor, **named: Any
) -> tf.Tensor:
    """The same for distributions that draw all values of one parameter before those of the next.

    Everything is drawn, with any parameters for the rows of other replicas.
    """
    whole = original(shape, **named)
    named.pop("name", None)
    if not _blocks_of_rows(context, shape, whole.shape):
        return whole
    sizes = tf.cast(shape, tf.int64)
    count = sizes[0]
    before, global_rows = context.position()
    is_batch = count % context.rows_read == 0
    entries = count // context.rows_read
    first = tf.where(is_batch, before * entries, 0)
    after = tf.where(is_batch, global_rows * entries, count) - first - count
    for name in _PARAMETERS & named.keys():
        value = tf.convert_to_tensor(named[name])
        known = value.shape
        if known.rank == whole.shape.rank and known[0] in (None, whole.shape[0]):
            around = [[first, after], *[[0, 0]] * (known.rank - 1)]
            named[name] = tf.pad(value, around, constant_values=1)
    drawn = original(tf.concat([[first + count + after], sizes[1:]], 0), **named)
    drawn = drawn[first : first + count]
    drawn.set_shape(whole.shape)
    return drawn


def _drawn_categories(
    context: StepContext,
    original: Callable[..., tf.Tensor],
    logits: tf.Tensor,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """The same of categories, drawn row by row."""
    whole = original(logits, *more, **named)
    if not _blocks_of_rows(context, tf.shape(logits), logits.shape):
        return whole
    count = tf.shape(logits, tf.int64)[0]
    before, _ = context.position()
    is_batch = count % context.rows_read == 0
    first = tf.where(is_batch, before * (count // context.rows_read), 0)
    drawn = original(tf.pad(logits, [[first, 0], [0, 0]]), *more, **named)[first:]
    drawn.set_shape(whole.shape)
    return drawn


def _drawn_with_state(
    context: StepContext,
    original: Callable[..., tf.Tensor],
    shape: tf.Tensor,
    *dtype_or_bounds: Any,
    seed: int = 0,
    seed2: int = 0,
    **named: Any,
) -> tf.Tensor:
    """`tf.random.normal` and the like: other numbers for each row, but not those of one device.

    With `tf.random.set_seed`, replicas that share a trace would all draw the same. So the operation
    draws a seed, and each replica its rows of what follows from that.
    """
    if not _blocks_of_rows(context, shape, tf.broadcast_to(False, shape).shape):
        return original(shape, *dtype_or_bounds, seed=seed, seed2=seed2, **named)
    most = tf.int32.max
    drawn = tf.raw_ops.RandomUniformInt(shape=[2], minval=0, maxval=most, seed=seed, seed2=seed2)
    draw = getattr(tf.random, _STATELESS[original.__name__])
    if len(dtype_or_bounds) == 1:
        return draw(shape, drawn, dtype=dtype_or_bounds[0])
    return draw(shape, drawn, *dtype_or_bounds, dtype=dtype_or_bounds[0].dtype)


def _shuffled(
    context: StepContext,
    original: Callable[..., tf.Tensor],
    x: Any,
    axis: int = 0,
    seed: Any = None,
) -> tf.Tensor:
    """`keras.random.shuffle` of rows, which come from all replicas.

    Of the numbers of rows (`arange(batch_size)`) it gives numbers in the global batch, and `take`
    finds these rows.
    """
    x = keras.ops.convert_to_tensor(x)
    if axis != 0 or context.replicas == 1:
        return original(x, axis, seed)
    has_rows = has_rows_of(x, context.batch) if x.shape[0] is None else x.shape[0] == context.size
    if not has_rows:
        return original(x, axis, seed)
    before, global_rows = context.position()
    numbers = _are_row_numbers(x)
    whole = tf.range(tf.cast(global_rows, x.dtype)) if numbers else gather_rows(context, [x])[0]
    mine = original(whole, 0, seed)[before : before + context.rows_read]
    mine.set_shape(x.shape)
    if numbers:
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
    if axis not in (0, None) or not any(indices is each for each in context.row_numbers):
        return x
    return gather_rows(context, [keras.ops.convert_to_tensor(x)])[0]


def _gather(
    context: StepContext,
    original: Callable[..., tf.Tensor],
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: int | None = None,
    **named: Any,
) -> tf.Tensor:
    """`tf.gather`; of the rows of all replicas, where these are shuffled."""
    params = rows_at(context, params, indices, axis)
    return original(params, indices, validate_indices, axis, **named)


# The replacements of functions that draw random numbers, by key, each to be called with the step's
# context first.
RANDOM: dict[str, Callable[..., Any]] = {
    "draw": _drawn,
    "draw_by_parameters": _drawn_by_parameters,
    "draw_categories": _drawn_categories,
    "draw_with_state": _drawn_with_state,
    "gather": _gather,
    "shuffle": _shuffled,
}
