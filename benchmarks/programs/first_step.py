"""Seconds to the end of the first step, and megabytes of the process.

Arguments: "fit", "hand-written loop" or "a process for each device", the name of a model, replicas,
rows of a global batch.
"""

import resource
import sys
import time

import first_models
import hand_loop
import keras
import tensorflow as tf

import tfdist_ext as tfd

how, name, replicas, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if how == "fit":
    cpu = tf.config.list_physical_devices("CPU")[0]
    cpus = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, cpus)
x, y = first_models.batch(name, rows)


class Times(keras.callbacks.Callback):
    first = None

    def on_train_batch_end(self, batch, logs=None):
        self.first = self.first or time.monotonic()


def by_fit():
    if how != "fit":
        strategy = tfd.create_strategy()
    else:
        devices = [f"CPU:{number}" for number in range(replicas)]
        kind = "one_device" if replicas == 1 else "mirrored"
        strategy = tfd.create_strategy(kind, devices=devices)
    model = tfd.distribute(lambda: first_models.compiled(name), strategy)
    times = Times()
    begin = time.monotonic()
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=[times])
    return times.first - begin


def by_hand():
    strategy = hand_loop.strategy_of("mirrored", replicas)
    begin = time.monotonic()
    train = hand_loop.hand_loop(strategy, lambda: first_models.compiled(name), x, y, rows)
    train(1)
    return time.monotonic() - begin


first = by_hand() if how == "hand-written loop" else by_fit()
megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"first {first:.3f} megabytes {megabytes:.0f}")
