"""One worker of a cluster: losses of rows, state written in a loop, a shuffled PyDataset, and a
table whose gradient has fewer slices in the last step of an execution than in those before.

Prints the weights, as JSON. `trained` is the same training for a test in one process.
"""

from __future__ import annotations

import json
import os
from typing import Any

import tfdist_ext as tfd

ROWS, BATCH = 41, 12


def trained(strategy: Any, seed: int) -> dict[str, Any]:
    """Weights after training in each way, as nested lists; `seed` may differ on each worker."""
    import keras
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 5)).astype("float32")
    y = rng.normal(size=(ROWS, 1)).astype("float32")

    class Average(keras.layers.Layer):
        """A moving average, written in a loop."""

        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=(5,), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            before = tf.convert_to_tensor(self.mean)

            def write(i: Any) -> Any:
                self.mean.assign(0.8 * self.mean + 0.2 * tf.reduce_mean(x, axis=0))
                return (i + 1,)

            if training:
                tf.while_loop(lambda i: i < 3, write, [0])
            return x - before

    class LossOfRows(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_sum((y - y_pred) ** 2, axis=1)

    class Batches(keras.utils.PyDataset):
        num_batches = -(-ROWS // BATCH)

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return x[rows], y[rows]

    def build() -> keras.Model:
        model = LossOfRows([keras.Input((5,)), Average(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    keras.utils.set_random_seed(seed)
    model = tfd.distribute(build, strategy)
    history = model.fit(Batches(), epochs=3, verbose=0).history
    values = [np.asarray(v.numpy()).tolist() for v in model.keras_model.weights]

    def table() -> keras.Model:
        layers = keras.layers
        ids = keras.Input([3], dtype="int32")
        rows = layers.Flatten()(layers.Embedding(9, 4)(ids))
        model = keras.Model(ids, layers.Dense(1)(rows))
        model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=5)
        return model

    keras.utils.set_random_seed(7)
    tables = tfd.distribute(table, strategy)
    ids = rng.integers(0, 9, (40, 3))  # 4 rows in the last batch: fewer, and as many on each worker
    tables.fit(ids, y[:40], batch_size=BATCH, epochs=2, verbose=0)
    rows = [np.asarray(v.numpy()).tolist() for v in tables.keras_model.weights]
    return {"weights": values, "loss": history["loss"], "table": rows}


if __name__ == "__main__":
    made = tfd.create_strategy()
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    print("RESULT", json.dumps(trained(made, 7 + 100 * rank)))
