"""A hand-written training loop, as an expert writes it: the iterator is in the graph.

The loop updates metrics and reads them at the end of a training, as `fit` does.
"""

import keras
import tensorflow as tf


def strategy_of(kind, replicas):
    """A strategy: mirrored on so many logical CPUs, or of the workers of TF_CONFIG."""
    if kind != "mirrored":
        return tf.distribute.MultiWorkerMirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    cpus = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, cpus)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{number}" for number in range(replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def hand_loop(strategy, compiled, x, y, rows):
    """A function that trains so many steps, on batches of so many rows over all replicas.

    Args:
        compiled: makes a model with an optimizer; its loss is a cross-entropy from logits.
    """
    with strategy.scope():
        model = compiled()
        model.optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).repeat()
    data = data.batch(rows, drop_remainder=True).prefetch(tf.data.AUTOTUNE).with_options(options)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            losses = loss_of(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(losses)
        accuracy.update_state(labels, logits)

    @tf.function
    def run(iterator, count):
        for _ in tf.range(count):
            strategy.run(step, args=(next(iterator),))

    def train(steps):
        run(iterator, tf.constant(steps))
        float(mean_loss.result()), float(accuracy.result())
        mean_loss.reset_state()
        accuracy.reset_state()

    return train
