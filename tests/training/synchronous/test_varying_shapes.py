"""Two real workers sum gradients of varying shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import collective_ops
from training_cases import of_words

import tfdist_ext as tfd
from tfdist_ext.testing import run_tasks

ROWS, BATCH = 41, 12
RNG = np.random.default_rng(0)
X = {"two": RNG.integers(0, 9, (ROWS, 2)), "three": RNG.integers(0, 9, (ROWS, 3))}
Y = RNG.normal(size=(ROWS, 1)).astype("float32")
LENGTHS = [4, 9, 2, 9, 1, 7, 3, 3]


def tables() -> keras.Model:
    """Two tables, with two and with three slices for each row."""
    inputs = {name: keras.Input(x.shape[1:], dtype="int32", name=name) for name, x in X.items()}
    rows = [keras.layers.Embedding(9, 4)(inputs[name]) for name in X]
    found = [keras.ops.tanh(keras.ops.sum(each, axis=1)) for each in rows]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate(found, axis=-1)))
    optimizer = keras.optimizers.Adam(0.1)
    model.compile(optimizer, "mse", steps_per_execution=8)
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
