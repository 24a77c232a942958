"""Stops in the middle of writing a checkpoint, says so, and waits to be killed.

Arguments: a folder; "one", to stop where a file is written once more, or "fit", to stop in the
checkpoint after the third epoch of a training. With "paused", the training stops itself before that
epoch, until it is woken.
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
from tfdist_ext.training.checkpoints import file, saving

folder = Path(sys.argv[1])
x, y = mlp.data()
FIT = {"batch_size": mlp.BATCH, "verbose": 0}


def stop_in_the_checkpoint_after(epochs):
    written, write, write_checkpoint = [], file._write, saving.write_checkpoint

    def write_or_wait(*args):
        written.append(args)
        if len(written) == 6:  # after weights, in the middle of the rest
            print("INSIDE", flush=True)
            time.sleep(1000)
        write(*args)

    def that_one_stops(path, groups, kinds, fields, *rest):
        if fields["epoch"] == epochs:
            file._write = write_or_wait
        write_checkpoint(path, groups, kinds, fields, *rest)

    saving.write_checkpoint = that_one_stops


class PausesBeforeTheThird(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            print("PAUSED", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


strategy = tfd.create_strategy("mirrored", logical_cpus=2)
keras.utils.set_random_seed(3)
model = tfd.distribute(mlp.build, strategy)
if sys.argv[2] != "one":
    paused = sys.argv[2] == "paused"
    name = "paused" if paused else "D"
    if paused:  # with the second checkpoint on disk
        FIT |= {"callbacks": [PausesBeforeTheThird()], "checkpoint_async": False}
    else:
        stop_in_the_checkpoint_after(3)
    model.fit(x, y, epochs=4, checkpoint_dir=folder / name, **FIT)
else:
    model.fit(x, y, epochs=1, **FIT)
    model.save_checkpoint(folder / "one.h5")
    (folder / "copy.h5").write_bytes((folder / "one.h5").read_bytes())
    model.fit(x, y, initial_epoch=1, epochs=2, **FIT)
    stop_in_the_checkpoint_after(2)
    model.save_checkpoint(folder / "one.h5")
