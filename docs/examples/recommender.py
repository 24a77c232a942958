"""Predict clicks, with 26 large tables on parameter servers.

    tfdist run --workers 2 --ps 2 -- python docs/examples/recommender.py

The data has the 13 numbers and the 26 categories of the Criteo data, but a formula makes it: there
is nothing to download. A click depends on all categories, so the model must learn their rows.
"""

import argparse

import keras
import tensorflow as tf
from criteo_model import CRITEO_ROWS, build

import tfdist_ext as tfd

BATCH = 512
TESTED = 20  # batches for validation


def make_batch(number, most_rows):
    """Returns inputs and clicks. With files, parse a batch of lines here instead."""

    def random(of, width):
        return tf.random.stateless_uniform([BATCH, width], tf.stack([number, of]), dtype=tf.float64)

    # Few values are frequent, and most are rare: Zipf's law.
    values = tf.cast(tf.constant(CRITEO_ROWS, tf.float64) ** random(0, 26), tf.int64) - 1
    numbers = random(1, 13)
    tastes = tf.sin(tf.cast(7 * values + tf.range(26, dtype=tf.int64) ** 2, tf.float64))
    logits = tf.reduce_sum(tastes, axis=1) + tf.reduce_sum(numbers - 0.5, axis=1)
    clicks = random(2, 1)[:, 0] < tf.sigmoid(logits)

    # A hash: large categories fit into their tables, and frequent values are on all servers.
    rows = tf.minimum(tf.constant(CRITEO_ROWS, tf.int64), most_rows)
    ids = tf.cast(2_654_435_761 * values % rows, tf.int32)
    return {"numbers": tf.cast(numbers, tf.float32), "ids": ids}, tf.cast(clicks, tf.float32)


def read(first, batches, most_rows):
    """Returns a dataset. Each worker reads its own batches of it."""

    def shard_of_worker(shard):
        numbers = tf.data.Dataset.range(first, first + batches).shard(shard.count, shard.index)
        return numbers.map(lambda number: make_batch(number, most_rows)).prefetch(4)

    return tfd.data.from_dataset_fn(shard_of_worker)


def main(rows, epochs, steps, folder=None):
    """Trains, and resumes from the newest checkpoint in the folder. Called on the chief.

    Returns:
        (the model, the AUC of the validation after each epoch).
    """
    strategy = tfd.create_strategy("parameter_server")
    print(tfd.explain(strategy), flush=True)
    keras.utils.set_random_seed(1)
    model = tfd.distribute(lambda: build(rows), strategy)
    history = model.fit(
        read(TESTED, steps, rows),
        validation_data=read(0, TESTED, rows),
        epochs=epochs,
        checkpoint_dir=folder,
        verbose=2,
    )
    print("steps:", int(model.optimizer.iterations.numpy()))
    return model, history.history["val_auc"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a table, at most")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="of an epoch, in batches of 512")
    parser.add_argument("--folder", help="of checkpoints")
    arguments = parser.parse_args()
    tfd.run(lambda: main(**vars(arguments)))  # the other tasks run servers
