"""Short trainings of one model, one after another; each counts with its beginning and its end.

Arguments: "fit" or "by hand", the strategy, the name of a model, rows of a global batch, steps of a
training, and what it is done with: "plain", "metrics", "sample weights", "class weights",
"validation" or "jit_compile".
"""

import os
import statistics
import sys
import time

import first_models
import keras
import tensorflow as tf

import tfdist_ext as tfd

how, kind, name, extra = *sys.argv[1:4], sys.argv[6]
rows, steps = map(int, sys.argv[4:6])
TRAININGS = int(os.environ["BENCHMARK_EPOCHS"])
REPLICAS = 4  # of a mirrored strategy
x, y = first_models.batch(name, rows * steps)


def compiled():
    model = first_models.compiled(name)
    metrics = ["accuracy"]
    if extra == "metrics":
        metrics += [keras.metrics.SparseTopKCategoricalAccuracy(k=k) for k in (2, 3, 5)]
    model.compile(model.optimizer, model.loss, metrics=metrics, jit_compile=extra == "jit_compile")
    return model


class StepsOfTraining(keras.callbacks.Callback):
    """Seconds of the steps alone, without those of a validation."""

    seconds = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.begun, self.ended = time.perf_counter(), None

    def on_test_begin(self, logs=None):
        self.ended = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = (self.ended or time.perf_counter()) - self.begun


def by_fit():
    options = {"logical_cpus": REPLICAS} if kind == "mirrored" else {}
    model = tfd.distribute(compiled, tfd.create_strategy(kind, **options))
    given = {
        "sample weights": {"sample_weight": (y + 1.0) / 10},
        "class weights": {"class_weight": {number: (number + 1.0) / 10 for number in range(10)}},
        "validation": {"validation_data": (x[: 4 * rows], y[: 4 * rows])},
    }.get(extra, {})
    watch = StepsOfTraining()
    callbacks = [watch] if extra == "validation" else []

    def train():
        begun = time.perf_counter()
        model.fit(x, y, batch_size=rows, verbose=0, callbacks=callbacks, **given)
        return watch.seconds if callbacks else time.perf_counter() - begun

    return train


def by_hand():
    if kind == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        cpus = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
        tf.config.set_logical_device_configuration(cpu, cpus)
        strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{number}" for number in range(REPLICAS)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled()
        model.optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).repeat()
    data = data.batch(rows, drop_remainder=True).prefetch(tf.data.AUTOTUNE).with_options(options)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            losses = loss_of(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(losses)
        accuracy.update_state(labels, logits)

    @tf.function
    def run(iterator, count):
        for _ in tf.range(count):
            strategy.run(step, args=(next(iterator),))

    def train():
        begun = time.perf_counter()
        run(iterator, tf.constant(steps))
        float(mean_loss.result()), float(accuracy.result())
        mean_loss.reset_state()
        accuracy.reset_state()
        return time.perf_counter() - begun

    return train


train = by_fit() if how == "fit" else by_hand()
for _ in range(2):
    train()
print(f"steps/s {steps / statistics.median(train() for _ in range(TRAININGS)):.2f}", flush=True)
