"""Two real workers: losses of rows, state written in a loop, an optimizer with an `apply` of its
own, a shuffled PyDataset, and tables: of rows, whose gradient has fewer slices in the last step of
an execution than in those before, and of positions; and `tfd.all_rows` in a loop in the graph.
"""

from __future__ import annotations

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


class Average(keras.layers.Layer):
    """Moving averages, written in a loop; one in a variable that Keras does not know."""

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
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return model


def trained(strategy: tf.distribute.Strategy, seed: int) -> dict[str, list[Any]]:
    """Losses and weights after training in each way."""
    keras.utils.set_random_seed(seed)
    rows = tfd.distribute(of_rows, strategy)
    losses = rows.fit(Batches(), epochs=3, verbose=0).history["loss"]
    keras.utils.set_random_seed(7)
    table = tfd.distribute(of_words, strategy)
    table.fit(IDS, Y[:40], batch_size=BATCH, epochs=2, verbose=0)
    contrasts = tfd.distribute(of_all_rows, strategy)
    contrasts.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {
        "all rows": contrasts.keras_model.get_weights(),
        "loss": losses,
        "weights": rows.keras_model.get_weights(),
        "table": table.keras_model.get_weights(),
    }


def as_worker() -> dict[str, list[Any]]:
    strategy = tfd.create_strategy()
    # The first training shuffles by the chief's seed, whatever the others' is.
    return trained(strategy, seed=7 + 100 * strategy.cluster_resolver.task_id)


def test_workers_train_as_one_device() -> None:
    workers = list(run_tasks(as_worker, {"worker": 2}, 100).values())
    expected = trained(tfd.create_strategy("default"), seed=7)
    assert len(workers) == 2
    for name, values in expected.items():
        for wanted, *found in zip(values, *(worker[name] for worker in workers), strict=True):
            for mine in found:
                np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=2e-6, err_msg=name)
            np.testing.assert_array_equal(*found, err_msg=name)
