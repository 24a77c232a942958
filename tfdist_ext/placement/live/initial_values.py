"""Initial values of variables: each piece makes its own rows, and needs no other memory.

TensorFlow's stateless random generator counts: each group of values takes the next counters. From
the right counter on, the values are those of the whole tensor, to the bit (`counter_at`). In a
graph, each operation on the drawn values writes into the memory of the operation before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.placement.live._keras_private import fans_of, next_seed, variable_behind
from tfdist_ext.placement.specs import VariableSpec

Rows = Callable[[int, int], tf.Tensor]  # (start, stop) -> the rows from start to before stop

_PHILOX = 1
_UNIFORM = "StatelessRandomUniformV2"
_NORMAL = "StatelessRandomNormalV2"
_TRUNCATED = "StatelessTruncatedNormalV2"
# Counters that each value of a truncated normal reserves, because it may be drawn again. Other
# operations use one counter for a group of values.
_RESERVED = 64

_BLOCK = 2**20  # a quarter of the values of a block

# All values are the same, so each piece can be made alone. A subclass may look at the shape.
_CONSTANT = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
# These initializers return what they draw. A subclass may do more.
_DRAWING = frozenset(
    getattr(keras.initializers, name)
    for name in (
        *("RandomUniform", "RandomNormal", "TruncatedNormal", "VarianceScaling"),
        *("GlorotUniform", "GlorotNormal", "HeUniform", "HeNormal", "LecunUniform", "LecunNormal"),
    )
)


class InitialValue:
    """The initial value that a variable creator is given, whole or in rows.

    Attributes:
        spec: path (the name of a variable that is not from Keras), shape, dtype, and whether the
            variable is trainable.
        of_keras: whether the variable is created by Keras.
        value: the initial value; already computed if its shape was not known otherwise, and made
            without further memory if its initializer is known.
    """

    def __init__(self, kwargs: dict[str, Any], *, where: str):
        """
        Args:
            kwargs: the arguments of the variable creator.
            where: the device on which a value of unknown shape is computed.
        """
        self.value = kwargs["initial_value"]
        behind = variable_behind(self.value)
        self.of_keras = behind is not None
        self._initializer: Any = None
        if behind is not None:
            variable, self._initializer = behind
            path, shape, dtype = variable.path, tuple(variable.shape), variable.dtype
        else:
            path = kwargs.get("name") or "Variable"
            shape, dtype = self._look(kwargs, where)
        trainable = kwargs.get("trainable") is not False
        self.spec = VariableSpec(path, shape, dtype, trainable=trainable)
        self._rows: Rows | None = None
        if shape and _is_known(self._initializer, dtype):
            self.value = functools.partial(self.rows, 0, shape[0])

    def rows(self, start: int, stop: int) -> Any:
        """These rows. Call it on the device of their piece."""
        initializer, spec = self._initializer, self.spec
        if self._rows is None and initializer is not None:
            self._rows = rows_made_by(initializer, spec.shape, spec.dtype)
        if self._rows is not None:
            return self._rows(start, stop)
        if callable(self.value):  # the whole value, on the device of the first piece
            self.value = self.value()
        return self.value[start:stop]

    def _look(self, kwargs: dict[str, Any], where: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a variable that is not from Keras."""
        dtype, shape = kwargs.get("dtype"), tf.TensorShape(kwargs.get("shape"))
        if callable(self.value) and (dtype is None or not shape.is_fully_defined()):
            with tf.device(where):
                self.value = self.value()
        if not callable(self.value):
            if not isinstance(self.value, np.ndarray | tf.Tensor):
                self.value = tf.convert_to_tensor(self.value, dtype=dtype)
            dtype = dtype or self.value.dtype
            shape = tf.TensorShape(self.value.shape)
        return tuple(shape.as_list()), tf.as_dtype(dtype).name


def with_known_rows(kwargs: dict[str, Any]) -> Any:
    """The initial value of a variable creator's arguments, made without further memory if known."""
    value = kwargs["initial_value"]
    return value if variable_behind(value) is None else InitialValue(kwargs, where="").value


def _is_known(initializer: Any, dtype: str) -> bool:
    """Whether each row of an initializer's value can be made alone."""
    if type(initializer) in _CONSTANT:
        return np.ndim(getattr(initializer, "value", 0)) == 0
    return type(initializer) in _DRAWING and dtype in ("float32", "float64")


