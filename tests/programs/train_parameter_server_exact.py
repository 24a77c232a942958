"""Training on parameter servers with one worker, all in one process: step after step.

Without a second worker nothing is asynchronous, so every number must be plain Keras's. Arguments:
the number of pieces that variables are partitioned into (0: whole), and a file for the saved model.
"""

import functools
import sys

import keras
import numpy as np
import own_servers
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.data.batches import Position
from tfdist_ext.data.reading import batches_of
from tfdist_ext.training.parameter_server.calls import traced_on_batches
from tfdist_ext.training.steps import row_updates

shards = int(sys.argv[1])
cluster, servers = own_servers.serve(ps=2)
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(shards)
strategy = tf.distribute.ParameterServerStrategy(
    resolver, variable_partitioner=partitioner if shards else None
)

opt = keras.optimizers


class Normalized(opt.Adam):
    """Divides each gradient by a mean of its norms."""

    def build(self, variables):
        super().build(variables)
        self.norms = self.add_variable((len(variables),), name="norms")

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        norms = tf.stack([tf.linalg.global_norm([g]) for g in grads])
        self.norms.assign(0.5 * self.norms + 0.5 * norms)
        grads = [keras.ops.divide(g, self.norms[i] + 0.1) for i, g in enumerate(grads)]
        super().apply(grads, trainable_variables)


class Overflowing(opt.LossScaleOptimizer):
    """Skips the first steps, until the scale is small enough."""

    def scale_loss(self, loss):
        return 20 * super().scale_loss(loss)


