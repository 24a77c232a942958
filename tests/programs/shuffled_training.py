"""Training on datasets with a seeded shuffle: losses that only one order of examples gives."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import tfdist_ext as tfd

ROWS, BATCH = 24, 4


def build() -> keras.Model:
    one = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), one])
    model.compile(keras.optimizers.SGD(0.003), "mse")
    return model


def numbers() -> tf.data.Dataset:
    rows = tf.reshape(tf.range(ROWS, dtype=tf.float32), (ROWS, 1))
    return tf.data.Dataset.from_tensor_slices((rows / 10, rows))


DATASETS = {
    "shuffled, batched": lambda: numbers().shuffle(ROWS, seed=3).batch(BATCH),
    "batched, shuffled": lambda: numbers().batch(BATCH).shuffle(6, seed=3),
    "unknown length": lambda: numbers().shuffle(ROWS, seed=3).batch(BATCH).filter(lambda *_: True),
    "two passes": lambda: numbers().shuffle(ROWS, seed=3).repeat(2).batch(5),
    "infinite": lambda: numbers().shuffle(ROWS, seed=3).batch(BATCH).repeat(),
}
STEPS = (None, 4)  # of an epoch


def without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """tf.data reads ahead on its own, into the next repetition: a race in Keras's own fit."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def losses_of(model: Any, dataset: tf.data.Dataset, steps: int | None) -> list[float]:
    """Losses of epochs, with evaluations and predictions on the same dataset in between."""
    fit = {"epochs": 3, "steps_per_epoch": steps, "verbose": 0, "shuffle": False}
    losses = model.fit(dataset, validation_data=dataset, validation_steps=2, **fit).history
    found = [*losses["loss"], *losses["val_loss"]]
    found.append(model.evaluate(dataset, steps=3, verbose=0))
    found.append(float(model.predict(dataset, steps=2, verbose=0).sum()))
    return found + model.fit(dataset, **fit).history["loss"]


def losses(
    strategy: tf.distribute.Strategy | None, kinds: list[str] | None = None
) -> dict[str, list[float]]:
    """Losses for each kind of dataset and number of steps; with Keras's own fit for None."""
    tf.random.set_seed(5)  # a shuffle's order depends on it, too
    model = build() if strategy is None else tfd.distribute(build, strategy)
    start = [1.0], [0.0]
    found = {}
    for name in kinds or DATASETS:
        dataset = DATASETS[name]
        for steps in STEPS:
            if steps is None and name == "infinite":
                continue
            data = without_prefetch(dataset()) if strategy is None else dataset()
            inner = getattr(model, "keras_model", model)
            for variable, value in zip(inner.weights, start, strict=True):
                variable.assign(tf.reshape(tf.constant(value), variable.shape))
            found[f"{name}, steps {steps}"] = losses_of(model, data, steps)
    return found
