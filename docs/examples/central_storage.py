"""CentralStorageStrategy: variables exist once, on the CPU, and replicas compute on other devices.

    python docs/examples/central_storage.py

Two mistakes are common. The mean of the replicas' losses is wrong if a batch does not divide by the
replicas. Keras metrics count wrongly under `tf.distribute.experimental.CentralStorageStrategy()`,
and correctly under `tfd.create_strategy("central_storage")`.
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(44, 4)).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) > 0.3).astype("float32")


def build():
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(8, "tanh")
    return keras.Sequential([keras.Input([4]), hidden, keras.layers.Dense(1)])


def optimizer():
    return keras.optimizers.SGD(0.2, momentum=0.9)


def plain(strategy, batch_size=16, epochs=3):
    """Trains in a custom loop. Returns the model, and the losses and accuracies of all epochs."""
    with strategy.scope():
        model, sgd = build(), optimizer()
        sgd.build(model.trainable_variables)
        metrics = {
            "loss": keras.metrics.BinaryCrossentropy(from_logits=True),
            "accuracy": keras.metrics.BinaryAccuracy(threshold=0.0),
        }

    def step(x, y):
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        of_all = tf.distribute.get_replica_context().all_reduce("SUM", rows)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
            # The optimizer sums the gradients of all replicas, so divide by the rows of all.
            loss = tf.reduce_sum(losses) / of_all
        sgd.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        for metric in metrics.values():
            metric.update_state(y, logits)

    @tf.function
    def train(x, y):
        strategy.run(step, args=(x, y))

    batches = tf.data.Dataset.from_tensor_slices(data()).batch(batch_size)
    batches = strategy.experimental_distribute_dataset(batches)
    history = {"loss": [], "accuracy": []}
    for _ in range(epochs):
        for x, y in batches:
            train(x, y)
        for name, metric in metrics.items():
            history[name].append(float(metric.result()))
            metric.reset_state()
    return model, history


def with_tfdist_ext(strategy, batch_size=16, epochs=3):
    """Trains the same model with `fit`, and Keras's loss and metric."""

    def compiled():
        model = build()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        accuracy = keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)
        model.compile(optimizer(), loss, metrics=[accuracy])
        return model

    model = tfd.distribute(compiled, strategy)
    fitted = model.fit(*data(), batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model, fitted.history


def main():
    # Three logical CPUs stand for three GPUs. With GPUs, pass `devices` instead.
    strategy = tfd.create_strategy("central_storage", logical_cpus=3, parameter_device="CPU:0")
    print("computing on", *(device[-5:] for device in strategy.extended.worker_devices))
    for train in (plain, with_tfdist_ext):
        model, history = train(strategy)
        devices = {weight.value.device[-5:] for weight in model.weights}
        loss, accuracy = history["loss"][-1], history["accuracy"][-1]
        print(f"{train.__name__}: variables on {devices}, loss {loss:.6f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
