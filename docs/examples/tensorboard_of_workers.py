"""Write the TensorBoard runs of all workers into one folder, and find the slow worker.

    tfdist run --workers 2 -- python docs/examples/tensorboard_of_workers.py logs
    tensorboard --logdir logs

Two mistakes are common. With `keras.callbacks.TensorBoard` on every worker, all workers write into
one run. The time of a whole step is the same on all workers, because they wait for the slowest, so
measure the time until a worker waits.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

GLOBAL_BATCH, EPOCHS = 16, 2
SLOW, SECONDS = 1, 0.03  # the slow worker, and its extra seconds for each batch


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="zeros")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
    return x, np.argmax(x[:, :3], axis=1)


def with_a_fault(dataset: tf.data.Dataset, worker: int) -> tf.data.Dataset:
    """Returns the data of a worker. One of the workers reads slowly."""

    def as_from_a_slow_disk(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tf.py_function(lambda: time.sleep(SECONDS), [], [])
        return x, y

    return dataset.map(as_from_a_slow_disk) if worker == SLOW else dataset


def plain(strategy: tf.distribute.Strategy, log_dir: Path) -> np.ndarray:
    """Trains in a custom loop. Returns the mean own milliseconds per step of each worker."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = build()
        model.optimizer.build(model.trainable_variables)

    def part(context: tf.distribute.InputContext) -> tf.data.Dataset:
        """Returns the rows of this worker in each global batch."""
        worker, workers = context.input_pipeline_id, context.num_input_pipelines
        rows = tf.data.Dataset.from_tensor_slices(data()).batch(GLOBAL_BATCH // workers)
        # Without repeat(), next() asks all workers whether their data has ended, and waits.
        return with_a_fault(rows.shard(workers, worker), worker).repeat()

    def local(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            # In a replica, the classes of keras.losses divide by the number of replicas.
            errors = tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)
            loss = tf.reduce_mean(errors)
        gradients = tape.gradient(loss, model.trainable_variables)
        with tf.control_dependencies(gradients):
            ready = tf.timestamp()  # after this, the worker waits for other workers
        with tf.control_dependencies([ready]):
            model.optimizer.apply([gradient / replicas for gradient in gradients])  # sums them
        correct = tf.equal(tf.argmax(outputs, axis=1), tf.cast(y, tf.int64))
        accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
        return {"loss": loss, "accuracy": accuracy, "ready": ready}

    @tf.function
    def step(iterator: Any) -> dict[str, tf.Tensor]:
        begun = tf.timestamp()
        with tf.control_dependencies([begun]):
            batch = next(iterator)
        found = strategy.run(local, args=batch)
        # Each worker has one replica, so `found` holds the values of this worker.
        return {**found, "begun": begun}

    worker = strategy.cluster_resolver.task_id
    writer = tf.summary.create_file_writer(str(log_dir / f"worker-{worker}"))
    distributed = strategy.distribute_datasets_from_function(part)
    iterator = iter(distributed)
    own = []
    for number in range(EPOCHS * len(data()[0]) // GLOBAL_BATCH):
        found = {name: float(value) for name, value in step(iterator).items()}
        begun, ready = found.pop("begun"), found.pop("ready")
        own.append(1000 * (ready - begun))
        found |= {"own_ms": own[-1], "step_ms": 1000 * (time.time() - begun)}
        with writer.as_default():
            for name, value in found.items():
                tf.summary.scalar(name, value, number + 1)
    writer.close()
    mine = tf.constant([np.mean(own[1:])])  # the first step compiles

    @tf.function
    def of_all() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(mine, axis=0)

    return strategy.experimental_local_results(strategy.run(of_all))[0].numpy()


def with_tfdist_ext(strategy: tf.distribute.Strategy, log_dir: Path) -> np.ndarray:
    """Trains with `fit` and one callback. The chief names a slow worker after each epoch."""
    board = tfd.WorkerTensorBoard(log_dir)
    model = tfd.distribute(build, strategy)
    worker = strategy.cluster_resolver.task_id
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(GLOBAL_BATCH)
    model.fit(with_a_fault(dataset, worker), epochs=EPOCHS, verbose=0, callbacks=[board])
    return board.own_ms


def main(log_dir: Path) -> None:
    strategy = tfd.create_strategy()
    for run in (plain, with_tfdist_ext):
        own_ms = run(strategy, log_dir / run.__name__)
        print(f"{run.__name__}: worker:{np.argmax(own_ms)} is the slowest; own ms: {own_ms}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
