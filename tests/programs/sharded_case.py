"""What the tasks of `sharded_workers.py` train on, and what one process compares them with."""

import keras
import numpy as np
import tensorflow as tf

EXAMPLES, WIDTH, BATCH, EPOCHS = 500, 256, 48, 3
RECORD = (WIDTH + 1) * 4 + 16  # bytes in the file
STEPS = 11  # of an epoch

# Examples of each batch of each task, where tasks read for themselves: others in number and size.
OF_TASKS = [[10, 3, 8, 1, 4], [5, 12]]


def write(folder):
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, WIDTH)).astype("float32")
    rows = np.concatenate([x, np.sin(x[:, :4].sum(axis=1, keepdims=True))], axis=1)
    for number, part in enumerate(np.array_split(rows.astype("float32"), 3)):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for row in part:
                writer.write(row.tobytes())
    return str(folder / "*.tfrecord")


def parse(record):
    numbers = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [WIDTH + 1])
    return numbers[:WIDTH], numbers[WIDTH:]


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([keras.Input([WIDTH]), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.003), "mse", metrics=["mae"])
    return model


class Curve(keras.callbacks.Callback):
    """The loss of the epoch so far, at each step."""

    def __init__(self, then=lambda step: None):
        super().__init__()
        self.losses = {}
        self._then = then

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        self.losses[step] = float(logs["loss"])
        self._then(step)


def batches_of_task(task, epoch):
    """One task's batches, as arrays; others in each epoch."""
    random = np.random.default_rng([task, epoch])
    return [
        (
            random.normal(size=(rows, WIDTH)).astype("float32"),
            random.normal(size=(rows, 1)).astype("float32"),
        )
        for rows in OF_TASKS[task]
    ]


def of_task(shard, epoch):
    spec = (tf.TensorSpec([None, WIDTH], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    return tf.data.Dataset.from_generator(
        lambda: iter(batches_of_task(shard.index, epoch)), output_signature=spec
    )


def of_all_tasks(epoch):
    """The global batches that come of it."""
    tasks = [batches_of_task(task, epoch) for task in range(2)]
    return [
        tuple(np.concatenate([t[k][i] for t in tasks if k < len(t)]) for i in (0, 1))
        for k in range(5)
    ]
