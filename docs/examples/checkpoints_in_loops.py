"""Save checkpoints in a custom loop, and restore them on another number of replicas.

    python docs/examples/checkpoints_in_loops.py

Three mistakes are common: saving the weights without the optimizer, not saving the position in the
data, and writing to one folder from every worker.
"""

import json
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

GLOBAL_BATCH = 16


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(44, 4)).astype("float32")
    return x, x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")


def parts_of_a_loop(strategy):
    """Returns the model, the optimizer, a metric, and a function that trains on a batch."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        hidden = keras.layers.Dense(4, "tanh")
        model = keras.Sequential([keras.Input([4]), hidden, keras.layers.Dense(1)])
        adam = keras.optimizers.Adam(0.05)
        # Create the optimizer's variables before a checkpoint is restored. TensorFlow restores a
        # missing variable later, when it is created, in the middle of the first step.
        adam.build(model.trainable_variables)
        loss = keras.metrics.MeanSquaredError("loss")

    def step(x, y):
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        rows = tf.distribute.get_replica_context().all_reduce("SUM", rows)
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            share = tf.reduce_sum((found - y) ** 2) / rows
        adam.apply(tape.gradient(share, model.trainable_variables), model.trainable_variables)
        loss.update_state(y, found)

    @tf.function
    def train(x, y):
        strategy.run(step, args=(x, y))

    return model, adam, loss, train


def plain(strategy, folder, epochs):
    """Trains from the last checkpoint. Returns the weights and the losses of the new epochs.

    In a cluster, the folder must be on a file system that all workers share.
    """
    model, adam, loss, train = parts_of_a_loop(strategy)
    done = tf.Variable(0, dtype=tf.int64)  # outside of the scope, so there is one copy
    checkpoint = tf.train.Checkpoint(model=model, optimizer=adam, epochs=done)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    resolver = strategy.cluster_resolver
    is_chief = resolver is None or resolver.task_id == 0
    batches = tf.data.Dataset.from_tensor_slices(arrays()).batch(GLOBAL_BATCH)
    batches = strategy.experimental_distribute_dataset(batches)
    losses = []
    while done < epochs:
        loss.reset_state()
        for x, y in batches:
            train(x, y)
        losses.append(float(loss.result()))
        done.assign_add(1)
        if is_chief:
            manager.save()
    return model.get_weights(), losses


class Position(tf.train.experimental.PythonState):
    """Saves the position in the data as a part of the checkpoint."""

    def __init__(self, data):
        self.data = data

    def serialize(self):
        return json.dumps(self.data.state())

    def deserialize(self, text):
        self.data.restore(json.loads(text))


def with_tfdist_ext(strategy, folder, epochs, steps=None):
    """Trains on shuffled data, and resumes inside an epoch. For replicas on one machine.

    Saves after each step. Ends after `steps` steps, as a killed job does.
    """
    model, adam, loss, train = parts_of_a_loop(strategy)
    data = tfd.data.from_arrays(arrays(), global_batch_size=GLOBAL_BATCH, seed=3)
    # The state of the metric. A tf.train.Checkpoint does not accept a Keras 3 metric itself.
    counted = [variable.value for variable in loss.variables]
    checkpoint = tf.train.Checkpoint(model=model, optimizer=adam, loss=counted, data=Position(data))
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    losses = []
    while (epoch := data.state()["epoch"]) < epochs:
        for x, y in data.batches(strategy):
            train(x, y)
            if data.state()["epoch"] > epoch:  # the epoch is complete
                losses.append(float(loss.result()))
                loss.reset_state()
            manager.save()
            steps = steps and steps - 1
            if steps == 0:
                return model.get_weights(), losses
    return model.get_weights(), losses


def main():
    two = tfd.create_strategy("mirrored", logical_cpus=2)
    one = tfd.create_strategy("default")
    with tempfile.TemporaryDirectory() as folder:
        print("2 replicas, 2 epochs:", *plain(two, folder, epochs=2)[1])
        print("1 replica resumes:   ", *plain(one, folder, epochs=3)[1])
    with tempfile.TemporaryDirectory() as folder:
        print("2 replicas, 4 steps: ", *with_tfdist_ext(two, folder, epochs=2, steps=4)[1])
        print("1 replica resumes:   ", *with_tfdist_ext(one, folder, epochs=2)[1])


if __name__ == "__main__":
    main()
