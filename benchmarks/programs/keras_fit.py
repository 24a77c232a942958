"""Keras 3's own fit under MirroredStrategy; argument: steps_per_execution."""

import sys

import keras
import tensorflow as tf
import work

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
steps_per_execution = int(sys.argv[1])
# Its default cross-device operations fail on CPUs with more than one step an execution.
ops = tf.distribute.ReductionToOneDevice() if steps_per_execution > 1 else None
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)], cross_device_ops=ops)
with strategy.scope():
    model = work.mlp(keras)
    model.steps_per_execution = steps_per_execution
x, y = work.data()
work.report_speed(lambda n: model.fit(x, y, batch_size=work.GLOBAL_BATCH, epochs=n, verbose=0))
