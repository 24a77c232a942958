"""Trains a model on workers and prints the loss of each step.

Arguments: the model ("transformer" or "convolutional"), the type in which gradients travel ("" for
their own), the seed of the weights, and the number of steps.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist_ext as tfd

MODEL, DTYPE, SEED, STEPS = sys.argv[1], sys.argv[2] or None, int(sys.argv[3]), int(sys.argv[4])
BATCH, LENGTH, WIDTH = 32, 64, 64
layers = keras.layers


def text() -> tuple[np.ndarray, np.ndarray]:
    """Pieces of source code as bytes, and the byte after each byte."""
    files = ("argparse", "ast", "inspect", "pathlib", "subprocess", "tarfile", "turtle", "typing")
    folder = Path(json.__file__).parents[1]
    source = b"".join((folder / f"{name}.py").read_bytes() for name in files)
    codes = np.frombuffer(source, np.uint8).astype("int32")
    starts = np.random.default_rng(0).integers(0, len(codes) - LENGTH - 1, BATCH * STEPS)
    pieces = codes[starts[:, None] + np.arange(LENGTH + 1)] % 128
    return pieces[:, :-1], pieces[:, 1:]


def transformer() -> keras.Model:
    codes = keras.Input([LENGTH], dtype="int32")
    positions = keras.ops.arange(LENGTH)
    x = layers.Embedding(128, WIDTH)(codes) + layers.Embedding(LENGTH, WIDTH)(positions)
    for _ in range(4):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal, use_causal_mask=True)
        hidden = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(hidden)
    return keras.Model(codes, layers.Dense(128)(layers.LayerNormalization()(x)))


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images of 8 x 8 pixels, and their digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).integers(0, len(labels), BATCH * STEPS)
    return images[rows].reshape(-1, 8, 8, 1).astype("float32") / 16, labels[rows]


def convolutional() -> keras.Model:
    stages = [
        layer
        for filters in (16, 32)
        for layer in (
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        )
    ]
    return keras.Sequential(
        [keras.Input([8, 8, 1]), *stages, layers.GlobalAveragePooling2D(), layers.Dense(10)]
    )


def build() -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = {"transformer": transformer, "convolutional": convolutional}[MODEL]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.001), loss)
    return model


class Losses(keras.callbacks.Callback):
    """The loss of each step, from the means of the epoch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [0.0]

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.sums.append(logs["loss"] * (batch + 1))


strategy = tfd.create_strategy("multi_worker_mirrored", gradient_dtype=DTYPE)
model = tfd.distribute(build, strategy)
losses = Losses()
x, y = {"transformer": text, "convolutional": digits}[MODEL]()
model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[losses])
if strategy.cluster_resolver.task_id == 0:
    print("losses", json.dumps([round(float(loss), 6) for loss in np.diff(losses.sums)]))
