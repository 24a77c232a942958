"""One worker of a cluster: trains in several ways and reports what came out, as JSON.

Argument: a directory that all workers share.
"""

import json
import os
import sys
from pathlib import Path

import tfdist_ext as tfd

strategy = tfd.create_strategy()

import keras  # noqa: E402  (importing these first would start TensorFlow too early)
import mlp  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist_ext.strategies.owned_sums import Sums, set_sums, sums_of  # noqa: E402


def sums_in(model):
    """How many collectives sum in the graph of a training's execution."""
    (loop,) = model._tfdist_ext._loops.values()
    (function,) = loop.program._executions.values()
    (concrete,) = function._list_all_concrete_functions_for_serialization()
    graph = concrete.graph.as_graph_def()
    nodes = [node for each in graph.library.function for node in each.node_def]
    return sum(node.op == "CollectiveReduceV2" for node in [*graph.node, *nodes])


rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
shared = Path(sys.argv[1])
result = {"replicas": strategy.num_replicas_in_sync, "explain": str(tfd.explain(strategy))}
x, y = mlp.data()

# Workers that start from other seeds must still begin alike and shuffle alike.
keras.utils.set_random_seed(7 + 100 * rank)
model = tfd.distribute(mlp.build, strategy)
history = model.fit(x, y, batch_size=mlp.BATCH, epochs=3, validation_data=(x[:48], y[:48]))
result["history"] = history.history
result["weights"] = mlp.flat(model.keras_model)
result["bits"] = mlp.fingerprint(model.keras_model)
result["evaluate"] = model.evaluate(x, y, batch_size=mlp.BATCH, verbose=0)
rows = np.asarray(model.predict(x[:50], batch_size=mlp.BATCH, verbose=0))  # 24, 24 and 2 rows
result["predict"] = rows.astype(float).tolist()

# The same training, what each worker does between the sums compiled by XLA.
keras.utils.set_random_seed(7 + 100 * rank)
by_xla = tfd.distribute(lambda: mlp.build(jit_compile=True), strategy)
by_xla.fit(x, y, batch_size=mlp.BATCH, epochs=3, verbose=0)
result["weights_by_xla"] = mlp.flat(by_xla.keras_model)
result["steps_by_xla"] = tfd.explain(by_xla).steps

# And with gradients in several buckets, once by each way to sum them.
usual = sums_of(strategy)
set_sums(strategy, Sums(bucket_bytes=64))
for how in ({}, {"jit_compile": True}):
    keras.utils.set_random_seed(7 + 100 * rank)
    in_buckets = tfd.distribute(lambda how=how: mlp.build(**how), strategy)
    in_buckets.fit(x, y, batch_size=mlp.BATCH, epochs=3, verbose=0)
    result[f"weights_in_buckets{len(how)}"] = mlp.flat(in_buckets.keras_model)
    collectives = result.setdefault("collectives", [])
    collectives.append(sums_in(in_buckets))
set_sums(strategy, usual)

model.save(shared / "model.keras")
result["saved_when_save_returns"] = (shared / "model.keras").exists()
result["bits_saved"] = mlp.fingerprint(model.keras_model)


def build_mixed():
    """Gradients of several dtypes, in one call."""
    layers = [keras.layers.Dense(4, dtype=dtype) for dtype in ("float64", "float32", "bfloat16")]
    mixed = keras.Sequential([keras.Input((x.shape[1],)), *layers, keras.layers.Dense(1)])
    mixed.compile("sgd", "mse")
    return mixed


mixed = tfd.distribute(build_mixed, strategy)
mixed.fit(x, y, batch_size=mlp.BATCH, verbose=0)
result["mixed_bits"] = mlp.fingerprint(mixed.keras_model)


keras.utils.set_random_seed(7 + 100 * rank)
result["in_callbacks"] = mlp.trained_in_callbacks(tfd.distribute(mlp.build, strategy), shared)


class StopsOnOneWorker(keras.callbacks.Callback):
    """Worker 1 alone has enough after its third batch."""

    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 2:
            self.model.stop_training = True


before = int(model.keras_model.optimizer.iterations.numpy())
model.fit(x, y, batch_size=mlp.BATCH, epochs=5, verbose=0, callbacks=[StopsOnOneWorker()])
result["steps_until_one_stopped"] = int(model.keras_model.optimizer.iterations.numpy()) - before

# Data whose length nobody knows, with a last batch that is smaller.
before = int(model.keras_model.optimizer.iterations.numpy())
history = model.fit(mlp.train_data_of_unknown_length(), epochs=2, verbose=0)
result["unknown_length_steps"] = int(model.keras_model.optimizer.iterations.numpy()) - before
logs = model.evaluate(mlp.train_data_of_unknown_length(), verbose=0, return_dict=True)
result["unknown_length_accuracy"] = logs["accuracy"]
result["unknown_length_predict"] = len(model.predict(mlp.train_data_of_unknown_length(), verbose=0))


class StopsPredicting(keras.callbacks.Callback):
    """Worker 1 alone has enough after its second batch."""

    def on_predict_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 1:
            self.model.stop_predicting = True


stops = [StopsPredicting()] if rank == 1 else []
rows = model.predict(x, batch_size=mlp.BATCH, verbose=0, callbacks=stops)
result["rows_predicted"] = len(rows)


class StopsBeforeAnyBatch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if rank == 1 and epoch == 1:
            self.model.stop_training = True


before = int(model.keras_model.optimizer.iterations.numpy())
model.fit(x, y, batch_size=mlp.BATCH, epochs=3, verbose=0, callbacks=[StopsBeforeAnyBatch()])
result["stopped_before"] = int(model.keras_model.optimizer.iterations.numpy()) - before


# A trained model of each worker's own: the chief's counts, its optimizer's state included.
keras.utils.set_random_seed(20 + rank)
own = mlp.build()
own.fit(x, y, verbose=0)
result["chiefs_own"] = mlp.fingerprint(own) if rank == 0 else None
adopted = tfd.distribute(own, strategy)
result["adopted_bits"] = mlp.fingerprint(adopted.keras_model)


class Named(keras.Model):
    """Dict inputs, BatchNormalization, a step of its own with names of its own."""

    def __init__(self):
        super().__init__()
        self.rows = keras.metrics.Mean(name="rows")
        self.normal = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs, training=False):
        return self.dense(self.normal(inputs["features"], training=training))

    def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=labels, y_pred=self(inputs, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.rows.update_state(inputs["row"])
        return {
            "first_row": tf.cast(inputs["row"][0], tf.float32),
            "mean_row": self.rows.result(),
        }


def build_named():
    model = Named()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


named = tfd.distribute(build_named, strategy, synchronize_batch_norm=False)
inputs = {"features": x, "row": np.arange(len(x))}
logs = named.fit(inputs, y, batch_size=mlp.BATCH, shuffle=False, verbose=0)
# The last global batch starts at row 168; two workers' parts start at 168 and 180.
result["mean_of_own_log"] = logs.history["first_row"][0]
result["named_logs"] = logs.history
result["named_bits"] = mlp.fingerprint(named.keras_model)
result["moving_mean"] = np.asarray(named.keras_model.normal.moving_mean).astype(float).tolist()
