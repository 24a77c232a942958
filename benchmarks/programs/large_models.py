"""Trains a model on a worker with some methods; prints speed, memory and traffic.

Arguments: the model, the optimizer, the methods, rows of a global batch, steps. The methods, with
commas between them:

    fit          under create_strategy()
    sharded      the same with shard_optimizer=True
    narrow       the same with gradient_dtype="bfloat16"
    one pack     fit with bucket_bytes=0: TensorFlow makes one tensor of all gradients
    hand-written loop
                 a loop in the graph, under TensorFlow's own strategy
    tf_keras     fit of tf_keras, under TensorFlow's own strategy; without other methods
    collectives  only the sum of the gradients
    alone        each worker trains a separate model with fit, on its part of the rows

One method is measured three times. With a sixth argument "turns", methods take turns. Each turn is
a line of the standard input, such as "narrow,6": a method, and its number of steps.

The file imports Keras or tf_keras when the methods are known, and TensorFlow after the strategies.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

model_name, optimizer, ways, rows, steps, *turns = sys.argv[1:]
ways = ways.split(",")
rows, steps = int(rows), int(steps)
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])

if ways == ["tf_keras"]:
    import tf_keras as keras

    sys.modules["keras"] = keras  # that of first_models
else:
    import keras

    import tfdist_ext as tfd


def strategy_of(way):
    options = {
        "sharded": {"shard_optimizer": True},
        "narrow": {"gradient_dtype": "bfloat16"},
        "one pack": {"bucket_bytes": 0},
    }
    if way in ("hand-written loop", "tf_keras"):
        import tensorflow as tf

        return tf.distribute.MultiWorkerMirroredStrategy()
    if way != "alone":
        return tfd.create_strategy(**options.get(way, {}))
    if ways == ["alone"]:
        # As a worker of create_strategy on a machine that it shares.
        import tensorflow as tf

        threads = max(1, os.cpu_count() // workers)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    return tfd.create_strategy("default", alone=True)


strategies = {way: strategy_of(way) for way in ways}

import first_models  # noqa: E402
import tensorflow as tf  # noqa: E402


def dense():
    return keras.Sequential(
        [keras.Input((5000,)), keras.layers.Dense(5000), keras.layers.Dense(10)]
    )


build = dense if model_name == "Dense 5000x5000" else first_models.MODELS[model_name]


def compiled():
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {} if ways == ["tf_keras"] else {"jit_compile": False}
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def sums_of_gradients(strategy):
    """A function that repeats the sum of one step's gradients."""
    from tfdist_ext.strategies.reductions import OTHER
    from tfdist_ext.strategies.traced_replica import sum_up

    shapes = [variable.shape for variable in build().trainable_variables]
    values = [tf.Variable(tf.ones(shape)) for shape in shapes]

    def step():
        summed = sum_up([value + 1.0 for value in values], [OTHER] * len(values))
        return tf.add_n([tf.reshape(value, [-1])[0] for value in summed])

    @tf.function
    def run(count):
        last = tf.constant(0.0)
        for _ in tf.range(count):
            last = strategy.experimental_local_results(strategy.run(step))[0]
        return last

    return lambda count: float(run(tf.constant(count)))


def data_of(rows):
    if build is not dense:
        return first_models.batch(model_name, rows * steps)
    random = np.random.default_rng(0)
    x = random.random((rows * steps, 5000), "float32")
    return x, random.integers(0, 10, len(x)).astype("int32")


def training(way):
    """A function that trains a number of steps, and its model; None if `fit` does not train it."""
    strategy = strategies[way]
    if way == "collectives":
        return sums_of_gradients(strategy), None
    own_rows = rows // workers if way == "alone" else rows
    x, y = data_of(own_rows)
    if way == "hand-written loop":
        import hand_loop

        return hand_loop.hand_loop(strategy, compiled, x, y, rows), None
    if way == "tf_keras":
        with strategy.scope():
            model = compiled()
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.DATA
        options.experimental_distribute.auto_shard_policy = policy
        data = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
        data = data.batch(rows, drop_remainder=True).with_options(options)
        return lambda count: model.fit(data, steps_per_epoch=count, verbose=0), model
    model = tfd.distribute(compiled, strategy, synchronize_batch_norm=False)
    sizes = {"batch_size": own_rows, "verbose": 0}
    return lambda count: model.fit(x, y, steps_per_epoch=count, **sizes), model


def megabytes_sent():
    """Megabytes that have left this network namespace."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    columns = [line.replace(":", " ").split() for line in lines]
    return sum(int(each[9]) for each in columns if each[0] != "lo") / 1e6


def measured(train, count):
    """(seconds, megabytes sent) of a step."""
    begun, before = time.perf_counter(), megabytes_sent()
    train(count)
    return (time.perf_counter() - begun) / count, (megabytes_sent() - before) / count


trainings = {way: training(way) for way in ways}
for train, _ in trainings.values():
    train(2 if turns else steps)  # compiles
if turns:
    print("ready", flush=True)
    for line in sys.stdin:
        way, count = line.split(",")
        seconds, sent = measured(trainings[way][0], int(count))
        print(f"seconds {seconds:.6f} sent {sent:.4f}", flush=True)
    sys.exit()
((train, model),) = trainings.values()
results = sorted(measured(train, steps) for _ in range(3))
slots = model.optimizer.variables if ways[0] in ("fit", "sharded") else []
print(f"steps/s {1 / results[1][0]:.4f}")
print(f"peak MB {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")
print(f"optimizer MB {sum(np.asarray(each).nbytes for each in slots) / 1e6:.2f}")
print(f"sent MB {sum(sent for _, sent in results) / 3:.2f}", flush=True)
