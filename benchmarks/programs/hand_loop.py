"""A training loop by hand, as an expert writes it: the iterator inside the graph.

Argument: the strategy. Metrics are kept and shown once an epoch, as fit does.
"""

import sys

import keras
import tensorflow as tf
import work

if sys.argv[1] == "mirrored":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(4)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

with strategy.scope():
    model = work.mlp(keras)
    model.optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

x, y = work.data()
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).repeat()
data = data.batch(work.GLOBAL_BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
iterator = iter(strategy.experimental_distribute_dataset(data.with_options(options)))


def step(batch):
    features, labels = batch
    with tf.GradientTape() as tape:
        logits = model(features, training=True)
        losses = loss_of(labels, logits)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=work.GLOBAL_BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    mean_loss.update_state(losses)
    accuracy.update_state(labels, logits)


@tf.function
def steps(iterator, count):
    for _ in tf.range(count):
        strategy.run(step, args=(next(iterator),))


def run_epochs(count):
    for _ in range(count):
        steps(iterator, tf.constant(work.STEPS_PER_EPOCH))
        float(mean_loss.result()), float(accuracy.result())
        mean_loss.reset_state()
        accuracy.reset_state()


work.report_speed(run_epochs)