OPTIMIZERS = {
    "own apply": lambda: Normalized(0.01),
    "adamw, clipnorm, ema": lambda: opt.AdamW(
        0.01, weight_decay=0.01, clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: opt.RMSprop(0.01, gradient_accumulation_steps=2),
    "skipped steps": lambda: Overflowing(
        opt.Adam(opt.schedules.ExponentialDecay(0.1, 1, 0.5)), initial_scale=2.0**127
    ),
}
random = np.random.default_rng(0)
x = random.integers(0, 11, (61, 3))
y = random.integers(0, 3, 61)


class OwnStep(keras.Model):
    """Subclassed, with a train_step, a loss and a lookup of its own."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(11, 4), initializer="glorot_uniform", name="table")
        self.head = keras.layers.Dense(3)

    def call(self, ids):
        rows = keras.ops.take(self.table, ids - 11, axis=0)  # negative ids count from the end
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(rows)))
        # The same variable read as a whole, too.
        rows = rows + keras.ops.mean(self.table, axis=0) + self.table[2] + self.table[-1]
        return self.head(keras.ops.mean(rows, axis=1))

    def train_step(self, data):
        ids, labels = data
        with tf.GradientTape() as tape:
            outputs = self(ids, training=True)
            loss = self.compute_loss(y=labels, y_pred=outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        steps = self.optimizer.iterations  # an integer
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients), "steps": steps}


def spectral():
    """Its wrapper assigns the wrapped layer's kernel in its call, and then uses it."""
    ids = keras.Input((3,), dtype="int32")
    h = keras.layers.Flatten()(keras.layers.Embedding(11, 4)(ids))
    h = keras.layers.SpectralNormalization(keras.layers.Dense(6, activation="tanh"))(h)
    return keras.Model(ids, keras.layers.Dense(3)(h))


def many_layers():
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(11, 4, mask_zero=True, embeddings_regularizer="l2")(ids)
    h = keras.layers.LSTM(5)(rows)
    h = keras.layers.BatchNormalization()(h)
    return keras.Model(ids, keras.layers.Dense(3)(limited(h)))


def few_layers():
    """For the second and further optimizers: a table, a constraint and what is neither."""
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(11, 4, embeddings_regularizer="l2")(ids)
    return keras.Model(ids, keras.layers.Dense(3)(limited(keras.layers.Flatten()(rows))))


def table():
    """Its gradient is in slices, unlike that of a table with a regularizer."""
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(30, 4)(ids)
    return keras.Model(ids, keras.layers.Dense(3)(keras.layers.Flatten()(rows)))


def limited(h):
    norm = keras.constraints.MaxNorm(0.8)
    return keras.layers.Dense(6, activation="tanh", kernel_constraint=norm)(h)


def build(make_optimizer, make_model=many_layers):
    def make():
        model = make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        plain_step = type(model).train_step is keras.Model.train_step
        model.compile(make_optimizer(), loss, metrics=["accuracy"] if plain_step else None)
        return model

    return make


def difference(one, other):
    pairs = zip(one, other, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


class ResetsMetrics(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.reset_metrics()


def compared(builder, *callbacks, lazy_updates=False):
    """Largest differences to plain Keras: of weights, of the optimizer's variables, of history.

    Lazy updates are compared with those of one device.
    """
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    keras.utils.set_random_seed(1)
    if lazy_updates:
        plain = tfd.distribute(builder, tfd.create_strategy("default"), lazy_updates=True)
    else:
        plain = builder()
        plain.run_eagerly = True  # few small steps take less time than making a graph of one
    expected = plain.fit(x, y, **fit).history
    keras.utils.set_random_seed(1)
    model = tfd.distribute(builder, strategy, lazy_updates=lazy_updates)
    history = model.fit(x, y, **fit).history
    ours = model.keras_model
    slots = [[v.numpy() for v in one.optimizer.variables] for one in (plain, ours)]
    return model, {
        "weights": difference(plain.get_weights(), ours.get_weights()),
        "slots": difference(*slots),
        "history": difference(expected.values(), history.values()),
        "names": [list(expected), list(history)],
        "steps": int(ours.optimizer.iterations.numpy()),
    }


result = {"optimizers": {}}
for name, make_optimizer in OPTIMIZERS.items():
    layers = many_layers if name == "adamw, clipnorm, ema" else few_layers
    callbacks = [ResetsMetrics()] if name == "skipped steps" else []
    model, result["optimizers"][name] = compared(build(make_optimizer, layers), *callbacks)
    if layers is many_layers:
        saved = model
for name, make_optimizer, lazy in (
    ("rows, adagrad", lambda: opt.Adagrad(0.1), False),
    ("rows, lazy adamw", lambda: opt.AdamW(0.01, weight_decay=0.1), True),
):
    _, result["optimizers"][name] = compared(build(make_optimizer, table), lazy_updates=lazy)
row_updates.UPDATE_BLOCK_BYTES = 4  # one row
for name, make_optimizer in {"adam": lambda: opt.Adam(0.01), "rmsprop": opt.RMSprop}.items():
    _, result["optimizers"][f"blocks, {name}"] = compared(build(make_optimizer, table))
_, result["own step"] = compared(build(lambda: opt.SGD(0.1), OwnStep))
_, result["weight assigned in call"] = compared(build(lambda: opt.Adam(0.01), spectral))


model = saved
rows = model.predict(x, batch_size=16, verbose=0)
model.save(sys.argv[2])
plain = keras.models.load_model(sys.argv[2])
result["saved"] = difference([rows], [plain.predict(x, verbose=0)])
result["evaluate"] = difference(
    plain.evaluate(x, y, verbose=0), model.evaluate(x, y, batch_size=16, verbose=0)
)


def of_shard(shard):
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shard(shard.count, shard.index).batch(16)


result["read by the worker"] = difference(
    model.evaluate(x, y, batch_size=16, verbose=0),
    model.evaluate(tfd.data.from_dataset_fn(of_shard), verbose=0),
)
embedding = model.keras_model.layers[1].embeddings
result["pieces"] = len(getattr(embedding.value, "variables", [embedding]))


def gathers(rows):
    """Gathers from servers in a step of an Embedding of integers and a Dense."""

    def make():
        layers = [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(rows, 3),
            keras.layers.Flatten(),
        ]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    model = tfd.distribute(make, strategy)
    model.fit(x[:, :2], y, batch_size=16, verbose=0)
    engine = model._tfdist_ext.engine
    data = batches_of(x[:, :2], y, batch_size=16, readers=engine.readers)
    feed = functools.partial(engine.feed, eagerly=False)
    batches = data.iterators(feed, in_pieces=False, inspect=None).of_epoch(None, Position())
    program = model._tfdist_ext.loop("train").program
    function = traced_on_batches(program._on_batches, batches, program._specs, 1)
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return sum(node.op == "ResourceGather" for node in nodes)


result["gathers"] = gathers(50)


class Broken(keras.utils.PyDataset):
    num_batches = 4

    def __getitem__(self, index):
        if index == 3:
            raise ValueError("damaged")
        return x[:16], y[:16]


model = tfd.distribute(build(lambda: opt.SGD(0.1), few_layers), strategy)
model.keras_model.jit_compile = True
try:
    model.fit(Broken(), shuffle=False, verbose=0)
except Exception as error:
    result["error"] = str(error)
result["steps before the error"] = int(model.optimizer.iterations.numpy())
state = model._tfdist_ext
programs = [state.loop("train").program for _ in range(2)]
result["traced once"] = programs[0] is programs[1] is state._loops["train", False].program
