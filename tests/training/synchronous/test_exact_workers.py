"""Two real workers train as one device: the rules of a step, and gradients of varying shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from training_cases import of_words

import tfdist_ext as tfd
from tfdist_ext.testing import run_tasks

ROWS, BATCH = 41, 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype("float32")
Y = RNG.normal(size=(ROWS, 1)).astype("float32")
IDS = RNG.integers(0, 9, (40, 3))  # 4 rows in the last batch: fewer, and as many on each worker
WORDS = {"two": RNG.integers(0, 9, (ROWS, 2)), "three": RNG.integers(0, 9, (ROWS, 3))}
LENGTHS = [4, 9, 2, 9, 1, 7, 3, 3]


class Average(keras.layers.Layer):
    """Moving averages that a loop writes; one is a variable of TensorFlow's alone."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(5,), initializer="zeros", trainable=False)
        self.own = tf.Variable(tf.zeros([5]), trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        before = 0.5 * (self.mean + self.own)

        def write(i: Any) -> Any:
            self.mean.assign(0.8 * self.mean + 0.2 * tf.reduce_mean(x, axis=0))
            self.own.assign_add(0.1 * tf.reduce_mean(x, axis=0))
            return (i + 1,)

        if training:
            tf.while_loop(lambda i: i < 3, write, [0])
        return x - before


class Normalized(keras.optimizers.Adam):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = [g / (keras.ops.norm(g) + 0.1) for g in grads]
        super().apply(grads, trainable_variables)


class LossOfRows(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_sum((y - y_pred) ** 2, axis=1)


class Contrasts(keras.Model):
    """A loss for each row of the global batch, and a queue of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        self.queue = self.add_weight(shape=(12, 3), initializer="ones", trainable=False, name="q")

    def call(self, x: Any) -> Any:
        return self.network(x)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            every = tfd.all_rows(self(data[0]))
            logits = tf.matmul(every, every, transpose_b=True)
            labels = tf.range(tf.shape(logits)[0])
            loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.queue.assign(tf.concat([every, self.queue], axis=0)[:12])
        return {"loss": tf.reduce_mean(loss)}


class Batches(keras.utils.PyDataset):
    num_batches = -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def of_rows() -> keras.Model:
    model = LossOfRows([keras.Input((5,)), Average(), keras.layers.Dense(1)])
    model.compile(Normalized(0.05), "mse")
    return model


def of_all_rows() -> keras.Model:
    model = Contrasts()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9))
    return model


def tables() -> keras.Model:
    """Two tables, with two and with three slices for each row."""
    inputs = {name: keras.Input(x.shape[1:], dtype="int32", name=name) for name, x in WORDS.items()}
    rows = [keras.layers.Embedding(9, 4)(inputs[name]) for name in WORDS]
    found = [keras.ops.tanh(keras.ops.sum(each, axis=1)) for each in rows]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate(found, axis=-1)))
    model.compile(keras.optimizers.Adam(0.1), "mse", steps_per_execution=8)
    return model


def of_lengths() -> tf.data.Dataset:
    """Batches of sequences, each batch of another length."""

    def batches() -> Iterator[Any]:
        random = np.random.default_rng(1)
        for length in LENGTHS:
            yield random.integers(0, 9, (6, length)), random.normal(size=(6, 1))

    spec = tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def own_batches(shard: tfd.data.Shard) -> tf.data.Dataset:
    """Of each 8 rows the first 3, or the other 5; all of them for one worker."""
    of = {(0, 1): slice(8), (0, 2): slice(3), (1, 2): slice(3, 8)}[shard.index, shard.count]
    every = tf.data.Dataset.from_tensor_slices((WORDS, Y)).take(40).batch(8)
    return every.map(lambda x, y: ({name: rows[of] for name, rows in x.items()}, y[of]))


def trained(
    strategy: tf.distribute.Strategy, seed: int, before_more: Callable[[], None] = lambda: None
) -> dict[str, list[Any]]:
    """Losses and weights after training in each way; `seed` is that of the first one."""
    found: dict[str, list[Any]] = {}

    def train(name: str, build: Callable[[], keras.Model], *data: Any, **fit: Any) -> Any:
        keras.utils.set_random_seed(7 if found else seed)
        model = tfd.distribute(build, strategy)
        losses = model.fit(*data, verbose=0, **fit).history["loss"]
        found[name] = [*model.get_weights(), *losses]
        return model

    train("losses of rows, an own apply", of_rows, Batches(), epochs=3)
    # The gradient of the table has fewer slices in the last step of an execution.
    train("fewer slices", of_words, IDS, Y[:40], batch_size=BATCH, epochs=2)
    train("all rows", of_all_rows, X, Y, batch_size=BATCH, epochs=2, shuffle=False)
    train("lengths", of_words, of_lengths(), epochs=2)
    train("uneven shards", tables, tfd.data.from_dataset_fn(own_batches), epochs=2)
    model = train("two tables", tables, WORDS, Y, batch_size=BATCH, epochs=2)
    before_more()
    model.fit(WORDS, Y, batch_size=BATCH, epochs=6, verbose=0)
    found["two tables, further"] = model.get_weights()
    return found


def as_worker() -> dict[str, list[Any]]:
    """Losses and weights."""
    strategy = tfd.create_strategy()

    def after_hours() -> None:
        """TensorFlow has given 65,536 keys, less some that the next fits get."""
        (launcher,) = strategy.extended._cross_device_ops._launchers
        keys, group = launcher._collective_keys, launcher._group_key
        for _ in range(2**16 - 80):
            keys.get_instance_key(group, launcher._device)

    # The first training shuffles by the chief's seed, whatever the seed of the other worker is.
    seed = 7 + 100 * strategy.cluster_resolver.task_id
    return trained(strategy, seed, after_hours)


def test_workers_train_as_one_device() -> None:
    workers = list(run_tasks(as_worker, {"worker": 2}, 160).values())
    expected = trained(tfd.create_strategy("default"), seed=7)
    for name, values in expected.items():
        for wanted, *found in zip(values, *(worker[name] for worker in workers), strict=True):
            for mine in found:
                np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=2e-6, err_msg=name)
            np.testing.assert_array_equal(*found, err_msg=name)
