"""The training script of `scripts/figures/loss_curves`, with code that kills a worker.

Arguments: pattern of the record files, folder for checkpoints, step at which the last worker dies
(0: never), and the file for this worker's report.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import tensorflow as tf

import tfdist_ext as tfd

EPOCHS, BATCH = 3, 48
pattern, folder, kill_at, report = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
cluster = tfd.ClusterConfig.from_env()
rank = cluster.task.index if cluster else 0
is_last = cluster is not None and rank == len(cluster.jobs["worker"]) - 1


def parse(record):
    features = {
        "image": tf.io.FixedLenFeature([64], tf.float32),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_single_example(record, features)
    return example["image"], example["label"]


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input([64]), layers.Dense(64, "relu"), layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    return model


class Curve(keras.callbacks.Callback):
    """The mean loss of the epoch so far, at each step."""

    def __init__(self):
        super().__init__()
        self.losses = {}

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        self.losses[step] = float(logs["loss"])
        if step == kill_at and is_last:
            os.kill(os.getpid(), signal.SIGKILL)


strategy = tfd.create_strategy()
curve = Curve()
data = tfd.data.from_tfrecords(pattern, parse, global_batch_size=BATCH, seed=11)
model = tfd.distribute(build, strategy)
model.fit(data, epochs=EPOCHS, checkpoint_dir=folder, checkpoint_every=8, callbacks=[curve])
found = {
    "losses": curve.losses,
    "weights": [w.tolist() for w in model.get_weights()],
    "bytes": data.source.bytes_read,
    "steps": data.steps,
    "epochs": EPOCHS,
}
Path(f"{report}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
