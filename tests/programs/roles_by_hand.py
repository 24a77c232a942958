"""All tasks of a cluster with parameter servers, without tfd.run; the coordinator ends badly."""

import os
import signal
import sys
import time

import tfdist_ext as tfd
from tfdist_ext.cluster import liveness

liveness.FIRST_AFTER = 0.5
strategy = tfd.create_strategy()  # servers stay in here, and end

import tensorflow as tf  # noqa: E402

with strategy.scope():
    variable = tf.Variable(0.0)


@tf.function
def add_one() -> None:
    variable.assign_add(1.0)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
for _ in range(10):
    coordinator.schedule(add_one)
coordinator.join()
print("RESULT", float(variable), flush=True)
if sys.argv[1] == "raise":
    raise OSError("no space left on device")
if sys.argv[1] == "preempt":
    import keras
    import numpy as np

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def ask_to_end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    hook = keras.callbacks.LambdaCallback(on_epoch_begin=ask_to_end)
    x = np.zeros((64, 1))
    tfd.distribute(build, strategy).fit(
        x, x, epochs=9, verbose=0, callbacks=[hook], checkpoint_dir=sys.argv[2]
    )
time.sleep(60)
