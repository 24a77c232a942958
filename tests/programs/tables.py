"""A model with an embedding table, and data for it, the same in programs and in their tests."""

from __future__ import annotations

import keras
import numpy as np

IDS, ROWS, BATCH = 50, 96, 16


def data() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, IDS, (ROWS, 2)).astype("int32")
    return ids, (ids.sum(axis=1, keepdims=True) / IDS).astype("float32")


def build() -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(IDS, 3)(ids))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4, activation="tanh")(hidden))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Dropout(0.2)(hidden)))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model
