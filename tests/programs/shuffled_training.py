"""Training on a dataset with a seeded shuffle: losses that only one order of examples gives."""

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


def shuffled() -> tf.data.Dataset:
    rows = tf.reshape(tf.range(ROWS, dtype=tf.float32), (ROWS, 1))
    dataset = tf.data.Dataset.from_tensor_slices((rows / 10, rows))
    return dataset.shuffle(ROWS, seed=3).batch(BATCH)


def losses(strategy: tf.distribute.Strategy | None) -> list[float]:
    """Losses of epochs that end in the middle of a pass. None trains with Keras's own fit.

    Evaluations and predictions on the same dataset come in between.
    """
    tf.random.set_seed(5)  # a shuffle's order depends on it, too
    model: Any = build() if strategy is None else tfd.distribute(build, strategy)
    dataset = shuffled()
    if strategy is None:
        # tf.data reads ahead on its own, into the next repetition: a race in Keras's own fit.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        dataset = dataset.with_options(options)
    fit = {"epochs": 3, "steps_per_epoch": 4, "verbose": 0, "shuffle": False}
    history = model.fit(dataset, validation_data=dataset, validation_steps=2, **fit).history
    found = [*history["loss"], *history["val_loss"]]
    found.append(model.evaluate(dataset, steps=3, verbose=0))
    found.append(float(model.predict(dataset, steps=2, verbose=0).sum()))
    return found + model.fit(dataset, **fit).history["loss"]
