"""A training that is hurt and started again, on whatever cluster; writes the weights it ends with.

Arguments: the folder of checkpoints, "arrays" or "tfd.data", epochs, steps of an epoch, the seconds
that each step takes at least, and "ray" where each epoch is to be reported to Ray, or the
gradient_dtype.
"""

import sys
import time
from pathlib import Path

import tfdist_ext as tfd

folder, kind = Path(sys.argv[1]), sys.argv[2]
epochs, steps, pause = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
ROWS = 16


def main() -> None:
    dtype = {"gradient_dtype": "bfloat16"} if "bfloat16" in sys.argv else {}
    strategy = tfd.create_strategy(wait=60, **dtype)

    import keras
    import numpy as np

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dropout(0.2, seed=5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    class Steps(keras.callbacks.Callback):
        """Says where the training is, and how many of its steps this process has done."""

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            print(f"STEP {int(self.model.optimizer.iterations.numpy())}", flush=True)
            time.sleep(pause)

        def on_test_batch_end(self, batch: int, logs: object = None) -> None:
            print(f"VALIDATION {batch}", flush=True)
            time.sleep(pause)

    keras.utils.set_random_seed(2)
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS * steps - 5, 4)).astype("float32")  # the last batch is short
    y = x.sum(axis=1, keepdims=True)
    data: dict[str, object] = {"x": x, "y": y, "batch_size": ROWS}
    if kind == "tfd.data":
        data = {"x": tfd.data.from_arrays((x, y), global_batch_size=ROWS, seed=4)}
    model = tfd.distribute(build, strategy)
    callbacks = [
        Steps(),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
        keras.callbacks.EarlyStopping("loss", patience=epochs),
    ]
    if "ray" in sys.argv:
        callbacks.append(tfd.ray.ReportCallback())
    history = model.fit(
        **data,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
        validation_data=(x[:60], y[:60]),
        validation_batch_size=4,
        checkpoint_dir=folder / "checkpoints",
    )
    me = tfd.ClusterConfig.from_env()
    name = "alone" if me is None else f"{me.task.type}-{me.task.index}"
    weights = {str(i): value for i, value in enumerate(model.get_weights())}
    np.savez(
        folder / f"{name}.npz",
        **weights,
        epochs=history.epoch,
        loss=history.history["loss"],
        val_loss=history.history["val_loss"],
        rate=float(model.optimizer.learning_rate),
        iterations=int(model.optimizer.iterations.numpy()),
    )
    print("DONE", flush=True)


tfd.run(main)
