"""A small model and data, the same in the cluster's tasks and in the test that checks them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import keras
import numpy as np

ROWS, BATCH = 192, 24


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=(ROWS, 6)).astype("float32"), rng.integers(0, 3, ROWS)


def build(**compiling: Any) -> keras.Model:
    return _compiled([], **compiling)


def build_with_state() -> keras.Model:
    """A model with moving statistics and random numbers, whose state counts, too."""
    return _compiled([keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dropout(0.3)])


def _compiled(between: list[keras.layers.Layer], **compiling: Any) -> keras.Model:
    dense = keras.layers.Dense(8, activation="tanh")
    model = keras.Sequential([keras.Input((6,)), dense, *between, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **compiling)
    return model


class InCallbacks(keras.callbacks.Callback):
    """Trains, predicts, saves and loads in the middle of a training."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.results: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        x, y = data()
        model = self.model
        model.save(self.folder / "in_callback.keras")
        model.save_weights(self.folder / "in_callback.weights.h5")
        fit = model.fit(x[:40], y[:40], batch_size=BATCH, verbose=0, shuffle=False)
        self.results["losses"] = [*fit.history["loss"], *model.train_on_batch(x[:7], y[:7])]
        self.results["rows"] = model.predict_on_batch(x[:7]).astype(float).tolist()
        self.results["trained"] = flat(model)
        model.load_weights(self.folder / "in_callback.weights.h5")


def trained_in_callbacks(model: keras.Model, folder: Path) -> dict[str, Any]:
    """Returns the results of a training whose callback uses the model."""
    x, y = data()
    calls = InCallbacks(folder)
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[calls])
    return {**calls.results, "loaded": flat(model)}


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
