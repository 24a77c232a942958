"""Rows of TensorFlow's stateless random tensors, made without the rows before them.

The generator counts: each group of values takes the next counters. From the right counter on, the
values are those of the whole tensor, to the bit (`counter_at`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.placement.live._keras_private import attributes_set

__all__ = ["Rows", "counter_at", "group_size", "rows_drawn_by"]

Rows = Callable[[int, int], tf.Tensor]  # the rows from the first number to before the second

_PHILOX = 1
_UNIFORM, _NORMAL, _TRUNCATED = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
)
# Counters of a value of a truncated normal, which draws again; else a group has one.
_RESERVED = 64

# Those of Keras's that return what they draw. A subclass may do more.
_DRAWING = frozenset(
    getattr(keras.initializers, name)
    for name in (
        *("RandomUniform", "RandomNormal", "TruncatedNormal", "VarianceScaling"),
        *("GlorotUniform", "GlorotNormal", "HeUniform", "HeNormal", "LecunUniform", "LecunNormal"),
    )
)


def rows_drawn_by(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str
) -> Rows | None:
    """A function that makes rows of the initializer's value; None unless it is one random draw.

    The initializer is called here, once and for the whole shape, and takes its seed as if it had
    drawn.
    """
    if type(initializer) not in _DRAWING or dtype not in ("float32", "float64"):
        return None
    draws: list[Rows] = []
    with _instead_of_drawing(draws):
        initializer(shape, dtype=dtype)
    (rows,) = draws
    return rows


@contextlib.contextmanager
def _instead_of_drawing(draws: list[Rows]) -> Iterator[None]:
    """Scope in which tf.random's functions only say how they would make rows."""

    def uniform(shape: Any, seed: Any, minval: Any = 0, maxval: Any = 1, *, dtype: Any) -> None:
        low = tf.convert_to_tensor(minval, dtype)
        high = tf.convert_to_tensor(maxval, dtype)
        draws.append(_rows(_UNIFORM, shape, dtype, seed, high - low, low))

    def of(op: str) -> Callable[..., None]:
        def normal(shape: Any, seed: Any, mean: Any = 0, stddev: Any = 1, *, dtype: Any) -> None:
            scale = tf.convert_to_tensor(stddev, dtype)
            shift = tf.convert_to_tensor(mean, dtype)
            draws.append(_rows(op, shape, dtype, seed, scale, shift))

        return normal

    with attributes_set(
        tf.random,
        stateless_uniform=uniform,
        stateless_normal=of(_NORMAL),
        stateless_truncated_normal=of(_TRUNCATED),
    ):
        yield


def _rows(op: str, shape: Any, dtype: str, seed: Any, scale: tf.Tensor, shift: tf.Tensor) -> Rows:
    draw = getattr(tf.raw_ops, op)
    width = math.prod(shape[1:])
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    def rows(start: int, stop: int) -> tf.Tensor:
        first = start * width
        before = first % group_size(tf.as_dtype(dtype))
        values = draw(
            shape=tf.constant([before + (stop - start) * width], tf.int64),
            key=key,
            counter=counter_at(counter, first - before, op, tf.as_dtype(dtype)),
            alg=_PHILOX,
            dtype=dtype,
        )
        return tf.reshape(values[before:], [stop - start, *shape[1:]]) * scale + shift

    return rows


def group_size(dtype: tf.DType) -> int:
    """The values that are drawn together, from a counter of their own on."""
    return 2 if dtype.size == 8 else 4


def counter_at(counter: tf.Tensor, number: int | tf.Tensor, op: str, dtype: tf.DType) -> tf.Tensor:
    """The counter from which the values of a tensor follow, from a number on.

    Args:
        counter: of the whole tensor.
        number: of the value, the first one of its group.
        op: which draws, as "StatelessRandomUniformV2".
    """
    group = group_size(dtype)
    ahead = number // group * (_RESERVED * group if op == _TRUNCATED else 1)
    return counter + tf.cast(tf.stack([ahead, 0]), tf.uint64)
