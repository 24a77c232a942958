"""Compare synchronous and asynchronous updates on one problem, with one slow worker.

    python docs/examples/sync_async.py sync_async.svg           start both clusters and plot
    python docs/examples/sync_async.py sync_async.svg --plain   the same in plain tf.distribute

The plot needs matplotlib: pip install matplotlib.

Compare the loss per second, not only the loss per step. Synchronous steps wait for the slow worker.
Asynchronous steps do not wait, but have fewer rows and use gradients of older weights.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

import tfdist_ext as tfd
from tfdist_ext.testing import run_tasks

BATCH = 8  # rows of one worker in one step
MILLISECONDS = (4, 40)  # time in which worker 0 and worker 1 read a batch
EVERY = 20  # steps between two points of a curve
STEPS = {"synchronous": 100, "asynchronous": 400}
RATE = 0.02

Curve = list[tuple[float, int, float]]  # (seconds, steps, loss over all rows)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 10)).astype("float32")
    noise = 0.1 * rng.normal(size=(256, 1))
    return x, (x @ rng.normal(size=(10, 1)) + noise).astype("float32")


def batches(worker: int, workers: int) -> tf.data.Dataset:
    """Returns the batches of one worker, without end. Reading a batch takes MILLISECONDS."""
    x, y = (rows[worker::workers] for rows in data())
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    sleeping = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        sleep_microseconds=tf.constant(1000 * MILLISECONDS[worker], tf.int64),
        output_types=[spec.dtype for spec in dataset.element_spec],
        output_shapes=[spec.shape for spec in dataset.element_spec],
    )
    return tf.data.experimental.from_variant(sleeping, dataset.element_spec)


def loss_of(weights: np.ndarray) -> float:
    x, y = data()
    return float(np.mean(np.square(x @ weights - y)))


def part_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
    return batches(context.input_pipeline_id, context.num_input_pipelines)


def gradient(weights: tf.Variable, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights - y))
    return tape.gradient(loss, weights)


def plain_synchronous(steps: int = STEPS["synchronous"]) -> Curve:
    """Runs on each worker. Each update uses the gradients of all workers."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([10, 1]), aggregation=tf.VariableAggregation.SUM)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        weights.assign_sub(RATE * gradient(weights, x, y) / strategy.num_replicas_in_sync)

    @tf.function
    def some(iterator: Any) -> None:
        for _ in tf.range(EVERY):
            strategy.run(step, args=next(iterator))

    iterator = iter(strategy.distribute_datasets_from_function(part_of))
    curve: Curve = []
    for done in range(EVERY, steps + 1, EVERY):
        some(iterator)
        curve.append((time.perf_counter(), done, loss_of(weights.numpy())))
    return curve


def plain_asynchronous(steps: int = STEPS["asynchronous"]) -> Curve:
    """Runs on the coordinator. Each update uses the gradient of one worker.

    In other tasks, this function does not return.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    task, number = resolver.task_type, resolver.task_id
    if task in ("worker", "ps"):
        tf.distribute.Server(resolver.cluster_spec(), task, number, protocol="grpc").join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([10, 1]))

    @tf.function
    def step(iterator: Any) -> None:
        weights.assign_sub(RATE * gradient(weights, *next(iterator)))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    make = lambda: strategy.distribute_datasets_from_function(part_of)  # noqa: E731
    iterator = iter(coordinator.create_per_worker_dataset(make))
    curve: Curve = []
    for done in range(EVERY, steps + 1, EVERY):
        for _ in range(EVERY):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        curve.append((time.perf_counter(), done, loss_of(weights.numpy())))
    return curve


def build() -> keras.Model:
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((10,)), dense])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def with_tfdist_ext() -> Curve | None:
    """Runs in each task of both clusters. The strategy decides how updates are made."""
    curve: Curve = []

    def note(epoch: int, logs: Any) -> None:
        loss = loss_of(model.get_weights()[0])
        curve.append((time.perf_counter(), EVERY * (epoch + 1), loss))

    def train() -> Curve:
        nonlocal model
        strategy = tfd.create_strategy()
        model = tfd.distribute(build, strategy)
        stream = tfd.data.from_dataset_fn(lambda shard: batches(shard.index, shard.count))
        kind = "a" * isinstance(strategy, tf.distribute.ParameterServerStrategy) + "synchronous"
        model.fit(
            stream,
            epochs=STEPS[kind] // EVERY,
            steps_per_epoch=EVERY,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)],
        )
        return curve

    model: Any = None
    return tfd.run(train)


def measure(synchronous: Any, asynchronous: Any) -> dict[str, Curve]:
    """Runs both trainings, one after the other.

    Seconds count from the first point of a curve, so they do not include connecting and compiling.
    """
    found = {
        "synchronous": run_tasks(synchronous, {"worker": 2})["worker:0"],
        "asynchronous": run_tasks(asynchronous, {"worker": 2, "ps": 1})["chief:0"],
    }
    return {
        name: [(seconds - curve[0][0], steps, loss) for seconds, steps, loss in curve]
        for name, curve in found.items()
    }


def plot(curves: dict[str, Curve]) -> Figure:
    """Plots the loss over time, and over steps."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, column, label in zip(
        figure.subplots(1, 2), (0, 1), ("seconds", "steps"), strict=True
    ):
        for name, curve in curves.items():
            points = np.array(curve)
            axes.semilogy(points[:, column], points[:, 2], label=name)
        axes.set(xlabel=label, ylabel="loss")
    axes.legend()
    return figure


def main(file: str, plain: bool = False) -> dict[str, Curve]:
    runs = (plain_synchronous, plain_asynchronous) if plain else (with_tfdist_ext, with_tfdist_ext)
    curves = measure(*runs)
    plot(curves).savefig(file, metadata={"Date": None})
    for name, curve in curves.items():
        seconds, steps, loss = curve[-1]
        print(f"{name}: {steps - EVERY} steps in {seconds:.2f} s, loss {loss:.4f}")
    return curves


if __name__ == "__main__":
    main(sys.argv[1], "--plain" in sys.argv)
