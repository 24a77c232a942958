"""All tasks of a cluster with parameter servers; the test stops one of them at a time it is told.

Arguments: what the chief does when it has said READY, and the folder for checkpoints.
"""

import sys

import tfdist_ext as tfd
from tfdist_ext.cluster.liveness import watching

watching.SERVER_SILENT, watching.COORDINATOR_SILENT = 4.0, 6.0  # seconds
what, folder = sys.argv[1:]


def main() -> None:
    strategy = tfd.create_strategy()

    import keras
    import numpy as np
    import tensorflow as tf

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    x = np.ones((64, 4), "float32")
    y = np.ones((64, 1), "float32")
    model = tfd.distribute(build, strategy)
    model.fit(x, y, batch_size=16, verbose=0, checkpoint_dir=folder)

    class Ready(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            if epoch == 2:
                print("READY", flush=True)

    data = {"x": x, "y": y, "batch_size": 16, "verbose": 0}
    if what == "fit":
        model.fit(**data, epochs=100_000, checkpoint_dir=folder, callbacks=[Ready()])
    print("READY", flush=True)

    # Not frozen, but busy: workers, and this process.
    @tf.function
    def long() -> tf.Tensor:
        until = tf.timestamp() + 8.0
        number, matrix = tf.while_loop(
            lambda i, _: tf.timestamp() < until,
            lambda i, m: (i + 1, tf.tanh(tf.matmul(m, m))),
            (0, tf.random.normal([1024, 1024])),
        )
        # Without the matrix in the result TensorFlow would not compute it.
        return number + tf.cast(tf.math.is_nan(tf.reduce_sum(matrix)), tf.int32)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    results = [coordinator.schedule(long) for _ in range(2)]
    coordinator.join()
    print("RESULT", [int(result.fetch()) for result in results], flush=True)


tfd.run(main)
