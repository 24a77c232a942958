"""One script for all tasks of a cluster with parameter servers; the chief reports, as JSON.

Argument: what the chief does, "data" or "loss" (of a worker; the test kills it).
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import warnings

import tfdist_ext as tfd

strategy = tfd.create_strategy()  # workers and servers stay in here

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist_ext.data import worker_batches  # noqa: E402

result = {}


def steps(model):
    return int(model.keras_model.optimizer.iterations.numpy())


def counting(learning_rate=1.0):
    """A model whose gradient is always 1, so that its weight counts the steps that were applied.

    Its metric is the mean of the labels: wrong where an example is counted twice, or never.
    """

    def build():
        weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), weight])
        labels = keras.metrics.MeanMetricWrapper(lambda y, _: y, name="labels")
        model.compile(keras.optimizers.SGD(learning_rate), lambda _, p: p, metrics=[labels])
        return model

    return build


def applied(model):
    return round(-float(model.keras_model.get_weights()[0].item()), 3)


def numbers(rows):
    """Ones as inputs; 0, 1, 2, ... as labels."""
    return np.ones((rows, 1), "float32"), np.arange(rows, dtype="float32")[:, None]


def data_forms():
    x, y = numbers(303)
    model = tfd.distribute(counting(), strategy)

    def fit(*data, **options):
        before, weight = steps(model), applied(model)
        history = model.fit(*data, verbose=0, **options)
        return {
            "steps": steps(model) - before,
            "applied": round(applied(model) - weight, 3),
            "labels": history.history["labels"],
            "val_labels": history.history.get("val_labels"),
        }

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    result["arrays"] = fit(x, y, batch_size=10, epochs=2, validation_data=(x[:50], y[:50]))
    result["unknown length"] = fit(dataset.filter(lambda *_: True), epochs=2)
    result["endless"] = fit(dataset.repeat(), steps_per_epoch=15, epochs=2)

    examples = tf.data.Dataset.from_tensor_slices((x, y))

    def of_shard(shard):
        return tf.data.Dataset.from_tensor_slices((x, y)).shard(shard.count, shard.index)

    by_worker = tfd.data.from_dataset_fn(of_shard, global_batch_size=10)
    outside = tfd.data.from_dataset_fn(lambda shard: examples.filter(lambda *_: True).batch(10))
    here = tfd.data.from_dataset_fn(lambda shard, epoch: examples, global_batch_size=10)
    result["read by workers"] = fit(by_worker, epochs=2, validation_data=by_worker)
    result["read by the coordinator"] = fit(here)
    result["place"] = here.position
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result["made outside"] = fit(outside)
    (result["why here"],) = [str(w.message) for w in caught if "cannot read" in str(w.message)]

    endless = tfd.data.from_dataset_fn(lambda shard: of_shard(shard).repeat(), global_batch_size=10)
    result["endless, read by workers"] = fit(endless, steps_per_epoch=25, epochs=2)
    result["evaluate"] = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)["labels"]
    with contextlib.suppress(tfd.TrainingError):
        model.predict(by_worker)
        result["predict"] = "not refused"

    identity = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0)])
    rows = tfd.distribute(identity, strategy).predict(y, batch_size=7, verbose=0)
    one_batch = tfd.distribute(identity, strategy).predict(y[:5], verbose=0)
    result["predict in order"] = bool(np.array_equal(rows, y) and np.array_equal(one_batch, y[:5]))

    by_schedule = keras.optimizers.schedules.PiecewiseConstantDecay([14], [1.0, 0.0])
    scheduled = tfd.distribute(counting(by_schedule), strategy)
    scheduled.keras_model.run_eagerly = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduled.fit(x, y, batch_size=10, verbose=0)
    result["warned of run_eagerly"] = any("run_eagerly" in str(w.message) for w in caught)
    result["applied before the rate is 0"] = applied(scheduled)
    result["scheduled steps"] = steps(scheduled)


def sharded():
    """A training on ordered data, broken off in the second epoch and gone on with."""
    x, y = numbers(303)

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if steps(self.model_) == 40:
                raise ZeroDivisionError

    def train(callbacks=()):
        data = tfd.data.from_arrays((x, y), global_batch_size=10, seed=3)
        model = tfd.distribute(counting(), strategy)
        for callback in callbacks:
            callback.model_ = model
        arguments = {"checkpoint_dir": folder, "checkpoint_every": 5, "verbose": 0}
        history = model.fit(data, epochs=2, callbacks=list(callbacks), **arguments)
        return model, data, history.history

    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(ZeroDivisionError):
            train([Breaks()])
        model, data, history = train()
        result["sharded"] = {
            "steps": steps(model),
            "applied": applied(model),
            "labels": history["labels"],
            "place": data.position,
            "evaluate": model.evaluate(data, verbose=0, return_dict=True)["labels"],
        }


def callbacks():
    x, y = numbers(320)
    model = tfd.distribute(counting(), strategy)
    seen = []

    class Watcher(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, steps(model), logs["labels"]))
            if batch == 4:
                self.model.stop_training = True

    model.fit(x, y, batch_size=10, shuffle=False, verbose=0, callbacks=[Watcher()])
    result["watched"] = seen


class Renamed(keras.Model):
    """Logs the mean label under names of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False)
        self.tracker = keras.metrics.Mean(name="labels")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data[0]))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self.test_step(data)

    def test_step(self, data):
        self.tracker.update_state(data[1])
        return {"shown": self.tracker.result(), "own": tf.reduce_mean(data[0])}


