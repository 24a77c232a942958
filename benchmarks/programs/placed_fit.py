"""Trains one model under one strategy for placed_speed.py.

Arguments: mlp or embedding; placed, mirrored, central_storage or one_device; tfdist_ext or keras
(its own fit); steps to time. For mlp also optional: the width of its layers (956) and the number of
devices (4).
"""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

WORK, NAME, TRAINER, STEPS = *sys.argv[1:4], int(sys.argv[4])
BATCH = {"mlp": 32, "embedding": 256}[WORK]
WIDTH, DEVICES = map(int, sys.argv[5:7] or (956, 4))
LAYERS = 8  # of that width: 7.3M parameters
ROWS, COLUMNS = 1_000_000, 4

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
CPUS = [f"CPU:{number}" for number in range(DEVICES)]


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    if WORK == "mlp":
        hidden = [layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input([WIDTH]), *hidden])
    else:
        table = layers.Embedding(ROWS, 32, name="table")
        dense = [layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(1)]
        model = keras.Sequential([keras.Input([COLUMNS], dtype="int32"), table, *dense])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def made_strategy() -> tf.distribute.Strategy:
    if NAME == "placed":
        rules = {} if WORK == "mlp" else {".*table/.*": "device CPU:0", ".*dense.*": "mirrored"}
        return tfd.create_strategy("placed", placement=rules)
    if TRAINER == "tfdist_ext" or NAME == "one_device":
        return tfd.create_strategy(NAME)
    if NAME == "mirrored":
        return tf.distribute.MirroredStrategy(CPUS)
    return tf.distribute.experimental.CentralStorageStrategy(CPUS, "CPU:0")


def data(steps: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    if WORK == "mlp":
        x = random.normal(size=(steps * BATCH, WIDTH)).astype("float32")
        return x, x
    ids = random.integers(0, ROWS, (steps * BATCH, COLUMNS)).astype("int32")
    return ids, ids.sum(axis=1, keepdims=True).astype("float32") / ROWS


def bytes_by_device(variables: list) -> list[int]:
    held = dict.fromkeys(CPUS, 0)
    for variable in variables:
        for copy in strategy.experimental_local_results(variable.value):
            held[copy.device.split("device:")[-1]] += copy.shape.num_elements() * copy.dtype.size
    return list(held.values())


strategy = made_strategy()
if TRAINER == "tfdist_ext":
    model = tfd.distribute(build, strategy)
else:
    with strategy.scope():
        model = build()
x, y = data(STEPS)
model.fit(x[: 2 * BATCH], y[: 2 * BATCH], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
started = time.perf_counter()
model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
print(f"steps/s {STEPS / (time.perf_counter() - started):.3f}")
print("optimizer bytes", *bytes_by_device(model.optimizer.variables))
print("weight bytes", *bytes_by_device(model.weights), flush=True)
