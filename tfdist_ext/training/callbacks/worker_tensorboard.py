"""TensorBoard of all workers in one folder, and a message on which of them is slow."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.agreement.equality import from_each_worker
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.steps.scope import Logs
from tfdist_ext.training.steps.step_timer import StepTimer
from tfdist_ext.training.synchronous.engine import SynchronousProgram
from tfdist_ext.user_frames import filter_traceback

_SLOW = 0.2  # waiting fraction of a step above which a worker is reported


@filter_traceback
class WorkerTensorBoard(keras.callbacks.Callback):
    """Writes the step times of each worker for TensorBoard. Pass it to `fit` on every worker.

    Each worker writes to its own folder, such as `log_dir/worker-0`. TensorBoard shows each folder
    as a run with these values:

    - `own_ms`: the time of a step before the worker waits for the other workers, in milliseconds.
    - `step_ms`: the time of the whole step, in milliseconds. It is nearly equal on all workers.

    If the other workers wait for a worker for more than a fifth of a step, the chief prints the
    name of this worker at the end of the epoch. The callback turns off `jit_compile=True`, with a
    warning, because XLA cannot read the time.

    Args:
        log_dir: a folder, which can be different on each machine.
        update_freq: the number of steps per point. Each point is a mean.

    Attributes:
        own_ms: an array with the mean `own_ms` of each worker in the last epoch. All workers have
            the same array.

    Raises:
        TrainingError: `update_freq` is less than 1. In `fit`: the model is not from
            `tfd.distribute`, there are two of these callbacks, or the strategy uses parameter
            servers.
    """

    def __init__(self, log_dir: str | Path, *, update_freq: int = 1):
        super().__init__()
        if update_freq < 1:
            raise TrainingError(f"update_freq must be 1 step or more, got {update_freq!r}.")
        self._log_dir = Path(log_dir)
        self._update_freq = update_freq
        self._timer: StepTimer | None = None
        self.own_ms = np.empty(0)

    def follow(self, program: SynchronousProgram, reduction: Reduction) -> None:
        """Called by `fit` before its first step, with its steps, which are timed."""
        self._timer = program.timer
        self._reduction = reduction
        self._workers = [task.removeprefix("the ") for task in reduction.task_names()]
        self._first_epoch = True
        folder = self._workers[reduction.worker].replace(" ", "-")
        self._writer = tf.summary.create_file_writer(str(self._log_dir / folder))
        # A resumed training continues its curves.
        self._step = int(self.model.optimizer.iterations.numpy())

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._timer = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._timer is None:
            raise TrainingError(
                "WorkerTensorBoard needs times inside the steps, which Keras's fit() does not"
                " record. Use the fit() of tfdist_ext.distribute(model, strategy)."
            )
        self._timer.read()  # drops the steps of an interrupted epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert self._timer is not None
        step, own = self._timer.read()
        count = len(own)
        if count == 0:
            return
        with self._writer.as_default():
            for first in range(0, count, self._update_freq):
                steps = slice(first, first + self._update_freq)
                at = self._step + min(steps.stop, count)
                write_scalar("own_ms", own[steps].mean(), at)
                write_scalar("step_ms", step[steps].mean(), at)
            self._step += count
        self._writer.flush()
        # The first step of a training compiles.
        later = slice(1, None) if self._first_epoch and count > 1 else slice(None)
        self._first_epoch = False
        means = np.array([own[later].mean(), step[later].mean()])
        self.own_ms, steps_ms = from_each_worker(self._reduction, means).T
        if self._reduction.is_chief:
            for line in slow_workers(self._workers, self.own_ms, steps_ms.mean() * _SLOW):
                print(f"\n{line}", flush=True)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._writer.close()


def slow_workers(names: list[str], own_ms: np.ndarray, most_ms: float) -> list[str]:
    """Returns a line for each worker that is `most_ms` slower than the median of the others."""
    lines = []
    for number, name in enumerate(names if len(names) > 1 else []):
        others = float(np.median(np.delete(own_ms, number)))
        if own_ms[number] - others > most_ms:
            lines.append(
                f"{name} is slow: {own_ms[number]:.3g} ms of work per step; other workers need"
                f" {others:.3g} ms"
            )
    return lines


def write_scalar(tag: str, value: float, step: int) -> None:
    """Writes a number for TensorBoard. `tf.summary.scalar` needs the package tensorboard."""
    plugin = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin)
    tf.summary.write(tag, tf.constant(value, tf.float32), step, metadata=metadata)
