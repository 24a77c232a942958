"""Several workers: a copy of the model on each, with the chief's initial weights.

    tfdist run --workers 2 -- python docs/examples/multi_worker.py

Keras 3's `model.fit` fails under MultiWorkerMirroredStrategy ("Attempt to convert a value
(PerReplica...)"), so plain TensorFlow needs a custom loop. The strategy must be created before the
first TensorFlow operation.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

GLOBAL_BATCH, EPOCHS = 16, 3  # 16 rows in a step of all workers


def build() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns 64 rows, the same on every worker. Each worker uses its part of each global batch."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return x, (x[:, :1] * x[:, 1:2]).astype("float32")


def plain_strategy() -> tf.distribute.Strategy:
    """Waits for all workers. Call it before any other TensorFlow code."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()  # reads TF_CONFIG
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def plain(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Trains in a custom loop, as `model.fit` does."""
    with strategy.scope():  # all workers get the chief's initial values
        model = build()
        model.optimizer.build(model.trainable_variables)  # before the step is traced
    began = model.get_weights()

    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(GLOBAL_BATCH, drop_remainder=True)
    options = tf.data.Options()
    # AUTO, the default, tries to shard files. With DATA, each worker reads all rows and drops
    # the rows of other workers.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    steps = int(dataset.cardinality())
    distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(x, training=True) - y), axis=-1)
            # Gradients are summed over all workers, so divide by the rows of all workers.
            loss = tf.reduce_sum(errors) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def epoch(iterator: Any) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(steps):  # in the graph: a call for each step is several times slower
            parts = strategy.run(step, args=next(iterator))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
        return total / tf.cast(steps, tf.float32)

    losses = [float(epoch(iter(distributed))) for _ in range(EPOCHS)]
    return {"began": began, "weights": model.get_weights(), "losses": losses}


def strategy_with_tfdist_ext() -> tf.distribute.Strategy:
    """Reads TF_CONFIG or the variables of a scheduler, or takes a resolver, as here."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tfd.create_strategy(cluster=resolver)


def with_tfdist_ext(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Trains with `model.fit`."""
    model = tfd.distribute(build, strategy)
    began = model.get_weights()
    x, y = data()
    history = model.fit(
        x, y, batch_size=GLOBAL_BATCH, epochs=EPOCHS, shuffle=False, verbose=0
    ).history
    return {"began": began, "weights": model.get_weights(), "losses": history["loss"]}


def main() -> list[dict[str, Any]]:
    strategy = strategy_with_tfdist_ext()
    print(tfd.explain(strategy))
    results = []
    for run in (plain, with_tfdist_ext):
        keras.utils.set_random_seed(1)  # the same initial weights for both
        found = run(strategy)
        print(f"{run.__name__}: loss {found['losses'][0]:.4f}, then {found['losses'][-1]:.4f}")
        results.append(found)
    return results


if __name__ == "__main__":
    main()
