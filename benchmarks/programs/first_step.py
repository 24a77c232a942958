"""Seconds to the end of the first step.

Arguments: "fit", "by hand" or "a process for each device", the name of a model, replicas, rows of a
global batch.
"""

import resource
import sys
import time

import first_models
import keras
import tensorflow as tf

import tfdist_ext as tfd

how, name, replicas, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if how != "a process for each device":
    cpu = tf.config.list_physical_devices("CPU")[0]
    cpus = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, cpus)
DEVICES = [f"CPU:{number}" for number in range(replicas)]
x, y = first_models.batch(name, rows)


class Times(keras.callbacks.Callback):
    first = None

    def on_train_batch_end(self, batch, logs=None):
        self.first = self.first or time.monotonic()


def by_fit():
    if how != "fit":
        strategy = tfd.create_strategy()
    elif replicas == 1:
        strategy = tfd.create_strategy("one_device", devices=DEVICES)
    else:
        strategy = tfd.create_strategy("mirrored", devices=DEVICES)
    model = tfd.distribute(lambda: first_models.compiled(name), strategy)
    times = Times()
    begin = time.monotonic()
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=[times])
    return times.first - begin


def by_hand():
    reduction = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=reduction)
    begin = time.monotonic()
    with strategy.scope():
        model = first_models.compiled(name)
        model.optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(rows)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def steps(iterator, count):
        for _ in tf.range(count):
            strategy.run(step, args=(next(iterator),))

    steps(iterator, tf.constant(1))
    return time.monotonic() - begin


first = by_hand() if how == "by hand" else by_fit()
megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"first {first:.3f} megabytes {megabytes:.0f}")
