"""In the third epoch of a training a task stands still. Arguments: where, which task, a folder."""

import contextlib
import os
import sys
import time

import tfdist_ext as tfd

where, victim, folder = sys.argv[1:4]
strategy = tfd.create_strategy()

import keras  # noqa: E402
import mlp  # noqa: E402
import tensorflow as tf  # noqa: E402

config = tfd.ClusterConfig.from_env()
if where == "callback":  # 5 times the timeout would be long for a test
    from tfdist_ext.training.agreement import task_status

    task_status._AT_LEAST["callbacks"] = 1.0
is_victim = config is None or str(config.task) == victim
x, y = mlp.data()
STEPS = mlp.ROWS // mlp.BATCH
on_servers = config is not None and "ps" in config.jobs
READ = 3 if on_servers else 2 * STEPS  # batches, before nothing comes


class InThirdEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            print("NOW", flush=True)
            if where == "callback" and is_victim:
                time.sleep(1000)


def nothing_comes(number, late):
    """Of a pipe into which nobody writes, once that many batches have been read."""
    fifo = os.path.join(folder, "fifo")
    with contextlib.suppress(FileExistsError):  # another worker may be first
        os.mkfifo(fifo)
    path = tf.where(number >= READ, fifo if late else os.devnull, os.devnull)
    return tf.strings.length(tf.io.read_file(path))


def batch_of(number, late):
    zero = tf.constant(0)
    if where == "data":
        zero = nothing_comes(number, late)
    rows = tf.range(mlp.BATCH) + tf.cast(number % STEPS, tf.int32) * mlp.BATCH + zero
    return tf.gather(x, rows), tf.gather(y, rows)


def batches(late):
    return tf.data.Dataset.range(4 * STEPS).map(lambda number: batch_of(number, late))


def batches_of_worker(shard):
    return batches(shard.index == int(victim[-1]))


data = tfd.data.from_dataset_fn(batches_of_worker) if on_servers else batches(is_victim)
model = tfd.distribute(mlp.build, strategy)
model.fit(data, epochs=4, steps_per_epoch=STEPS, verbose=0, callbacks=[InThirdEpoch()])
print("DONE", flush=True)
