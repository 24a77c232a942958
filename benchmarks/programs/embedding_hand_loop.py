"""A hand-written loop on ClusterCoordinator with tf.nn.embedding_lookup, one step per call."""

import embedding_work as work
import tensorflow as tf

work.serve()
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    table = tf.Variable(tf.random.uniform((work.ROWS, work.WIDTH), -0.05, 0.05))
    kernel = tf.Variable(tf.random.normal((work.WIDTH, 1)))
    bias = tf.Variable(tf.zeros((1,)))
variables = [table, kernel, bias]


@tf.function
def step(iterator):
    ids, targets = next(iterator)
    with tf.GradientTape() as tape:
        outputs = tf.nn.embedding_lookup(table, ids) @ kernel + bias
        loss = tf.reduce_mean((outputs - targets) ** 2)
    gradients = tape.gradient(loss, variables)
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(0.01 * gradient.values, gradient.indices)
            variable.scatter_sub(gradient)
        else:
            variable.assign_sub(0.01 * gradient)
    return loss


iterator = iter(coordinator.create_per_worker_dataset(work.dataset))


def run_epochs(count):
    for _ in range(count):
        for _ in range(work.STEPS):
            loss = coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        float(loss.fetch())


work.report_speed(run_epochs)
