"""The model and data of all methods: a small MLP on scikit-learn's handwritten digits."""

import os
import time
from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits

GLOBAL_BATCH = 64
STEPS_PER_EPOCH = 448


def data() -> tuple[np.ndarray, np.ndarray]:
    """28,672 rows, 448 full batches: 1,792 of the digits sixteen times, so an epoch is long."""
    x, y = load_digits(return_X_y=True)
    return np.tile((x[:1792] / 16).astype("float32"), (16, 1)), np.tile(y[:1792], 16)


def mlp(keras):
    """The model, compiled, from whichever Keras is given."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def report_speed(run_epochs: Callable[[int], object]) -> None:
    """Print steps a second of whole epochs, after one that compiles."""
    epochs = int(os.environ["BENCHMARK_EPOCHS"])
    run_epochs(2)
    started = time.perf_counter()
    run_epochs(epochs)
    seconds = time.perf_counter() - started
    print(f"steps/s {epochs * STEPS_PER_EPOCH / seconds:.1f}", flush=True)
