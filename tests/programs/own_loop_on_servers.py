"""Loops of the user's own over variables in shards: gradients, and TensorFlow's tutorial's step.

One worker, all tasks in this process: every number must be plain Keras's.
"""

import keras
import numpy as np
import own_servers
import tensorflow as tf

import tfdist_ext as tfd

cluster, servers = own_servers.serve(ps=3)
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
in_shards = {"table/.*": "sharded(3)", "hidden/kernel": "sharded(2)"}
strategy = tfd.create_strategy("parameter_server", cluster=resolver, placement=in_shards)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
random = np.random.default_rng(0)
ids = random.integers(0, 11, (4, 8, 3))
y = random.normal(size=(4, 8, 1)).astype("float32")


def build():
    given = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(11, 4, name="table")(given)  # 4, 4 and 3 rows
    h = keras.layers.Dense(5, activation="tanh", name="hidden")(keras.layers.Flatten()(rows))
    return keras.Model(given, keras.layers.Dense(1, name="head")(h))


plain = build()
with strategy.scope():
    ours = build()


def begin_alike():
    for a, b in zip(plain.weights, ours.weights, strict=True):
        b.assign(a.numpy())


def loss_of(model):
    return tf.reduce_mean((model(ids[0], training=True) - y[0]) ** 2)


def taped(model, compute=loss_of):
    with tf.GradientTape() as tape:
        loss = compute(model)
    return tape.gradient(loss, model.trainable_variables)


def second_order(model):
    kernel = model.get_layer("hidden").kernel
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            value = tf.reduce_sum(tf.tanh(tf.matmul(tf.ones([2, 12]), kernel)))
        norm = tf.reduce_sum(inner.gradient(value, kernel) ** 2)
    return [outer.gradient(norm, kernel)]


def by_lookup(model):
    table = model.get_layer("table").embeddings.value
    return tf.reduce_sum(tf.nn.embedding_lookup(table, ids[0]) ** 2)


GRADIENTS = {
    "eager": taped,
    "in a tf.function": tf.function(taped),
    "of a gradient": second_order,
    "embedding_lookup": lambda model: taped(model, by_lookup),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),  # updates whole variables
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


def dense(gradients):
    return [None if g is None else tf.convert_to_tensor(g).numpy() for g in gradients]


def difference(one, other):
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None or b is not None]
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def trained(model, optimizer, run, call):
    def step(rows, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows, training=True) - labels) ** 2)
            if hasattr(optimizer, "inner_optimizer"):
                loss = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    function = tf.function(lambda rows, labels: run(step, (rows, labels)), autograph=False)
    for rows, labels in zip(ids, y, strict=True):
        call(function, (tf.constant(rows), tf.constant(labels)))
    state = [*model.weights, *optimizer.variables]
    return function, [np.asarray(variable.numpy(), np.float64) for variable in state]


def on_worker(function, args):
    coordinator.schedule(function, args=args)
    coordinator.join()


result: dict[str, dict[str, object]] = {"gradients": {}, "trained": {}}
begin_alike()
for name, gradients in GRADIENTS.items():
    expected, found = gradients(plain), gradients(ours)
    rows = [isinstance(g, tf.IndexedSlices) for g in found]
    result["gradients"][name] = [difference(dense(expected), dense(found)), rows]
initial = plain.get_weights()
for name, make in OPTIMIZERS.items():
    plain.set_weights(initial)
    begin_alike()
    _, expected = trained(plain, make(), lambda f, args: f(*args), lambda f, args: f(*args))
    with strategy.scope():
        optimizer = make()
    function, found = trained(ours, optimizer, strategy.run, on_worker)
    result["trained"][name] = difference(expected, found)
    graph = function.get_concrete_function(tf.constant(ids[0]), tf.constant(y[0])).graph
    if name == "sgd":  # the update of a shard is placed where the shard is
        ops = [op for op in graph.get_operations() if op.type == "AssignAddVariableOp"]
        result["updates"] = sorted({op.device.split("/device")[0] for op in ops})
slots = {v.path: type(v.value).__name__ for v in optimizer.variables}
result["slots"] = sum(kind == "ServerVariable" for kind in slots.values())
