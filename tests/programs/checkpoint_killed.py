"""Stops in the middle of writing a checkpoint, says so, and waits to be killed.

Arguments: a folder; "one", to stop where a file is written once more, or "fit", to stop in the
checkpoint after the third epoch of a training. With "paused", the training stops itself before that
epoch, until it is woken.
"""

import os
import signal
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import keras
import mlp

import tfdist_ext as tfd
from tfdist_ext.training.checkpoints import file
from tfdist_ext.training.checkpoints.file import read_rows

folder = Path(sys.argv[1])
x, y = mlp.data()
FIT = {"batch_size": mlp.BATCH, "verbose": 0}


def stop_in_the_next_checkpoint():
    read = []

    def read_rows_or_wait(*args):
        read.append(args)
        if len(read) == 6:  # after weights, in the middle of Adam's slots
            print("INSIDE", flush=True)
            signal.pause()
        return read_rows(*args)

    file.read_rows = read_rows_or_wait


class StopsInTheThird(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            stop_in_the_next_checkpoint()


class PausesBeforeTheThird(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            print("PAUSED", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


strategy = tfd.create_strategy("mirrored", logical_cpus=2)
keras.utils.set_random_seed(3)
model = tfd.distribute(mlp.build, strategy)
if sys.argv[2] != "one":
    stops = PausesBeforeTheThird() if sys.argv[2] == "paused" else StopsInTheThird()
    name = "paused" if sys.argv[2] == "paused" else "D"
    model.fit(x, y, epochs=4, checkpoint_dir=folder / name, callbacks=[stops], **FIT)
else:
    model.fit(x, y, epochs=1, **FIT)
    model.save_checkpoint(folder / "one.h5")
    (folder / "copy.h5").write_bytes((folder / "one.h5").read_bytes())
    model.fit(x, y, initial_epoch=1, epochs=2, **FIT)
    stop_in_the_next_checkpoint()
    model.save_checkpoint(folder / "one.h5")
