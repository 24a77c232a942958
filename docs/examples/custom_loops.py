"""Custom loops: distributed data, `run` inside a `tf.function`, and Keras metrics.

    python docs/examples/custom_loops.py
    tfdist run --workers 2 -- python docs/examples/custom_loops.py

Three mistakes are common. If you divide the loss by a constant batch size, or take the mean over
replicas, a smaller last batch is weighted wrongly. If each worker batches the data by the global
batch size, batches are too large. If metrics are never reset, they mix the epochs.
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

GLOBAL_BATCH = 16


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(44, 4)).astype("float32")
    return x, np.argmax(x[:, :3], axis=1)


def cut(strategy):
    """Splits each global batch into a part for each replica, on every worker."""
    batches = tf.data.Dataset.from_tensor_slices(arrays()).batch(GLOBAL_BATCH)
    return strategy.experimental_distribute_dataset(batches)


def sharded(strategy):
    """Makes the batches of each worker from its own shard of the rows."""

    def batches(context):
        rows = tf.data.Dataset.from_tensor_slices(arrays())
        # If you shuffle before `shard`, set a seed: all workers need the same order.
        mine = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return mine.batch(context.get_per_replica_batch_size(GLOBAL_BATCH))

    return strategy.distribute_datasets_from_function(batches)


def build():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    )


def loss_of_rows(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)


def parts_of_a_loop(strategy):
    """Returns the model, its metrics, and a function that trains on a distributed batch."""
    with strategy.scope():
        model, adam = build(), keras.optimizers.Adam(0.02)
        adam.build(model.trainable_variables)  # before the step is traced
        metrics = [
            keras.metrics.MeanMetricWrapper(loss_of_rows, name="loss"),
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
        ]

    def step(x, y):
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        rows = tf.distribute.get_replica_context().all_reduce("SUM", rows)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            # The optimizer sums the gradients of all replicas, so divide by the rows of all.
            loss = tf.reduce_sum(loss_of_rows(y, logits)) / rows
        adam.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        for metric in metrics:
            metric.update_state(y, logits)

    @tf.function
    def train(x, y):
        strategy.run(step, args=(x, y))

    return model, metrics, train


def plain(strategy, distribute=cut, epochs=3):
    """Returns the weights, and a dict of metrics for each epoch."""
    model, metrics, train = parts_of_a_loop(strategy)
    batches = distribute(strategy)
    history = []
    for _ in range(epochs):
        for metric in metrics:
            metric.reset_state()
        for x, y in batches:
            train(x, y)
        # `result` sums over replicas, so all workers must call it.
        history.append({metric.name: float(metric.result()) for metric in metrics})
    return model.get_weights(), history


def with_tfdist_ext(strategy, epochs=3, seed=None):
    """Runs the same loop on `tfd.data`.

    The order of rows does not depend on the number of workers, and each worker reads only its own
    rows. With a seed, each epoch has a new order.
    """
    model, metrics, train = parts_of_a_loop(strategy)
    data = tfd.data.from_arrays(arrays(), global_batch_size=GLOBAL_BATCH, seed=seed)
    history = []
    for _ in range(epochs):
        for metric in metrics:
            metric.reset_state()
        for x, y in data.batches(strategy):
            train(x, y)
        history.append({metric.name: float(metric.result()) for metric in metrics})
    return model.get_weights(), history


def fit_with_tfdist_ext(strategy, epochs=3, seed=None):
    """Trains the same model with `fit`, without a loop."""

    def compiled():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
        return model

    model = tfd.distribute(compiled, strategy)
    data = tfd.data.from_arrays(arrays(), global_batch_size=GLOBAL_BATCH, seed=seed)
    logs = model.fit(data, epochs=epochs, verbose=0).history
    history = [{name: logs[name][epoch] for name in logs} for epoch in range(epochs)]
    return model.get_weights(), history


def main():
    if tfd.ClusterConfig.from_env() is None:
        strategy = tfd.create_strategy("mirrored", logical_cpus=2)
    else:
        strategy = tfd.create_strategy()
    for train in (plain, with_tfdist_ext, fit_with_tfdist_ext):
        for epoch, logs in enumerate(train(strategy)[1], start=1):
            print(f"{train.__name__:20} epoch {epoch}: loss {logs['loss']:.5f}", end=", ")
            print(f"accuracy {logs['accuracy']:.4f}")


if __name__ == "__main__":
    main()
