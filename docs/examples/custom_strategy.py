"""A custom strategy with one copy of each variable, in plain TensorFlow and on the template.

    python docs/examples/custom_strategy.py

Overriding the public methods of `StrategyExtended` is not enough in TensorFlow 2.21: `run` calls
`call_for_each_replica`, a variable needs `value_container`, and a replica needs its number.
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

RATE = 0.1


class PerReplica(tf.experimental.ExtensionType):
    """One value for each replica. It can pass through tf.data and tf.function."""

    values: tuple[tf.Tensor, ...]


class InTurn(tf.distribute.Strategy):
    """Runs the replicas one after the other. All variables are on the first device."""

    def __init__(self, devices):
        super().__init__(InTurnExtended(self, devices))


class InTurnExtended(tf.distribute.StrategyExtended):
    """The methods that TensorFlow calls. Names with an underscore are private to TensorFlow."""

    def __init__(self, strategy, devices):
        super().__init__(strategy)
        self._devices = tuple(devices)

    @property
    def worker_devices(self):
        return self._devices

    @property
    def _num_replicas_in_sync(self):
        return len(self._devices)

    def _get_local_replica_id(self, number):
        return number

    def _create_variable(self, next_creator, **kwargs):
        with tf.device(self._devices[0]):
            return next_creator(**kwargs)

    def value_container(self, value):
        return value

    def call_for_each_replica(self, fn, args=(), kwargs=None):
        results = []
        for number, device in enumerate(self._devices):
            replica = tf.distribute.ReplicaContext(self._container_strategy(), number)
            with replica, tf.device(device):
                results.append(fn(*part(tuple(args), number), **part(kwargs or {}, number)))
        return tf.nest.map_structure(lambda *values: PerReplica(values), *results)

    def _local_results(self, value):
        return value.values if isinstance(value, PerReplica) else (value,)

    def _reduce_to(self, reduce_op, value, destinations, options):
        with tf.device(self._devices[0]):
            total = tf.add_n(value.values)
            return total / len(self._devices) if reduce_op.value == "MEAN" else total

    def _use_merge_call(self):
        raise NotImplementedError("replicas run in turn: return the value, and reduce it outside.")

    def _experimental_distribute_dataset(self, dataset, options):
        count = len(self._devices)

        def cut(tensor):
            rows = tf.shape(tensor)[0]
            sizes = rows // count + tf.cast(tf.range(count) < rows % count, tf.int32)
            return PerReplica(tf.split(tensor, sizes, num=count))

        def cut_all(*batch):
            parts = [cut(tensor) for tensor in tf.nest.flatten(batch)]
            return tf.nest.pack_sequence_as(dataset.element_spec, parts)

        return dataset.map(cut_all)


def part(structure, number):
    """Returns the values of one replica. Other values are the same for all replicas."""
    return tf.nest.map_structure(
        lambda value: value.values[number] if isinstance(value, PerReplica) else value, structure
    )


class OneCopy(tfd.strategies.StrategyTemplate):
    """The same placement on the template. Replicas run together and can call `all_reduce`."""

    def create_variable(self, spec, create, beside=None):
        return create(self.devices[:1])


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)).astype("float32")
    return x, x @ np.array([1.0, -2.0, 0.5], "float32")


def train(strategy, epochs=3):
    """Trains under any strategy. Sums the gradients of the replicas, and applies them once."""
    with strategy.scope():
        weight = tf.Variable(tf.zeros([3]))

    def step(x, y):
        error = tf.linalg.matvec(x, weight) - y
        return 2 * tf.linalg.matvec(x, error, transpose_a=True), tf.cast(tf.size(y), tf.float32)

    @tf.function
    def update(x, y):
        gradient, rows = strategy.run(step, args=(x, y))
        total = strategy.reduce("SUM", gradient, axis=None)
        weight.assign_sub(RATE * total / strategy.reduce("SUM", rows, axis=None))

    batches = tf.data.Dataset.from_tensor_slices(data()).batch(8)
    batches = strategy.experimental_distribute_dataset(batches)
    for _ in range(epochs):
        for x, y in batches:
            update(x, y)
    return weight.numpy()


def plain(devices):
    return train(InTurn(devices))


def with_tfdist_ext(devices):
    return train(OneCopy(devices))


def fit_with_tfdist_ext(devices, epochs=3):
    """Trains with `fit`, which needs replicas that run together."""

    def build():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input([3]), dense])
        model.compile(keras.optimizers.SGD(RATE), "mse")
        return model

    model = tfd.distribute(build, OneCopy(devices))
    model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model.weights[0].numpy()[:, 0]


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    for trained in (plain, with_tfdist_ext, fit_with_tfdist_ext):
        print(f"{trained.__name__:20}", *(f"{value:.6f}" for value in trained(devices)))


if __name__ == "__main__":
    main()
