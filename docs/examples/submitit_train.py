"""Train on two Slurm workers with submitit, and save before the time limit.

python submitit_train.py runs/line --epochs 20
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import submitit

TASKS = 2
ASKS_TO_END = signal.SIGUSR2  # Slurm sends this signal for submitit


class Training(submitit.helpers.Checkpointable):
    """The function of each task. It runs again when the job is queued again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, epochs: int, pause: float = 0.0) -> dict[str, Any]:
        """Returns losses and weights. Each step takes at least `pause` seconds."""
        import time

        import keras
        import numpy as np

        import tfdist_ext as tfd

        def build() -> keras.Model:
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [keras.Input([8]), keras.layers.Dense(4), keras.layers.Dense(1)]
            )
            model.compile(keras.optimizers.Adam(0.01), "mse")
            return model

        def tell(batch: int, logs: object) -> None:
            print(f"STEP {int(model.optimizer.iterations.numpy())}", flush=True)
            time.sleep(pause)

        x = np.random.default_rng(0).normal(size=(160, 8)).astype("float32")
        y = x.sum(axis=1, keepdims=True)
        model = tfd.distribute(build, tfd.create_strategy())
        # Before `fit`, the signal queues the job again at once, because there is nothing to save.
        # During `fit`, the signal makes all tasks save at the same step and exit. `fit` handles
        # only a signal that is ignored.
        queue_again = signal.signal(ASKS_TO_END, signal.SIG_IGN)
        try:
            history = model.fit(
                x,
                y,
                batch_size=16,
                epochs=epochs,
                verbose=0,
                callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=tell)],
                checkpoint_dir=self.folder / "checkpoints",
            )
        except SystemExit:
            signal.signal(ASKS_TO_END, queue_again)
            signal.raise_signal(ASKS_TO_END)  # submitit queues the job again in task 0, and exits
            raise
        return {"loss": history.history["loss"], "weights": model.get_weights()}


def executor(folder: Path) -> submitit.SlurmExecutor:
    """Returns an executor. Its files and the output of all tasks are in the folder."""
    made = submitit.SlurmExecutor(folder / "submitit", max_num_timeout=20)
    made.update_parameters(
        nodes=1,
        ntasks_per_node=TASKS,
        time=60,  # minutes
        signal_delay_s=90,  # seconds from the signal to the time limit
        setup=[f"export TFDIST_PREEMPTION_SIGNAL={ASKS_TO_END.name}"],
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="minimum seconds of each step")
    options = parser.parse_args()
    folder = options.folder.resolve()
    job = executor(folder).submit(Training(folder), options.epochs, options.pause)
    print(f"job {job.job_id}")
    for task, result in enumerate(job.results()):
        print(f"task {task}: loss {result['loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
