"""What depends on a replica's rows, told from the graph of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.training.steps.rows import BATCH, CONSTANT, DISTINCT, BatchDependence


@functools.cache
def variable() -> tf.Variable:
    return tf.Variable([2, 0, 1])


def kinds(make: Callable[[Any], Any], shape: Any = (None, None), size: Any = None) -> list[str]:
    found: list[str] = []
    variable()  # not in the graph

    @tf.function
    def trace(x: Any) -> None:
        indices = tf.reshape(make(x), [-1])
        found.extend(kind for _, kind in BatchDependence(x, size).parts_of(indices))

    trace.get_concrete_function(tf.TensorSpec(shape, tf.int32))
    return found


def turns(x: Any, number: Any) -> Any:
    return tf.while_loop(lambda i, _: i < number, lambda i, t: (i + 1, t + 1), (0, variable() + 0))[
        1
    ]


SAME = {
    "length": lambda x: tf.range(tf.shape(x)[1]),
    "rest of shape": lambda x: tf.zeros(tf.shape(x)[1:], tf.int32),
    "taken of shape": lambda x: tf.range(tf.gather(tf.shape(x), 1)),
    "Keras": lambda x: keras.ops.expand_dims(keras.ops.arange(keras.ops.shape(x)[1]), 0),
    "variable": lambda x: variable() + 0,
    "by seed": lambda x: tf.random.stateless_uniform([4], [1, 2], 0, 9, tf.int32),
    "in a function": lambda x: tf.function(lambda y: (tf.range(tf.shape(y)[1]), y))(x)[0],
    "in a branch": lambda x: tf.cond(
        variable()[0] > 1, lambda: variable() + 1, lambda: variable() + 0
    ),
    "in a loop": lambda x: turns(x, tf.shape(x)[1]),
    "beside others": lambda x: tf.identity_n([tf.range(3), x])[0],
}
OF_ROWS = {
    "computed": lambda x: tf.where(x < 0, x + 9, x),
    "rows": lambda x: tf.range(tf.shape(x)[0]),
    "its shape": lambda x: tf.zeros(tf.shape(x), tf.int32),
    "tiled": lambda x: tf.tile(tf.range(4)[None], [tf.shape(x)[0], 1]),
    "stateful random": lambda x: tf.random.uniform([4], 0, 9, tf.int32),
    "Python": lambda x: tf.py_function(lambda: np.arange(3), [], tf.int64),
    "in a function": lambda x: tf.function(lambda y: (tf.range(tf.shape(y)[1]), y))(x)[1],
    "branch": lambda x: tf.cond(x[0, 0] > 1, lambda: variable() + 1, lambda: variable() + 0),
    "in a branch": lambda x: tf.cond(variable()[0] > 1, lambda: x + 1, lambda: x + 0),
    "turns": lambda x: turns(x, tf.shape(x)[0]),
    "beside others": lambda x: tf.identity_n([tf.range(3), x])[1],
}


@pytest.mark.parametrize("name", SAME)
def test_constant(name: str) -> None:
    assert kinds(SAME[name]) == [CONSTANT]


@pytest.mark.parametrize("name", OF_ROWS)
def test_of_rows(name: str) -> None:
    assert kinds(OF_ROWS[name]) == [BATCH]


def test_distinct_and_concatenated() -> None:
    assert kinds(lambda x: tf.unique(tf.reshape(x, [-1]))[0]) == [DISTINCT]

    def several(x: Any) -> Any:
        distinct = tf.unique(tf.reshape(x, [-1]))[0]
        return tf.concat([tf.concat([tf.range(3), x[:, 0]], 0), distinct], 0)

    assert kinds(several) == [CONSTANT, BATCH, DISTINCT]


def test_parts_of_known_size() -> None:
    """A constant made with the size has each index for each row."""
    of_four = {"shape": (4, 6), "size": 4}
    tiled = lambda x: keras.ops.tile(keras.ops.arange(6)[None], (x.shape[0], 1))  # noqa: E731
    assert kinds(tiled, **of_four) == [BATCH]
    assert kinds(lambda x: keras.ops.zeros(x.shape, "int32"), **of_four) == [BATCH]
    assert kinds(lambda x: tf.range(8), **of_four) == [CONSTANT]
    assert kinds(lambda x: tf.constant([0, 1, 0, 1, 2, 2, 0, 1]), **of_four) == [CONSTANT]


def test_what_is_equal_stays_equal() -> None:
    variable()

    @tf.function
    def trace(x: Any) -> None:
        dependence = BatchDependence(x)
        total = tf.reduce_sum(x)
        assert not dependence.is_equal(total)
        total = tf.reduce_sum(x) + 0
        dependence.set_equal([total])
        assert dependence.is_equal(total * 2 + variable())
        assert not dependence.is_equal(total * x[0])

    trace.get_concrete_function(tf.TensorSpec([None, 3], tf.int32))
