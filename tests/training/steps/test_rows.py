"""What is the same on all replicas, and what has rows of the batch, told from a step's graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.training.steps import rows
from tfdist_ext.training.steps.rows import EqualTensors


@functools.cache
def variable() -> tf.Variable:
    return tf.Variable([2, 0, 1])


def traced(function: Callable[[Any], Any], shape: Any = (None, None)) -> Any:
    """What a function returns for a batch of a graph."""
    found = []
    variable()  # not in the graph
    trace = tf.function(lambda x: found.append(function(x)), autograph=False)
    trace.get_concrete_function(tf.TensorSpec(shape, tf.int32))
    return found[0]


EQUAL = {
    "length": lambda x: tf.range(tf.shape(x)[1]),
    "last size": lambda x: tf.range(tf.shape(x)[-1]),
    "unstacked": lambda x: tf.range(tf.unstack(tf.shape(x))[1]),
    "rest of shape": lambda x: tf.zeros(tf.shape(x)[1:], tf.int32),
    "Keras": lambda x: keras.ops.expand_dims(keras.ops.arange(keras.ops.shape(x)[1]), 0),
    "variable": lambda x: variable() + 0,
    "by seed": lambda x: tf.random.stateless_uniform([4], [1, 2], 0, 9, tf.int32),
    "beside others": lambda x: tf.identity_n([tf.range(3), x])[0],
}
OF_ROWS = {
    "computed": lambda x: tf.where(x < 0, x + 9, x),
    "number of rows": lambda x: tf.range(tf.shape(x)[0]),
    "first of two sizes": lambda x: tf.shape(x)[-2],
    "its shape": lambda x: tf.zeros(tf.cast(tf.shape(x), tf.int64), tf.int32),
    "tiled": lambda x: tf.tile(tf.range(4)[None], [tf.shape(x)[0], 1]),
    "stateful random": lambda x: tf.random.uniform([4], 0, 9, tf.int32),
    "Python": lambda x: tf.py_function(lambda: np.arange(3), [], tf.int64),
    "in a function": lambda x: tf.function(lambda y: (tf.range(tf.shape(y)[1]), y))(x)[1],
    "branch": lambda x: tf.cond(x[0, 0] > 1, lambda: variable() + 1, lambda: variable() + 0),
    "beside others": lambda x: tf.identity_n([tf.range(3), x])[1],
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_on_all_replicas(name: str) -> None:
    assert traced(lambda x: EqualTensors(x).has(EQUAL[name](x)))


@pytest.mark.parametrize("name", OF_ROWS)
def test_of_rows(name: str) -> None:
    assert not traced(lambda x: EqualTensors(x).has(OF_ROWS[name](x)))


def test_sums_are_equal() -> None:
    def step(x: Any) -> None:
        equal = EqualTensors(x)
        total = tf.reduce_sum(x)
        assert not equal.has(total)
        total = tf.reduce_sum(x) + 0
        equal.add([total])
        assert equal.has(total * 2 + variable())
        assert not equal.has(total * x[0])

    traced(step)


@functools.cache
def words() -> keras.layers.Layer:
    layer = keras.layers.GRU(3, return_sequences=True)
    layer.build((None, None, 4))
    return layer


def selected(x: Any) -> Any:
    return tf.boolean_mask(x, x[:, 0] > 0)


# Of a batch of (rows, length, 4) numbers: axis, blocks, whether they are selected; None: no rows.
ROWS: dict[str, tuple[Any, Any]] = {
    "rows": (lambda x: x, (0, 1, False)),
    "two blocks": (lambda x: tf.concat([x, 2 * x], 0), (0, 2, False)),
    "tiled": (lambda x: tf.tile(x, [4, 1, 1]), (0, 4, False)),
    "a layer after": (lambda x: tf.reduce_sum(tf.concat([x, x, x], 0), 1) + 1, (0, 3, False)),
    "as many zeros": (lambda x: tf.zeros([2 * tf.shape(x)[0], 3]), (0, 1, False)),
    "noise as large": (lambda x: tf.zeros_like(tf.concat([x, x], 0)), (0, 2, False)),
    "columns": (lambda x: tf.concat([x, x], 1), (0, 1, False)),
    "stacked": (lambda x: tf.stack([x, x]), (1, 1, False)),
    "stacked behind": (lambda x: tf.stack([x, x], 1), (0, 1, False)),
    "stacked, as blocks": (lambda x: tf.reshape(tf.stack([x, x, x]), [-1, 4]), (0, 3, False)),
    "blocks, stacked": (
        lambda x: tf.reshape(tf.concat([x[:, 0], x[:, 1]], 0), [2, -1, 4]), (1, 1, False)
    ),
    "halves": (lambda x: tf.reshape(x, [2, -1, 4]), (1, 0, False)),
    "words": (lambda x: tf.reshape(x, [-1, 4]), (0, 1, False)),
    "time first": (lambda x: tf.transpose(x, [1, 0, 2]), (1, 1, False)),
    "time first and back": (
        lambda x: tf.transpose(tf.exp(tf.transpose(x, [1, 0, 2])), [1, 0, 2]), (0, 1, False)
    ),
    "mean of rows": (lambda x: tf.reduce_mean(x, 0), None),
    "mean of words": (lambda x: tf.reduce_mean(x, 1), (0, 1, False)),
    "a row": (lambda x: x[0], None),
    "a word": (lambda x: x[:, 0], (0, 1, False)),
    "with a new axis": (lambda x: x[None, :, 0], (1, 1, False)),
    "squeezed": (lambda x: tf.squeeze(tf.stack([x]), [0]), (0, 1, False)),
    "unstacked": (lambda x: tf.unstack(x, 4, -1)[0], (0, 1, False)),
    "product": (lambda x: tf.matmul(x[:, 0], tf.ones([4, 3])), (0, 1, False)),
    "covariance": (lambda x: tf.matmul(x[:, 0], x[:, 0], transpose_a=True), None),
    "looked up": (lambda x: tf.gather(tf.ones([9, 2]), tf.cast(x, tf.int32)), (0, 1, False)),
    "looked up in pieces": (
        lambda x: tf.nn.embedding_lookup([tf.ones([9, 2])] * 2, tf.cast(x[:, 0], tf.int32)),
        (0, 1, False),
    ),
    "selected": (selected, (0, 1, True)),
    "selected entries": (lambda x: tf.square(x[x > 0]), (0, 1, True)),
    "selected by place": (lambda x: tf.gather_nd(x, tf.where(x > 0)), (0, 1, True)),
    "first rows": (lambda x: x[:3] + 1, (0, 1, True)),
    "one-hot": (lambda x: tf.one_hot(tf.cast(x[:, 0], tf.int32), 5), (0, 1, False)),
    "one-hot in front": (
        lambda x: tf.one_hot(tf.cast(x[:, 0, 0], tf.int32), 5, axis=0), (1, 1, False)
    ),
    "outer product": (lambda x: tf.einsum("bi,bj->bij", x[:, 0], x[:, 1]), (0, 1, False)),
    "weights first": (lambda x: tf.einsum("ij,bj->ib", tf.ones([3, 4]), x[:, 0]), (1, 1, False)),
    "sum by einsum": (lambda x: tf.einsum("bi,bj->ij", x[:, 0], x[:, 0]), None),
    "diagonal": (lambda x: tf.linalg.diag(x[:, 0]), (0, 1, False)),
    "columns looked up": (lambda x: tf.gather(x, [[0, 1], [1, 2]], axis=2), (0, 1, False)),
    "words looked up": (lambda x: tf.gather(x, tf.range(tf.shape(x)[1]), axis=1), (0, 1, False)),
    "two rows": (lambda x: tf.gather(x, [0, 1]), None),
    "table by columns": (
        lambda x: tf.gather(tf.ones([2, 9]), tf.cast(x[:, 0, 0], tf.int32), axis=1), (1, 1, False)
    ),
    "rows and zeros": (lambda x: tf.concat([tf.zeros([3, 4]), x[:, 0]], 0), (0, 0, False)),
    "tiled as often as words": (lambda x: tf.tile(x, [tf.shape(x)[1], 1, 1]), (0, 0, False)),
    "words tiled": (lambda x: tf.tile(x, [1, tf.shape(x)[0], 1]), (0, 1, False)),
    "words and rows, flat": (lambda x: tf.reshape(tf.transpose(x[:, :, 0]), [-1]), (0, 0, False)),
    "words of a loop": (lambda x: words()(x), (0, 1, False)),
    "range of words": (lambda x: tf.range(tf.shape(x)[1]), None),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_how_a_tensor_holds_rows(name: str) -> None:
    function, expected = ROWS[name]
    words()  # not in the graph

    def found(x: Any) -> Any:
        x = tf.cast(x, tf.float32)
        return rows.rows_of(function(x), EqualTensors(x))

    assert traced(found, (None, None, 4)) == expected
