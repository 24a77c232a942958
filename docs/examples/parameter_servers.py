"""Parameter servers: choose the server of each variable, and train asynchronously.

    tfdist run --workers 2 --ps 2 -- python docs/examples/parameter_servers.py

Add the word `plain` to run the loop without tfdist_ext. TensorFlow ignores
`with tf.device("/job:ps/task:0")` in the scope of ParameterServerStrategy and places variables in
turn, and Keras 3 refuses `model.fit` there.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

STEPS, ROWS = 150, 16  # ROWS is the batch size of one step
WEIGHTS = np.array([[1.0], [-2.0], [3.0]], "float32")  # the weights to learn


def examples(part: int = 0) -> tf.data.Dataset:
    """Returns the batches of one worker, without end."""

    def batch(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([number, tf.constant(part, tf.int64)])
        x = tf.random.stateless_normal([ROWS, 3], seed)
        return x, x @ WEIGHTS

    return tf.data.Dataset.counter().map(batch)


def plain() -> dict[str, Any] | None:
    """Call this in every task. It returns on the coordinator only."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
        ).join()  # waits forever, until another process ends this one
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope(), tf.device("/job:ps/task:0"):
        ignored = [tf.Variable(0.0) for _ in range(2)]

    def on_server_0(next_creator: Any, **kwargs: Any) -> tf.Variable:
        with tf.device("/job:ps/task:0"):  # overrides TensorFlow's choice
            return next_creator(**kwargs)

    # Enter the scope of the creator BEFORE the scope of the strategy.
    with tf.variable_creator_scope(on_server_0), strategy.scope():
        weights = tf.Variable(tf.zeros([3, 1]))
        steps = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(iterator: Any) -> None:
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - y))
        # assign_sub() runs on the server. assign() would overwrite the updates of other workers.
        weights.assign_sub(0.02 * tape.gradient(loss, weights))
        steps.assign_add(1)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    dataset = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(
            lambda context: examples(context.input_pipeline_id)
        )
    )
    iterator = iter(dataset)
    for _ in range(STEPS):
        coordinator.schedule(step, args=(iterator,))  # does not wait for the step
    coordinator.join()
    return {
        "ignored": [variable.device for variable in ignored],
        "devices": [weights.device, steps.device],
        "steps": int(steps.numpy()),
        "weights": weights.numpy(),
    }


def build() -> keras.Model:
    with tf.device("/job:ps/task:0"):  # optimizer variables follow their weights
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def with_tfdist_ext() -> dict[str, Any]:
    """Runs on the coordinator only. `tfd.run` runs a server in the other tasks, and ends them."""
    strategy = tfd.create_strategy()
    model = tfd.distribute(build, strategy)
    data = tfd.data.from_dataset_fn(lambda shard: examples(shard.index))
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    return {
        "devices": [weight.value.device for weight in model.weights],
        "steps": int(model.optimizer.iterations.numpy()),
        "weights": model.get_weights()[0],
    }


def report(found: dict[str, Any] | None) -> None:
    assert found is not None  # this is the coordinator
    print(f"{found['steps']} steps; variables on {', '.join(found['devices'])}")
    print(f"weights {np.round(found['weights'][:, 0], 2)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["plain"]:
        report(plain())
    else:
        tfd.run(lambda: report(with_tfdist_ext()))
