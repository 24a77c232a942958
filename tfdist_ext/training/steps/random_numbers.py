"""Random numbers of one device: each replica draws the rows of its part of the batch.

On one device a dropout mask, or a layer's noise, is drawn for the whole batch. TensorFlow's
stateless generators count, so a replica can draw its rows of that tensor without the rows before
them: it begins at a later counter. `keras.random`, Keras's layers and `tf.random.stateless_...`
all draw by a few functions, which are replaced (`_drawn`).

The first dimension of a tensor that is drawn is the batch

- if it is unknown while the step is traced, follows from the size of what the step got, and is a
  multiple of the part's rows when the step runs. The entries of a row are one after another. If
  tensors of rows were concatenated, such as generated and real images, each of them has its rows;
- if it is the number of rows of the global batch, and no weight of the model has the shape.

In an eager step all sizes are numbers. There the first dimension is the batch if it is the number
of the part's rows or a multiple of that number. Any other tensor is the same on all replicas.

Without a seed Keras draws from one generator of the calling thread, which it would make in the
thread of each replica, inside of the step. So each replica has one that begins where that of the
calling thread is, and leaves it where one device would have (`Seeds`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.placement.live.initial_values import counter_at, group_size
from tfdist_ext.strategies.traced_replica import copy_number
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.steps.context import StepContext

__all__ = ["RANDOM", "Seeds"]


# Key of a function that is replaced -> the operation that it adds.
_DRAWS = {
    "draw_uniform": "StatelessRandomUniformV2",
    "draw_integers": "StatelessRandomUniformIntV2",
    "draw_bits": "StatelessRandomUniformFullIntV2",
    "draw_normal": "StatelessRandomNormalV2",
    "draw_truncated_normal": "StatelessTruncatedNormalV2",
}

# Key of a function that keeps a state -> that of tf.random which keeps none.
_STATELESS = {
    "draw_uniform_with_state": "stateless_uniform",
    "draw_integers_with_state": "stateless_uniform",
    "draw_normal_with_state": "stateless_normal",
    "draw_truncated_normal_with_state": "stateless_truncated_normal",
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
    _last: tuple[keras.random.SeedGenerator, npt.NDArray[Any]] | None = None

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
        if not self.devices:
            return
        self.generators = self.generators or self._new()
        of_thread = kp.global_seed_generator()
        state = of_thread.state.numpy()
        if self._last is not None:
            before, last = self._last
            if self.from_chief or (before is of_thread and np.array_equal(last, state)):
                return
        if self.from_chief:
            state = self.from_chief(state)
        for generator in self.generators:
            generator.state.assign(state)
        self._last = of_thread, state

    def forget(self) -> None:
        """Begin anew where the calling thread's generator is; every worker must call."""
        self._last = None

    def end(self) -> None:
        """Leave the calling thread's generator where the replicas' are."""
        if self._last is not None:
            of_thread, state = self._last[0], self.generators[0].state.numpy()
            of_thread.state.assign(state)
            self._last = of_thread, state

    def _new(self) -> list[keras.random.SeedGenerator]:
        def generator(device: str) -> keras.random.SeedGenerator:
            with tf.device(device):
                return keras.random.SeedGenerator(0)

        # A new thread is outside of all scopes and graphs that are open in this one.
        with ThreadPoolExecutor(1) as thread:
            return list(thread.map(generator, self.devices))


