"""Trains a small transformer with two kinds of dropout, alternately; prints ms per step.

In the first kind, each replica draws its rows of the global batch's mask, as `fit` does. In the
second, all replicas draw one mask for their parts, with operations that `fit` does not replace.
Arguments: replicas, steps of a training, and trainings of each kind.
"""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

replicas, steps, trainings = map(int, sys.argv[1:])
ROWS, LENGTH, WIDTH = 64, 32, 64
layers = keras.layers


class OneMask(layers.Layer):
    """Dropout that draws for the rows at hand, as for a batch."""

    def __init__(self, rate):
        super().__init__()
        self.rate, self.generator = rate, keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        if not training:
            return x
        seed = tf.cast(self.generator.next() % tf.int32.max, tf.int32)
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        drawn = tf.raw_ops.StatelessRandomUniformV2(
            shape=tf.shape(x), key=key, counter=counter, alg=3
        )
        return tf.where(drawn >= self.rate, x / (1 - self.rate), 0.0)


def trainer(strategy, dropout):
    def build():
        words = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(1000, WIDTH)(words)
        for _ in range(2):
            attended = layers.MultiHeadAttention(4, WIDTH // 4)(x, x)
            x = layers.LayerNormalization()(x + dropout(0.1)(attended))
            hidden = dropout(0.1)(layers.Dense(4 * WIDTH, activation="relu")(x))
            x = layers.LayerNormalization()(x + dropout(0.1)(layers.Dense(WIDTH)(hidden)))
        model = keras.Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        return model

    model = tfd.distribute(build, strategy)

    def train():
        started = time.perf_counter()
        model.fit(x, y, batch_size=ROWS, verbose=0)
        return 1e3 * (time.perf_counter() - started) / steps

    return train


random = np.random.default_rng(0)
x, y = random.integers(0, 1000, (ROWS * steps, LENGTH)), random.integers(0, 10, ROWS * steps)
strategy = tfd.create_strategy("mirrored", logical_cpus=replicas)
train = {
    "one mask for all replicas": trainer(strategy, OneMask),
    "rows of one device's mask": trainer(strategy, layers.Dropout),
}
for each in train.values():
    each(), each()
print(json.dumps([{what: each() for what, each in train.items()} for _ in range(trainings)]))
