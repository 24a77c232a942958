"""A small model and data, the same in the cluster's tasks and in the test that checks them."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np

ROWS, BATCH = 192, 24


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=(ROWS, 6)).astype("float32"), rng.integers(0, 3, ROWS)


def build(**compiling: Any) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **compiling)
    return model


def build_with_state() -> keras.Model:
    """A model with moving statistics and random numbers, whose state counts, too."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def fingerprint(model: keras.Model) -> str:
    """Changes with any bit of any weight or optimizer variable."""
    variables = [*model.weights, *model.optimizer.variables]
    return hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in variables)).hexdigest()


def flat(model: keras.Model) -> list[float]:
    return np.concatenate([np.ravel(w) for w in model.get_weights()]).astype(float).tolist()


def train_data_of_unknown_length() -> Any:
    """Global batches of 24, 24 and 10 rows from Python; TensorFlow cannot know how many."""
    import tensorflow as tf

    x, y = data()

    def batches() -> Any:
        for start, size in ((0, 24), (24, 24), (48, 10)):
            yield x[start : start + size], y[start : start + size]

    signature = (tf.TensorSpec((None, 6), tf.float32), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(batches, output_signature=signature)