def renamed_logs():
    x, y = numbers(303)
    rates = []

    class Rate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            optimizer = self.model.optimizer
            rates.append((float(optimizer.learning_rate), int(optimizer.iterations)))
            optimizer.learning_rate = 0.25

    def build():
        model = Renamed()
        model.compile(keras.optimizers.SGD(0.5))
        return model

    model = tfd.distribute(build, strategy)
    arrays = model.fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[Rate()])
    evaluated = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
    result["renamed"] = [arrays.history, evaluated]
    result["rates"] = rates


def interrupt():
    x, y = numbers(200_000)
    model = tfd.distribute(counting(), strategy)
    model.fit(x[:100], y[:100], batch_size=10, verbose=0)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        model.fit(x, y, batch_size=10, verbose=0)
    except KeyboardInterrupt:
        result["seconds until interrupted"] = time.monotonic() - started
    labels = model.evaluate(x[:100], y[:100], verbose=0, return_dict=True)["labels"]
    result["labels after"] = labels


def lookups():
    """Workers map their data with what was made in the strategy's scope."""
    words = np.array(["a", "b", "none", "c"] * 6)[:, None]
    with strategy.scope():
        text = keras.layers.TextVectorization(output_sequence_length=1)
        text.adapt(words)
        initial = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
        table = tf.lookup.StaticHashTable(initial, 0)
        variable = tf.Variable([2], dtype=tf.int64)
    maps = {
        "adapted, variable": lambda x: tf.reshape(text(x), [-1, 1]) + variable,
        "table, Python": lambda x: tf.ensure_shape(
            tf.numpy_function(lambda ids: ids * 2, [table.lookup(x)], tf.int64), [None, 1]
        ),
    }

    def build():
        ids = keras.Input((1,), dtype="int64")
        model = keras.Model(ids, keras.layers.Flatten()(keras.layers.Rescaling(1.0)(ids)))
        total = keras.metrics.MeanMetricWrapper(lambda _, ids: ids, name="ids")
        model.compile("sgd", "mse", metrics=[total, Total()])
        return model

    model = tfd.distribute(build, strategy)
    found = {}
    for name, mapped in maps.items():

        def of_shard(shard, mapped=mapped):
            data = tf.data.Dataset.from_tensor_slices((words, np.zeros(24, "float32")))
            return data.shard(shard.count, shard.index).batch(4).map(lambda x, y: (mapped(x), y))

        data = tfd.data.from_dataset_fn(of_shard)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit = model.fit(data, validation_data=data, verbose=0).history
        sums = [*fit["total"], *fit["val_total"]]
        here = [str(w.message) for w in caught if "cannot read" in str(w.message)]
        found[name] = {"sums": [float(sum) for sum in sums], "here": here}
    result["lookups"] = found


class Total(keras.metrics.Metric):
    """The sum of the predictions, which shows what is counted twice; a mean may not."""

    def __init__(self):
        super().__init__(name="total")
        self.sum = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, _, ids, sample_weight=None):
        self.sum.assign_add(keras.ops.sum(ids))

    def result(self):
        return self.sum.value + 0.0

    def reset_state(self):
        self.sum.assign(0.0)


def bad_ids():
    """A step that fails on a worker is an error here, and the cluster works afterwards."""

    def build():
        model = keras.Sequential([keras.Input(()), keras.layers.Embedding(5, 1)])
        model.compile("sgd", "mse")
        return model

    model = tfd.distribute(build, strategy)
    try:
        model.fit(np.full(8, 77), np.zeros(8), verbose=0)
    except tf.errors.InvalidArgumentError as error:
        result["bad ids"] = str(error)
    model.fit(np.full(8, 3), np.zeros(8), verbose=0)


def loss_of_a_worker():
    x, y = numbers(32 * 300)
    model = tfd.distribute(counting(), strategy)
    model.fit(x[:320], y[:320], batch_size=32, verbose=0)
    before, weight = steps(model), applied(model)
    says = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: print(f"EPOCH {epoch}", flush=True)
    )
    history = model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[says])
    result["steps"] = steps(model) - before
    result["applied"] = applied(model) - weight
    result["labels"] = history.history["labels"]
    result["evaluate"] = model.evaluate(x, y, verbose=0, return_dict=True)["labels"]


def loss_of_workers_with_data():
    x, y = numbers(32 * 300)
    model = tfd.distribute(counting(), strategy)

    def of_shard(shard):
        data = tf.data.Dataset.from_tensor_slices((x, y))
        return data.shard(shard.count, shard.index).shuffle(32 * 300, seed=1).batch(32)

    def of_other(shard):  # nothing of it may come back in the next fit
        return of_shard(shard).map(lambda rows, labels: (rows, labels + 1e6))

    model.fit(tfd.data.from_dataset_fn(of_other), steps_per_epoch=10, verbose=0)
    own_data = tfd.data.from_dataset_fn(of_shard)
    before, weight = steps(model), applied(model)

    def begin(epoch, logs):
        worker_batches.PATIENCE = (1.0, 120.0)[epoch]  # left out, and waited for
        print(f"OWN DATA {epoch}", flush=True)

    says = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
    history = model.fit(own_data, epochs=2, verbose=0, callbacks=[says])
    result["own data"] = {
        "steps": steps(model) - before,
        "applied": applied(model) - weight,
        "labels": history.history["labels"],
        "evaluate": model.evaluate(own_data, verbose=0, return_dict=True)["labels"],
    }


if sys.argv[1] == "data":
    for part in (
        data_forms, lookups, sharded, callbacks, renamed_logs, interrupt, bad_ids,
    ):  # fmt: skip
        part()
else:
    loss_of_a_worker()
    loss_of_workers_with_data()
print("RESULT", json.dumps(result), flush=True)