def _drawn_by(
    op: str,
    here: StepContext,
    original: Callable[..., tf.Tensor],
    shape: tf.Tensor,
    *,
    counter: tf.Tensor,
    **named: Any,
) -> tf.Tensor:
    """What one device would draw: this part's rows of it, or all where it has no rows."""
    whole = original(shape, counter=counter, **named)
    named.pop("name", None)
    if not (blocks := here.blocks_of_rows(shape, whole.shape)):
        return whole
    sizes = tf.cast(shape, tf.int64)
    width = whole.shape[1:].num_elements()  # None where it is not known
    size = tf.reduce_prod(sizes) if width is None else sizes[0] * width
    length = -(-size // blocks)
    entries = length // here.rows_read  # of a row in a block
    before, of_all = here.place()
    is_batch = here.is_batch_size(sizes[0], blocks)
    group = group_size(whole.dtype)
    aligned = blocks == 1 and width is not None and width % group == 0
    pieces = []
    for block in range(blocks):
        first = tf.where(is_batch, (block * of_all + before) * entries, block * length)
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
    here: StepContext, original: Callable[..., tf.Tensor], shape: tf.Tensor, **named: Any
) -> tf.Tensor:
    """The same for distributions that draw all values of one parameter before those of the next.

    Everything is drawn, with any parameters for the rows of other replicas.
    """
    whole = original(shape, **named)
    named.pop("name", None)
    if not here.blocks_of_rows(shape, whole.shape):
        return whole
    sizes = tf.cast(shape, tf.int64)
    count = sizes[0]
    before, of_all = here.place()
    is_batch = here.is_batch_size(count)
    entries = count // here.rows_read
    first = tf.where(is_batch, before * entries, 0)
    after = tf.where(is_batch, of_all * entries, count) - first - count
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
    here: StepContext,
    original: Callable[..., tf.Tensor],
    logits: tf.Tensor,
    *more: Any,
    **named: Any,
) -> tf.Tensor:
    """The same of categories, drawn row by row."""
    whole = original(logits, *more, **named)
    if not here.blocks_of_rows(tf.shape(logits), logits.shape):
        return whole
    count = tf.shape(logits, tf.int64)[0]
    before, _ = here.place()
    first = tf.where(here.is_batch_size(count), before * (count // here.rows_read), 0)
    drawn = original(tf.pad(logits, [[first, 0], [0, 0]]), *more, **named)[first:]
    drawn.set_shape(whole.shape)
    return drawn


def _drawn_with_state(
    stateless: str,
    here: StepContext,
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
    if not here.blocks_of_rows(shape, tf.broadcast_to(False, shape).shape):
        return original(shape, *dtype_or_bounds, seed=seed, seed2=seed2, **named)
    most = tf.int32.max
    drawn = tf.raw_ops.RandomUniformInt(shape=[2], minval=0, maxval=most, seed=seed, seed2=seed2)
    draw = getattr(tf.random, stateless)
    if len(dtype_or_bounds) == 1:
        return draw(shape, drawn, dtype=dtype_or_bounds[0])
    return draw(shape, drawn, *dtype_or_bounds, dtype=dtype_or_bounds[0].dtype)


def _of_numbered_shape(
    here: StepContext, original: Callable[..., tf.Tensor], *args: Any, **named: Any
) -> tf.Tensor:
    """`tf.random.stateless_normal(shape, ...)`, where the shape may have the batch as a number."""
    shape, *more = [named.pop("shape"), *args] if "shape" in named else args
    with here.shape_of_part(shape) as shape_of_part:
        return original(shape_of_part, *more, **named)


def _shuffled(
    here: StepContext, original: Callable[..., tf.Tensor], x: Any, axis: int = 0, seed: Any = None
) -> tf.Tensor:
    """`keras.random.shuffle` of rows, which come from all replicas.

    Of the numbers of rows (`arange(batch_size)`) it gives numbers in the global batch, and `take`
    finds these rows.
    """
    x = keras.ops.convert_to_tensor(x)
    if axis != 0 or here.replicas == 1 or not here.has_all_own_rows(x):
        return original(x, axis, seed)
    before, of_all = here.place()
    numbers = _are_row_numbers(x)
    whole = tf.range(tf.cast(of_all, x.dtype)) if numbers else here.all_rows([x])[0]
    mine = original(whole, 0, seed)[before : before + here.rows_read]
    mine.set_shape(x.shape)
    if numbers:
        here.note_row_numbers(mine)
    return mine


def _are_row_numbers(x: tf.Tensor) -> bool:
    if not tf.is_symbolic_tensor(x):
        return x.shape.rank == 1 and np.array_equal(x, np.arange(x.shape[0]))
    while x.op.type in ("Cast", "Identity"):
        x = x.op.inputs[0]
    return x.op.type == "Range" and tf.get_static_value(x.op.inputs[0]) == 0


# The replacements of functions that draw random numbers, by key, each to be called with the step's
# context first.
RANDOM: dict[str, Callable[..., Any]] = {
    "draw_numbered": _of_numbered_shape,
    "draw_by_parameters": _drawn_by_parameters,
    "draw_categories": _drawn_categories,
    "shuffle": _shuffled,
    **{key: functools.partial(_drawn_by, op) for key, op in _DRAWS.items()},
    **{key: functools.partial(_drawn_with_state, name) for key, name in _STATELESS.items()},
}
