"""Trains 26 tables of 100,000 x 16 and a dense part, with global batches of 256.

Arguments: "fit", "lazy" (fit with lazy updates), "hand-written loop" or "tf_keras"; "mirrored" (on
two logical CPUs) or "multi_worker_mirrored"; the optimizer; steps to time.
"""

import sys
import time

import numpy as np
import tensorflow as tf

METHOD, STRATEGY, OPTIMIZER, STEPS = *sys.argv[1:4], int(sys.argv[4])
TABLES, ROWS, WIDTH, BATCH = 26, 100_000, 16, 256

if METHOD == "tf_keras" and STRATEGY == "multi_worker_mirrored":
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before importing starts TensorFlow
if METHOD == "tf_keras":
    import tf_keras as keras
else:
    import keras


def compiled():
    layers = keras.layers
    ids = keras.Input((TABLES,), dtype="int32")
    rows = [layers.Embedding(ROWS, WIDTH)(ids[:, table]) for table in range(TABLES)]
    hidden = layers.Dense(64, activation="relu")(layers.Concatenate()(rows))
    model = keras.Model(ids, layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZER, loss)
    return model


random = np.random.default_rng(0)
x = random.integers(0, ROWS, (STEPS * BATCH, TABLES)).astype("int32")
y = random.integers(0, 10, STEPS * BATCH).astype("int32")

if METHOD in ("fit", "lazy"):
    import tfdist_ext as tfd

    logical = {"logical_cpus": 2} if STRATEGY == "mirrored" else {}
    lazy = METHOD == "lazy"
    model = tfd.distribute(compiled, tfd.create_strategy(STRATEGY, **logical), lazy_updates=lazy)

    def train():
        model.fit(x, y, batch_size=BATCH, verbose=0)

elif METHOD == "tf_keras":
    if STRATEGY == "mirrored":
        from hand_loop import strategy_of

        strategy = strategy_of(STRATEGY, 2)
    with strategy.scope():
        model = compiled()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    data = data.prefetch(2).with_options(options)

    def train():
        model.fit(data, verbose=0)

else:
    from hand_loop import hand_loop, strategy_of

    loop = hand_loop(strategy_of(STRATEGY, 2), compiled, x, y, BATCH)

    def train():
        loop(STEPS)


train()
begun = time.perf_counter()
train()
print(f"steps/s {STEPS / (time.perf_counter() - begun):.2f}", flush=True)
