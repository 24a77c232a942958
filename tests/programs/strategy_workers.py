"""A worker of a real cluster: the strategy that the environment calls for sums over workers."""

import json

import tensorflow as tf

import tfdist_ext as tfd

strategy = tfd.create_strategy(communication="ring")
index = strategy.cluster_resolver.task_id


@tf.function
def total() -> tf.Tensor:
    def step() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.constant(index + 1.0))

    return strategy.run(step)


result = {
    "sum": float(total()),
    "class": type(strategy).__name__,
    "explanation": tfd.explain(strategy).splitlines(),
    "devices_here": tfd.explain(tfd.create_strategy("one_device")).splitlines(),
}
tfd.create_strategy("multi_worker_mirrored")  # a second one, in the same process
print("RESULT", json.dumps(result), flush=True)
