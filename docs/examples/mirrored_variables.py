"""Variables under MirroredStrategy: a copy on each device, kept equal by each update.

    python docs/examples/mirrored_variables.py

Two mistakes are common. A variable that is created outside of the scope gets the updates of all
replicas, one after the other. Without `aggregation`, each copy gets only the value of its own
replica, so the copies differ, without an error.
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

RATE, MOMENTUM = 0.1, 0.9


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(17, 3)).astype("float32")
    return x, x @ np.array([1.0, -2.0, 0.5], "float32")


def plain(strategy, batch_size=8):
    """Trains a weight, and keeps a moving mean of the inputs. Returns all copies."""
    with strategy.scope():
        # All replicas assign the same value (below), so use the value of the first.
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        weight = tf.Variable(tf.zeros([3]), name="weight", aggregation=first)
        mean = tf.Variable(tf.zeros([3]), name="mean", aggregation=first, trainable=False)
        # Each replica adds its own rows, and all copies get the sum.
        rows = tf.Variable(0, name="rows", aggregation=tf.VariableAggregation.SUM, trainable=False)

    def step(x, y):
        count = tf.shape(x)[0]
        error = tf.linalg.matvec(x, weight) - y
        gradient = 2 * tf.linalg.matvec(x, error, transpose_a=True)
        sums = [gradient, tf.reduce_sum(x, axis=0), tf.cast(count, tf.float32)]
        # Sum over all rows and then divide once, because replicas may differ in rows.
        gradient, inputs, n = tf.distribute.get_replica_context().all_reduce("SUM", sums)
        weight.assign_sub(RATE * gradient / n)
        mean.assign(MOMENTUM * mean + (1 - MOMENTUM) * inputs / n)
        rows.assign_add(count)

    @tf.function
    def train(x, y):
        strategy.run(step, args=(x, y))

    batches = tf.data.Dataset.from_tensor_slices(data()).batch(batch_size)
    for x, y in strategy.experimental_distribute_dataset(batches):
        train(x, y)
    return {v.name.partition(":")[0]: copies(strategy, v) for v in (weight, mean, rows)}


class MovingMean(keras.layers.Layer):
    """Returns its inputs, and keeps a moving mean of them. Written as for one device."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            batch = keras.ops.mean(x, axis=0)
            self.mean.assign(MOMENTUM * self.mean + (1 - MOMENTUM) * batch)
        return x


def with_tfdist_ext(strategy, batch_size=8):
    """Trains the same model with `fit`. The model needs no code for replicas."""

    def build():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input([3]), MovingMean(), dense])
        model.compile(keras.optimizers.SGD(RATE), "mse")
        return model

    model = tfd.distribute(build, strategy)
    model.fit(*data(), batch_size=batch_size, shuffle=False, verbose=0)
    mean, weight = (copies(strategy, v.value) for v in model.weights)
    return {"weight": {device: copy[:, 0] for device, copy in weight.items()}, "mean": mean}


def copies(strategy, variable):
    """Returns a dict from each device to its copy of the variable."""
    return {v.device: v.numpy() for v in strategy.experimental_local_results(variable)}


def main():
    # Two logical CPUs stand for two GPUs. With GPUs, leave out `logical_cpus`.
    strategy = tfd.create_strategy("mirrored", logical_cpus=2)
    for train in (plain, with_tfdist_ext):
        for name, by_device in train(strategy).items():
            for device, copy in by_device.items():
                print(f"{train.__name__:16} {name:7} {device[-5:]} {copy}")


if __name__ == "__main__":
    main()
