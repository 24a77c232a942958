"""One worker of a cluster: saves, breaks off, goes on, exports; reports what came out, as JSON.

Argument: a directory that all workers share.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import tfdist_ext as tfd

strategy = tfd.create_strategy()

import keras  # noqa: E402  (importing these first would start TensorFlow too early)
import mlp  # noqa: E402
import numpy as np  # noqa: E402

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
shared = Path(sys.argv[1])
result = {}
x, y = mlp.data()
FIT = {"batch_size": mlp.BATCH, "epochs": 4, "verbose": 0}
SHORT = {**FIT, "epochs": 2}


class Crashes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def set_seeds():
    keras.utils.set_random_seed(7 + 100 * rank)  # the chief's count, on all


# A training without a break, and one that is broken off in its third epoch. The others' folder is
# another one than the chief's, as where each has a disk of its own.
set_seeds()
whole = tfd.distribute(mlp.build_with_state, strategy)
whole.save_checkpoint(shared / "start.safetensors")
set_seeds()
result["whole_epochs"] = whole.fit(x, y, checkpoint_dir=shared / f"whole{rank}", **FIT).epoch
result["whole"] = mlp.flat(whole.keras_model)
result["whole_bits"] = mlp.fingerprint(whole.keras_model)
state = whole.keras_model.layers[2].seed_generator.state.numpy().tolist()
result["shuffled_until_resumed"] = [state]
whole.restore_checkpoint(shared / "start.safetensors")  # its steps are compiled
set_seeds()
with contextlib.suppress(KeyboardInterrupt):
    whole.fit(x, y, checkpoint_dir=shared / f"parts{rank}", callbacks=[Crashes()], **FIT)
keras.utils.set_random_seed(1)
resumed = tfd.distribute(mlp.build_with_state, strategy)
history = resumed.fit(x, y, checkpoint_dir=shared / f"parts{rank}", **FIT)
result["resumed_epochs"] = history.epoch
result["resumed"] = mlp.flat(resumed.keras_model)
result["resumed_bits"] = mlp.fingerprint(resumed.keras_model)
state = resumed.keras_model.layers[2].seed_generator.state.numpy().tolist()
result["shuffled_until_resumed"].append(state)

# One file, of one model: on all workers, or an error on all.
resumed.save_checkpoint(shared / "one.safetensors")
result["saved_when_it_returns"] = (shared / "one.safetensors").exists()
fresh = tfd.distribute(mlp.build_with_state, strategy)
progress = fresh.restore_checkpoint(
    shared / "one.safetensors" if rank == 0 else "/not/on/this/machine"
)
result["progress"] = [progress.epoch, progress.step]
result["restored_bits"] = mlp.fingerprint(fresh.keras_model)
for name, path in (("missing", shared / "two.safetensors"), ("other", shared / "one.safetensors")):
    model = fresh if name == "missing" else tfd.distribute(mlp.build, strategy)
    try:
        model.restore_checkpoint(path)
    except tfd.TrainingError as error:
        result[name] = str(error)

fresh.export(shared / "exported", verbose=False)
result["predicted"] = np.asarray(fresh.predict(x[:10], verbose=0)).astype(float).tolist()


class Reads(keras.callbacks.Callback):
    """Keeps the logs, and decides by them."""

    seen = []  # noqa: RUF012

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(logs)
        self.model.stop_training = len(self.seen) == 2


# All write to the same paths, and only the chief does so.
to = shared / "callbacks"
callbacks = [
    keras.callbacks.ModelCheckpoint(to / "each" / "{epoch}.keras"),
    keras.callbacks.ModelCheckpoint(
        to / "best.weights.h5", save_weights_only=True, save_best_only=True, monitor="val_loss"
    ),
    keras.callbacks.CSVLogger(to / "log.csv"),
    keras.callbacks.TensorBoard(to / "board", histogram_freq=1),
    Reads(),
]
if rank == 0:
    to.mkdir()
fresh.fit(x, y, callbacks=callbacks, validation_data=(x[:48], y[:48]), **FIT)
result["logs"] = Reads.seen
result["written_when_fit_returns"] = sorted(
    str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()
)


class Writes(keras.callbacks.Callback):
    """By the Keras model's own methods, on all tasks to the same paths."""

    def on_epoch_end(self, epoch, logs=None):
        own = shared / "own"
        own.mkdir(exist_ok=True)
        self.model.save(own / f"{epoch}.keras")
        if epoch:
            self.model.save_weights(own / f"{epoch}.weights.h5")
            self.model.export(own / f"{epoch}", verbose=False)


fresh.fit(x, y, callbacks=[Writes()], **SHORT)
result["weights_after_own_writes"] = mlp.flat(fresh.keras_model)
result["own_written_when_fit_returns"] = sorted(path.name for path in (shared / "own").iterdir())


folder = Path(tempfile.mkdtemp())  # of this worker alone
small = tfd.distribute(mlp.build, strategy)
if rank == 0:
    saved = keras.models.clone_model(small.keras_model)
    saved.set_weights([np.full(weight.shape, 0.25) for weight in saved.weights])
    saved.save_weights(folder / "a.weights.h5")
    saved.save(folder / "a.keras")
result["loaded_on_the_chief"] = {}
for name in ("a.weights.h5", "a.keras"):
    small.set_weights([np.zeros(weight.shape) for weight in small.weights])
    small.load_weights(folder / name)
    result["loaded_on_the_chief"][name] = mlp.flat(small.keras_model)
normalizing, other = (
    tfd.distribute(
        lambda: keras.Sequential([keras.Input((6,)), keras.layers.Normalization()]), strategy
    )
    for _ in range(2)
)
normalizing.set_weights([np.full(6, 1.0), np.full(6, 4.0), np.zeros(())])  # mean, variance, count
normalizing.save_weights(folder / "normalizing.weights.h5")
other.load_weights(folder / "normalizing.weights.h5")
result["normalized"] = np.ravel(other(np.full((1, 6), 5.0))).tolist()
try:
    small.load_weights(folder / "none.weights.h5")
except tfd.TrainingError as error:
    result["no weights"] = f"{type(error).__name__}: {error}"
except Exception as error:
    result["no weights"] = str(error)

print("RESULT " + json.dumps(result), flush=True)
# The chief is ready long before the other one, which TensorFlow would tell that it has crashed.
if rank == 1:
    time.sleep(4)
    print("worker 1 is done", flush=True)
