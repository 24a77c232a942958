"""A training on TFRecords, as one or more workers of a cluster; it may be killed and gone on with.

Arguments: the pattern of the files, a folder for checkpoints, and the step at which the last worker
is killed (0: never).
"""

import json
import os
import signal
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import keras
import tensorflow as tf

import tfdist_ext as tfd

pattern, folder, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
WIDTH = 256  # numbers of an example: enough bytes for the share of each worker to be seen


def parse(record):
    numbers = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [WIDTH + 1])
    return numbers[:WIDTH], numbers[WIDTH:]


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([keras.Input([WIDTH]), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.003), "mse")
    return model


class Curve(keras.callbacks.Callback):
    """The loss of the epoch so far, at each step."""

    def __init__(self):
        super().__init__()
        self.losses = {}

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        self.losses[step] = float(logs["loss"])
        last = cluster is not None and cluster.task.index == len(cluster.jobs["worker"]) - 1
        if step == kill_at and last:
            os.kill(os.getpid(), signal.SIGKILL)


cluster = tfd.ClusterConfig.from_env()
strategy = tfd.create_strategy()
data = tfd.data.from_tfrecords(pattern, parse, global_batch=48, seed=11)
model = tfd.distribute(build, strategy)
curve = Curve()
model.fit(data, epochs=3, checkpoint_dir=folder, checkpoint_every=4, callbacks=[curve], verbose=0)
result = {
    "losses": curve.losses,
    "weights": [w.tolist() for w in model.keras_model.get_weights()],
    "bytes": data.source.records.bytes_read,
    "examples": len(data),
    "place": data.place,
}
print("RESULT " + json.dumps(result), flush=True)
