"""Two workers sum gradients of varying shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.ops import collective_ops
from training_cases import of_words

import tfdist_ext as tfd
from tfdist_ext.strategies.collective_sizes import (
    SIZES,
    from_vectors,
    in_one_vector,
    key_of_size,
    padded,
    size_at_least,
)
from tfdist_ext.testing import run_tasks
from tfdist_ext.training.steps.rows import RowTrace


@settings(deadline=None)
@given(st.integers(0, SIZES[-1]))
def test_at_most_a_quarter_more(size: int) -> None:
    found = int(size_at_least(tf.constant(size, tf.int64)))
    assert size <= found <= max(1, 1.25 * size)
    assert int(size_at_least(tf.constant(found, tf.int64))) == found


KEYS = st.tuples(st.integers(1, 2**24 - 1), st.sampled_from(SIZES))


@settings(deadline=None)
@given(KEYS, KEYS)
def test_each_key_and_size_have_a_key(one: tuple[int, int], other: tuple[int, int]) -> None:
    first, second = (int(key_of_size(key, tf.constant(size))) for key, size in (one, other))
    assert (first == second) == (one == other)
    assert -(2**31) <= first < 0  # TensorFlow's own are above


@pytest.mark.parametrize("count", [0, 2, 3])
def test_padding_is_zeros_of_an_index_that_is_there(count: int) -> None:
    slices = tf.IndexedSlices(tf.ones((count, 2)), tf.constant([5, 4, 6][:count], tf.int32), [9, 2])
    longer = padded(slices, tf.constant(3, tf.int64))
    assert longer.indices.numpy().tolist() == ([5, 4, 6][:count] + 3 * [5 if count else 0])[:3]
    dense = tf.convert_to_tensor(longer).numpy()
    np.testing.assert_array_equal(dense, tf.convert_to_tensor(slices).numpy())


def test_a_vector_is_padded() -> None:
    np.testing.assert_array_equal(padded(tf.ones(9), tf.constant(10, tf.int64)), [1] * 9 + [0])


INDICES = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(INDICES, st.sampled_from([(), (3,), (2, 2)])), min_size=1, max_size=3))
def test_slices_travel_in_one_vector(dtype: str, tables: list[tuple[list[int], Any]]) -> None:
    """To the bit: an index may look like any number, a NaN or one that is flushed to zero."""

    def of_replica(number: int) -> list[tf.IndexedSlices]:
        found = []
        for place, (indices, inner) in enumerate(tables):
            kind = tf.int32 if place % 2 else tf.int64
            values = tf.cast(tf.random.stateless_normal([len(indices), *inner], [number, 0]), dtype)
            mine = tf.constant([index ^ number for index in indices], kind)
            found.append(tf.IndexedSlices(values, mine, [9, *inner]))
        return found

    parts = [of_replica(number) for number in range(3)]
    vectors = [padded(in_one_vector(part), tf.constant(99, tf.int64)) for part in parts]
    for found, *of_table in zip(
        from_vectors(tf.concat(vectors, 0), 3, parts[1]), *parts, strict=True
    ):
        assert found.indices.dtype == of_table[0].indices.dtype
        for name in ("values", "indices"):
            wanted = tf.concat([getattr(slices, name) for slices in of_table], 0)
            np.testing.assert_array_equal(getattr(found, name), wanted)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (lambda x: x, (3, 3)),
        (lambda x: tf.gather(x, [0, 2], axis=1), (2, 2)),
        (lambda x: x[:, None] * x[None, :, :], (33, 51)),  # not so many for each row
        (lambda x: tf.boolean_mask(x, x > 1), (None, None)),
        (lambda x: tf.range(tf.shape(x)[1]), (None, None)),
    ],
)
def test_how_many_entries_a_row_has(entries: Any, expected: Any) -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, (None, 3))
        traces = [RowTrace([entries(x)], [x], primes_from=begin) for begin in (0, 2)]
    assert tuple(trace.entries_of_row() for trace in traces) == expected


ROWS, BATCH = 41, 12
RNG = np.random.default_rng(0)
X = {"two": RNG.integers(0, 9, (ROWS, 2)), "three": RNG.integers(0, 9, (ROWS, 3))}
Y = RNG.normal(size=(ROWS, 1)).astype("float32")
LENGTHS = [4, 9, 2, 9, 1, 7, 3, 3]


def tables(jit_compile: bool = False) -> keras.Model:
    """Two tables, with two and with three slices for each row."""
    inputs = {name: keras.Input(x.shape[1:], dtype="int32", name=name) for name, x in X.items()}
    rows = [keras.layers.Embedding(9, 4)(inputs[name]) for name in X]
    found = [keras.ops.tanh(keras.ops.sum(each, axis=1)) for each in rows]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate(found, axis=-1)))
    optimizer = keras.optimizers.Adam(0.1)
    model.compile(optimizer, "mse", steps_per_execution=8, jit_compile=jit_compile)
    return model


def of_lengths() -> tf.data.Dataset:
    def batches() -> Iterator[Any]:
        random = np.random.default_rng(1)
        for length in LENGTHS:
            yield random.integers(0, 9, (6, length)), random.normal(size=(6, 1))

    spec = tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def own_batches(shard: tfd.data.Shard) -> tf.data.Dataset:
    """Of each 8 rows the first 3, or the other 5; all of them for one worker."""
    of = {(0, 1): slice(8), (0, 2): slice(3), (1, 2): slice(3, 8)}[shard.index, shard.count]
    every = tf.data.Dataset.from_tensor_slices((X, Y)).take(40).batch(8)
    return every.map(lambda x, y: ({name: rows[of] for name, rows in x.items()}, y[of]))


def trained(strategy: tf.distribute.Strategy, before_more: Any = lambda: None) -> dict[str, Any]:
    """Weights after training in each way."""
    found = {}
    builders = {
        "rows": tables,
        "compiled": lambda: tables(jit_compile=True),
        "lengths": of_words,
        "own": tables,
    }
    for name, build in builders.items():
        keras.utils.set_random_seed(7)
        model = tfd.distribute(build, strategy)
        if name == "rows":
            model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
            before_more()
            model.fit(X, Y, batch_size=BATCH, epochs=6, verbose=0)
        elif name == "compiled":
            model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        elif name == "lengths":
            model.fit(of_lengths(), epochs=2, verbose=0)
        else:
            model.fit(tfd.data.from_dataset_fn(own_batches), epochs=2, verbose=0)
        found[name] = model.get_weights()
    return found


def as_worker() -> tuple[int, dict[str, Any]]:
    """(collectives that gather, in a step with two tables; the weights)."""
    strategy = tfd.create_strategy()
    gather = collective_ops.all_gather_v2
    with mock.patch.object(collective_ops, "all_gather_v2", wraps=gather) as gathers:
        tfd.distribute(tables, strategy).fit(X, Y, batch_size=BATCH, verbose=0)

    def after_hours() -> None:
        """TensorFlow has given 65,536 keys, less some that the next fits get."""
        (launcher,) = strategy.extended._cross_device_ops._launchers
        keys, group = launcher._collective_keys, launcher._group_key
        for _ in range(2**16 - 80):
            keys.get_instance_key(group, launcher._device)

    return gathers.call_count, trained(strategy, after_hours)


def test_workers_train_as_one_device() -> None:
    gathers, workers = zip(*run_tasks(as_worker, {"worker": 2}, 120).values(), strict=True)
    assert gathers == (1, 1)
    expected = trained(tfd.create_strategy("default"))
    assert len(workers) == 2
    for name, weights in expected.items():
        for wanted, *found in zip(weights, *(worker[name] for worker in workers), strict=True):
            for mine in found:
                np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=2e-6, err_msg=name)
            np.testing.assert_array_equal(*found, err_msg=name)