def rows_made_by(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str
) -> Rows | None:
    """A function that makes rows of the initializer's value; None unless each can be made alone.

    A seed is used once, as if the initializer had drawn the whole value.
    """
    if not _is_known(initializer, dtype):
        return None
    if type(initializer) in _CONSTANT:
        value = tf.cast(initializer([], dtype=dtype), dtype)
        return lambda start, stop: tf.fill([stop - start, *shape[1:]], value)
    op, first, second = _distribution(initializer, shape)
    convert = tf.cast if op == _UNIFORM else tf.constant  # cast: by way of float32, as in Keras
    with tf.device(None):  # a server takes no argument of a graph from another server
        first, second = convert(first, dtype), convert(second, dtype)
        scale, shift = (second - first, first) if op == _UNIFORM else (second, first)
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=next_seed(initializer))
    width = math.prod(shape[1:])

    def rows(start: int, stop: int) -> tf.Tensor:
        begin = start * width
        before = begin % group_size(tf.as_dtype(dtype))
        with tf.device(None):
            at = counter_at(counter, begin - before, op, tf.as_dtype(dtype))
            size = tf.constant([stop - start, *shape[1:]], tf.int64)
        return _drawing(op, dtype, before)(size, key, at, scale, shift)

    return rows


@functools.cache
def _drawing(op: str, dtype: str, before: int) -> Callable[..., tf.Tensor]:
    """A graph that draws, and leaves out the first values."""

    def draw(
        shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, scale: tf.Tensor, shift: tf.Tensor
    ) -> tf.Tensor:
        values = getattr(tf.raw_ops, op)(
            shape=[before + tf.reduce_prod(shape)],
            key=key,
            counter=counter,
            alg=_PHILOX,
            dtype=dtype,
        )
        return tf.reshape(values[before:] if before else values, shape) * scale + shift

    def draw_blocks(shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, *more: Any) -> tf.Tensor:
        # Leaving out values copies the others, so it is done in blocks of whole groups of values.
        width = tf.reduce_prod(shape[1:])
        most = 4 * tf.maximum(_BLOCK // width, 1)

        def add(start: tf.Tensor, made: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            stop = tf.minimum(start + most, shape[0])
            at = counter_at(counter, start * width, op, tf.as_dtype(dtype))
            block = draw(tf.concat([[stop - start], shape[1:]], 0), key, at, *more)
            rows = tf.cast(tf.range(start, stop), tf.int32)
            return stop, tf.raw_ops.InplaceUpdate(x=made, i=rows, v=block)

        made = tf.raw_ops.Empty(shape=tf.cast(shape, tf.int32), dtype=dtype)
        start = tf.constant(0, tf.int64)
        return tf.while_loop(lambda start, _: start < shape[0], add, (start, made))[1]

    return tf.function(draw_blocks if before else draw, autograph=False)


def _distribution(initializer: Any, shape: tuple[int, ...]) -> tuple[str, float, float]:
    """The operation that draws; bounds of a uniform, or mean and deviation of a normal one."""
    if isinstance(initializer, keras.initializers.RandomUniform):
        return _UNIFORM, initializer.minval, initializer.maxval
    if isinstance(initializer, keras.initializers.RandomNormal):
        return _NORMAL, initializer.mean, initializer.stddev
    if isinstance(initializer, keras.initializers.TruncatedNormal):
        return _TRUNCATED, initializer.mean, initializer.stddev
    # VarianceScaling and its subclasses, as Keras computes them.
    fan_in, fan_out = fans_of(initializer, shape)
    fan = {"fan_in": fan_in, "fan_out": fan_out}.get(initializer.mode, (fan_in + fan_out) / 2)
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return _UNIFORM, -limit, limit
    if initializer.distribution == "untruncated_normal":
        return _NORMAL, 0.0, math.sqrt(variance)
    # The standard deviation of a normal distribution that is cut at two standard deviations.
    return _TRUNCATED, 0.0, math.sqrt(variance) / 0.87962566103423978


def group_size(dtype: tf.DType) -> int:
    """Number of values that are drawn together, from one counter."""
    return 2 if dtype.size == 8 else 4


def counter_at(counter: tf.Tensor, number: int | tf.Tensor, op: str, dtype: tf.DType) -> tf.Tensor:
    """The counter from which the values of a tensor are drawn, beginning at one of them.

    Args:
        counter: the counter of the whole tensor.
        number: index of the value, which must be the first of its group.
        op: the drawing operation, for example "StatelessRandomUniformV2".
        dtype: the dtype of the values.
    """
    group = group_size(dtype)
    ahead = number // group * (_RESERVED * group if op == _TRUNCATED else 1)
    return counter + tf.cast(tf.stack([ahead, 0]), tf.uint64)
