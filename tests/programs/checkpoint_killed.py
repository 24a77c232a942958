"""A training that stops in the middle: to be killed or, with "paused", until it is woken.

Arguments: a folder for checkpoints; "killed" or "paused".
"""

import os
import signal
import sys
import time
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import keras
import mlp

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints import writer

folder, how = Path(sys.argv[1]), sys.argv[2]
encode = writer.encode_checkpoint


def encode_or_wait(progress, *rest):
    """Stops in the middle of the file of the third epoch."""
    for number, block in enumerate(encode(progress, *rest)):
        if progress.epoch == 3 and number == 6:
            print("INSIDE", flush=True)
            time.sleep(1000)
        yield block


class PausesBeforeTheThird(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            print("PAUSED", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


strategy = tfd.create_strategy("mirrored", logical_cpus=2)
keras.utils.set_random_seed(3)
model = tfd.distribute(mlp.build, strategy)
options = {"batch_size": mlp.BATCH, "verbose": 0, "epochs": 4, "checkpoint_dir": folder}
if how == "paused":  # with the second checkpoint on disk
    options |= {"callbacks": [PausesBeforeTheThird()], "checkpoint_async": False}
else:
    writer.encode_checkpoint = encode_or_wait
model.fit(*mlp.data(), **options)
