"""Two real workers: `tfd.all_rows` in a loop in the graph, whose last batch has fewer rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.testing import run_tasks

ROWS, BATCH = 25, 8
X = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")


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


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Contrasts()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return model


def trained(model: Any) -> list[Any]:
    y = np.zeros(ROWS, "float32")
    history = model.fit(X, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    weights = getattr(model, "keras_model", model).get_weights()
    return [*(weight.tolist() for weight in weights), history["loss"]]


def one_worker() -> list[Any]:
    return trained(tfd.distribute(build, tfd.create_strategy()))


def test_two_workers_train_as_one_device() -> None:
    workers = list(run_tasks(one_worker, {"worker": 2}, 100).values())
    plain = build()
    plain.run_eagerly = True
    expected = trained(plain)
    assert len(workers) == 2
    for found in workers:
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
