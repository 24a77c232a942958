"""Trains a large model on a worker with one method; prints speed, memory and traffic.

Arguments: the model, the optimizer, the method, rows of a global batch, steps. The methods:

    fit          under create_strategy()
    sharded      the same with shard_optimizer=True
    narrow       the same with gradient_dtype="bfloat16"
    one pack     fit with bucket_bytes=0: TensorFlow makes one tensor of all gradients
    hand-written loop
                 a loop in the graph, under TensorFlow's own strategy
    tf_keras     fit of tf_keras, under TensorFlow's own strategy
    collectives  only the sum of the gradients
    alone        each worker trains a separate model with fit, on its part of the rows

The file imports Keras or tf_keras when the method is known, and TensorFlow after the strategy.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

model_name, optimizer, way, *numbers = sys.argv[1:]
rows, steps = map(int, numbers)
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])

if way in ("fit", "collectives"):
    import tfdist_ext as tfd

    strategy = tfd.create_strategy()
elif way in ("sharded", "narrow", "one pack"):
    import tfdist_ext as tfd

    options = {
        "sharded": {"shard_optimizer": True},
        "narrow": {"gradient_dtype": "bfloat16"},
        "one pack": {"bucket_bytes": 0},
    }
    strategy = tfd.create_strategy(**options[way])
elif way == "alone":
    import tfdist_ext as tfd

    strategy = tfd.create_strategy("default", alone=True)
    # As a worker of create_strategy on a machine that it shares.
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(max(1, os.cpu_count() // workers))
    rows //= workers
else:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

if way == "tf_keras":
    import tf_keras as keras

    sys.modules["keras"] = keras  # that of first_models
else:
    import keras
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
    options = {} if way == "tf_keras" else {"jit_compile": False}
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def sums_of_gradients():
    """Returns a function that repeats the sum of one step's gradients."""
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


if build is dense:
    random = np.random.default_rng(0)
    x = random.random((rows * steps, 5000), "float32")
    y = random.integers(0, 10, len(x)).astype("int32")
else:
    x, y = first_models.batch(model_name, rows * steps)
if way == "collectives":
    train = sums_of_gradients()
elif way == "hand-written loop":
    import hand_loop

    train = hand_loop.hand_loop(strategy, compiled, x, y, rows)
elif way == "tf_keras":
    with strategy.scope():
        model = compiled()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows, drop_remainder=True)
    data = data.with_options(options)

    def train(count):
        model.fit(data, verbose=0)
else:
    model = tfd.distribute(compiled, strategy, synchronize_batch_norm=False)

    def train(count):
        model.fit(x, y, batch_size=rows, verbose=0)


def megabytes_sent():
    """Megabytes that have left this network namespace."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    columns = [line.replace(":", " ").split() for line in lines]
    return sum(int(each[9]) for each in columns if each[0] != "lo") / 1e6


train(steps)
times, before = [], megabytes_sent()
for _ in range(3):
    begun = time.perf_counter()
    train(steps)
    times.append(time.perf_counter() - begun)
sent = (megabytes_sent() - before) / 3 / steps
slots = model.optimizer.variables if way in ("fit", "sharded") else []
print(f"steps/s {steps / sorted(times)[1]:.4f}")
print(f"peak MB {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")
print(f"optimizer MB {sum(np.asarray(each).nbytes for each in slots) / 1e6:.2f}")
print(f"sent MB {sent:.2f}", flush=True)
