"""The training script of `scripts/figures/restarts`, with code that kills a worker.

Arguments: folder, and whether the last worker dies in the first two runs ("yes", "no").
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
from digits_data import load

import tfdist_ext as tfd

EPOCHS, BATCH, KILLED_AT, PAUSE = 12, 48, 60, 0.04
folder, dies = Path(sys.argv[1]), sys.argv[2] == "yes"
start = int(os.environ.get("TFDIST_RESTARTS", "0"))
cluster = tfd.ClusterConfig.from_env()
workers, rank = len(cluster.jobs["worker"]), cluster.task.index
(images, labels), _ = load("digits")


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input(images.shape[1:]), layers.Flatten(), layers.Dense(64, "relu")]
        + [layers.Dropout(0.2), layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(0.001), "sparse_categorical_crossentropy")
    return model


class Steps(keras.callbacks.Callback):
    """Notes each step; the last worker dies at one of the first start, and in the second."""

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        if rank == 0:
            note = {"start": start, "workers": workers, "time": time.time(), "step": step}
            with (folder / "steps.jsonl").open("a") as file:
                print(json.dumps({**note, "loss": float(logs["loss"])}), file=file)
        if dies and rank == workers - 1 and start < 2 and step >= KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PAUSE)


strategy = tfd.create_strategy()
model = tfd.distribute(build, strategy)
model.fit(
    images,
    labels,
    batch_size=BATCH,
    epochs=EPOCHS,
    verbose=0,
    callbacks=[Steps()],
    checkpoint_dir=folder / "checkpoints",
    checkpoint_every=8,
)
if rank == 0:
    weights = {str(i): value for i, value in enumerate(model.get_weights())}
    np.savez(folder / "weights.npz", **weights)
