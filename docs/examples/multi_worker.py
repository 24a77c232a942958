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

GLOBAL_BATCH, EPOCHS = 16, 3  # 16 rows of all workers together


def build() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    """64 rows, the same on every worker: each takes its part of every global batch."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return x, (x[:, :1] * x[:, 1:2]).astype("float32")


def plain_strategy() -> tf.distribute.Strategy:
    """To be called before TensorFlow does anything; returns when all workers are there."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()  # reads TF_CONFIG
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def plain(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """A custom loop, which does what `model.fit` would."""
    with strategy.scope():  # the chief's initial values go to all workers
        model = build()
        model.optimizer.build(model.trainable_variables)  # not in the loop: it would be traced
    began = model.get_weights()

    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(GLOBAL_BATCH, drop_remainder=True)
    options = tf.data.Options()
    # The default, AUTO, looks for files first. DATA: each worker reads all and drops the rest.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    steps = int(dataset.cardinality())
    distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(x, training=True) - y), axis=-1)
            # Divided by the rows of all workers: gradients are summed over them.
            loss = tf.reduce_sum(errors) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def epoch(iterator: Any) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(steps):  # in the graph: one call a step is several times slower
            parts = strategy.run(step, args=next(iterator))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
        return total / tf.cast(steps, tf.float32)

    losses = [float(epoch(iter(distributed))) for _ in range(EPOCHS)]
    return {"began": began, "weights": model.get_weights(), "losses": losses}


def strategy_with_tfdist_ext() -> tf.distribute.Strategy:
    """From TF_CONFIG, or what Slurm and others set; or from any resolver, as here."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tfd.create_strategy(cluster=resolver)


def with_tfdist_ext(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """`model.fit`, with Keras's arguments."""
    model = tfd.distribute(build, strategy)
    began = model.keras_model.get_weights()
    x, y = data()
    history = model.fit(
        x, y, batch_size=GLOBAL_BATCH, epochs=EPOCHS, shuffle=False, verbose=0
    ).history
    return {"began": began, "weights": model.keras_model.get_weights(), "losses": history["loss"]}


def main() -> list[dict[str, Any]]:
    strategy = strategy_with_tfdist_ext()
    print(tfd.explain(strategy))
    results = []
    for run in (plain, with_tfdist_ext):
        keras.utils.set_random_seed(1)  # so that both begin alike
        found = run(strategy)
        print(f"{run.__name__}: loss {found['losses'][0]:.4f}, then {found['losses'][-1]:.4f}")
        results.append(found)
    return results


if __name__ == "__main__":
    main()
