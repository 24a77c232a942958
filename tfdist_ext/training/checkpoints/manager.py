"""Checkpoints of one `fit(checkpoint_dir=...)`: when to save, and where to resume.

A job that resumes gives the numbers of a training without a break.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.cluster.liveness.reports import say
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import PeerError, TrainingError
from tfdist_ext.launch.exit_codes import PREEMPTED, command_line, is_started_again
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.checkpoints.callback_state import (
    CallbackState,
    callback_state,
    continue_log_files,
    restore_callbacks,
)
from tfdist_ext.training.checkpoints.folder import (
    CheckpointFolder,
    FolderTakenError,
    finished_checkpoints,
)
from tfdist_ext.training.checkpoints.format import Progress
from tfdist_ext.training.checkpoints.paths import checkpoint_folder
from tfdist_ext.training.checkpoints.saving import arrays_of, at_step, restore_checkpoint
from tfdist_ext.training.checkpoints.writer import Writer
from tfdist_ext.training.epochs import Epochs
from tfdist_ext.training.protocols import Callbacks, Logs, StepListener
from tfdist_ext.training.state.chief import run_on_chief
from tfdist_ext.training.state.values import assign_whole, whole_value
from tfdist_ext.training.variables import optimizers_of
from tfdist_ext.user_frames import warn

__all__ = ["CheckpointManager"]

_Values = list[tuple[keras.Variable, np.ndarray]]


class CheckpointManager:
    """The checkpoints of one `fit`; without a folder it does nothing.

    Every task makes the same calls. Only the chief needs to see the folder.

    Args:
        folder: where checkpoints are, or will be.
        data: the training data, if it knows its position, which is part of a checkpoint.
        every: also save after this many global batches, in the middle of an epoch.
        epochs: of the whole training.
        in_background: write files in a thread.

    Raises:
        TrainingError: BackupAndRestore is among the callbacks; the folder cannot be written, or
            none of its checkpoints can be read.
    """

    def __init__(
        self,
        folder: str | Path | None,
        model: keras.Model,
        reduction: Reduction,
        callbacks: Callbacks,
        data: ShardedDataset | None = None,
        every: int | None = None,
        epochs: int = 1,
        in_background: bool = False,
    ):
        self._files = None if folder is None else CheckpointFolder(checkpoint_folder(folder))
        self._model = model
        self._reduction = reduction
        self._callbacks: Sequence[keras.callbacks.Callback] = ()  # those that run on this task
        self._data = data
        self._every = every
        self._epochs = epochs
        self._progress = Progress()
        self._unannounced: Progress | None = None  # callbacks have not seen this checkpoint
        self._resumes_inside = False  # the training may begin in the middle of an epoch
        self._since = 0  # global batches since the last checkpoint
        # From the checkpoint that was restored, until its epoch has begun:
        self._callback_state = CallbackState()
        self._numbers: _Values = []  # learning rates and metrics
        if self._files is None:
            return
        given = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or [])
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in given):
            raise TrainingError(
                "Both checkpoint_dir and the callback BackupAndRestore would restore the model:"
                " give one of them."
            )
        report = functools.partial(reduction.peers.enters, "checkpoint")
        self._writer = Writer(self._files.write, report, in_background=in_background)
        run_on_chief(reduction, self._files.open, f"open {self._files.path}")

    def seed(self) -> int:
        """Returns the seed of the order of examples: of the job before, or a new one.

        A new seed comes from Python's generator, as in Keras.
        """
        drawn = random.randint(1, 2**31 - 1)  # also if it is not used: the next fit draws, too
        found = 0 if self._files is None else self._files.progress.seed
        seed = int(self._reduction.from_chief(found or drawn))
        self._progress = replace(self._progress, seed=seed)
        return seed

    def check_position(self, data: Epochs) -> None:
        """Checks whether `checkpoint_every` is possible.

        Raises:
            TrainingError: there is no folder, or the data has no position.
        """
        if self._data is None:
            self._resumes_inside = data.can_begin_anywhere
            self._progress = replace(self._progress, batch_size=data.batch_size or 0)
        else:
            self._resumes_inside = self._data.resumes_inside_epochs
        if self._every is not None and (self._files is None or not self._resumes_inside):
            raise TrainingError(
                "checkpoint_every needs checkpoint_dir, and data that knows its position in an"
                " epoch: arrays, tfd.data.from_arrays((x, y), global_batch_size=64, seed=0) or"
                " from_tfrecords, or from_dataset_fn where the function takes the epoch."
            )

    def resume(
        self, data: Epochs, initial_epoch: int, callbacks: Sequence[keras.callbacks.Callback]
    ) -> int:
        """Restores the newest checkpoint and the position in the data.

        Args:
            initial_epoch: the epoch to begin with if there is no checkpoint.
            callbacks: those that run on this task, and the history.

        Returns:
            The epoch to begin with.
        """
        self._callbacks = callbacks
        self._progress = replace(self._progress, epoch=initial_epoch, first_epoch=initial_epoch)
        files, model = self._files, self._model
        if files is None or not self._reduction.any_worker(files.newest is not None):
            return initial_epoch
        path = files.file(files.newest or "")
        progress, state = restore_checkpoint(model, self._reduction, path, verified=True)
        self._check_same_data(progress)
        self._progress = self._unannounced = replace(progress, batch_size=self._progress.batch_size)
        self._callback_state = state
        optimizers = optimizers_of(model).values()
        numbers = [v for each in optimizers for v in each.variables if not tuple(v.shape)]
        self._numbers = _values([*numbers, *model.metrics_variables])
        continue_log_files(state, callbacks)
        has_ended = progress.stopped or progress.epoch >= self._epochs
        is_done = has_ended and progress.trained is None
        if self._reduction.is_chief:
            complete = f"training in {files.path} is complete after {progress}; nothing to do"
            say(complete if is_done else f"resuming after {progress}, from {path}")
        trained_epochs = progress.epoch - progress.first_epoch
        if self._data is not None and progress.data is not None:
            self._data.restore(progress.data)
        elif self._data is not None:  # the job before had other data
            for _ in range(trained_epochs):
                self._data.end_epoch()
        if is_done:
            return max(self._epochs, progress.epoch)
        if self._data is not None:
            data.begin_at_position(completed=progress.batches)
        elif not data.begin_after(trained_epochs, completed=progress.batches):
            _read_past(data, trained_epochs)
        return progress.epoch - (progress.trained is not None)

    def _check_same_data(self, saved: Progress) -> None:
        """Raises TrainingError if this data cannot begin in the middle of the saved epoch."""
        size = self._progress.batch_size
        if saved.batches and not (self._resumes_inside and saved.batch_size == size):
            raise TrainingError(
                f"The checkpoint is in the middle of an epoch, at {saved}. To resume there, use the"
                f" same data with the same batch_size ({saved.batch_size or None}, got"
                f" {size or None}) to the end of the epoch, or another checkpoint_dir."
            )

    def restore_callbacks(self) -> None:
        """After `on_train_begin`: restores callbacks, and what they may have changed."""
        if self._callback_state:
            _assign(self._numbers)
            restore_callbacks(self._callback_state, self._callbacks)

    def epoch_has_begun(self) -> Logs | None:
        """After `on_epoch_begin`: undoes it in an epoch that callbacks have begun before.

        Returns:
            The logs of the epoch's training, if the job before ended in its validation; else None.
        """
        logs = self._progress.trained
        if self._progress.batches or logs is not None:
            self.restore_callbacks()
        self._callback_state = CallbackState()
        self._progress = replace(self._progress, trained=None)
        return logs and {k: v if isinstance(v, float) else np.asarray(v) for k, v in logs.items()}

    def announce(self) -> None:
        """Calls `on_checkpoint_end` for the checkpoint of the last epoch, when it is on disk.

        A restored checkpoint is announced too: the job before may have ended too early.
        """
        progress, self._unannounced = self._unannounced, None
        is_whole = progress and progress.epoch and not progress.batches and not progress.trained
        if self._files is None or progress is None or not is_whole:
            return
        hooks = [getattr(each, "on_checkpoint_end", None) for each in self._callbacks]
        if not self._reduction.any_worker(any(hooks)):  # a callback may be on the chief only
            return
        self._run_on_chief(self._writer.wait)
        path = finished_checkpoints(self._files.path)[-1] if self._reduction.is_chief else None
        for hook in filter(None, hooks):
            hook(progress.epoch - 1, path)

    def validation(self, epoch: int, logs: Logs, *, complete: bool) -> StepListener | None:
        """Returns a listener that lets a signal end a validation; None if it must not end.

        Args:
            logs: of the epoch's training.
            complete: all global batches of the epoch are done.
        """
        may_end = self._files is not None and complete and not self._model.stop_training
        if not may_end or not _is_finite(logs):
            return None
        trained = {name: np.asarray(value).tolist() for name, value in logs.items()}
        progress = replace(self._progress, epoch=epoch + 1, batches=0, trained=trained)
        return _ValidationListener(self._model, functools.partial(self._save, progress))

    def max_steps(self) -> int | None:
        """Returns the maximum of global batches before the next checkpoint; None: any number."""
        return None if self._every is None else self._every - self._since

    def steps_done(
        self, steps: int, logs: Logs, *, epoch_ends: bool, stopped: bool, told: bool
    ) -> None:
        """Saves after each `every` global batches, and at a signal.

        Raises:
            SystemExit: `told`, a task has got a signal to end, and the epoch is not done.
        """
        self._since += steps
        if self._resumes_inside:
            self._progress = replace(self._progress, batches=self._progress.batches + steps)
        due = self._every is not None and self._since >= self._every
        if due:
            self._since = 0
        if epoch_ends:  # it is saved after its callbacks
            return
        if (due or told) and self._resumes_inside and _is_finite(logs):
            self._save(replace(self._progress, stopped=stopped))
        if told:
            raise SystemExit(PREEMPTED)

    def epoch_is_done(self, epoch: int, logs: Logs, *, complete: bool, stopped: bool) -> Progress:
        """Saves after an epoch, unless its loss is not finite.

        Args:
            complete: all global batches of the epoch are done.
            stopped: a callback has told the training to stop.
        """
        if complete or self._data is None:
            self._progress = replace(self._progress, epoch=epoch + 1, batches=0)
        else:  # stopped in the middle
            self._progress = replace(self._progress, epoch=epoch)
        if self._files is None:
            return self._progress
        if _is_finite(logs):
            self._save(replace(self._progress, stopped=stopped))
        elif self._reduction.is_chief:
            warn(
                f"the loss of epoch {epoch + 1} is {logs['loss']}: no checkpoint is written,"
                f" and those in {self._files.path} stay."
            )
        return self._progress

    def training_is_done(self) -> None:
        """Notes in the folder that the training has completed."""
        if self._files is not None:
            self._run_on_chief(self._writer.wait)
            self._run_on_chief(functools.partial(self._files.finish, self._epochs))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Scope of the training, which saves before a signal ends it.

        If it fails or is ended, the chief prints how to resume it.
        """
        if self._files is None:
            yield
            return
        try:
            with self._reduction.peers.ends_at_a_step():
                yield
            self._writer.wait()
        except FolderTakenError:  # its message says what to do
            raise
        except BaseException as error:
            self._report(self._files, error)
            raise
        finally:
            self._writer.close()

    def _report(self, files: CheckpointFolder, error: BaseException) -> None:
        """Waits for the last file after an error, and says how to resume the training."""
        try:
            self._writer.wait()
        except Exception as failure:
            name = type(failure).__name__
            say(f"the last checkpoint could not be written: {name}: {failure}")
        if not self._reduction.is_chief:
            hint = f"Checkpoints are in {files.path} on the chief."
        elif files.newest is None:
            hint = f"There is no checkpoint in {files.path} yet."
        else:
            hint = f"The last checkpoint is {files.file(files.newest)}, after {files.progress}."
            if not is_started_again():
                line = command_line() or "fit() with the same arguments"
                hint = f"{hint} To resume, run again: {line}"
        if isinstance(error, PeerError) and hint not in str(error):
            error.args = (f"{error} {hint}",)
        if self._reduction.is_chief:
            is_signal = isinstance(error, SystemExit) and error.code == PREEMPTED
            reason = "a signal" if is_signal else type(error).__name__
            # A progress bar may have left its line open.
            say(f"\ntraining stopped by {reason}. {hint}")

    def _save(self, progress: Progress) -> None:
        """Begins to write a checkpoint; every task must call."""
        data = None if self._data is None else self._data.state()
        progress = at_step(replace(progress, data=data), self._model)
        self._progress = self._unannounced = progress

        def begin() -> None:
            self._writer.begin(progress, arrays_of(self._model, callback_state(self._callbacks)))

        self._run_on_chief(begin)

    def _run_on_chief(self, action: Callable[[], None]) -> None:
        assert self._files is not None
        run_on_chief(self._reduction, action, f"write to {self._files.path}")


class _ValidationListener:
    """Ends the job at a signal in a validation; the next job begins the validation again.

    Args:
        save: saves the state before the validation.
    """

    def __init__(self, model: keras.Model, save: Callable[[], None]):
        self._save = save
        # Besides metrics, a validation changes the states of random generators.
        seeds = [v for v in model.non_trainable_variables if v.name == "seed_generator_state"]
        if kp.seed_state() is not None:
            seeds.append(kp.global_seed_generator().state)
        self._seeds = _values(seeds)

    def max_steps(self) -> None:
        """Any number."""

    def steps_done(
        self, steps: int, logs: Logs, *, epoch_ends: bool, stopped: bool, told: bool
    ) -> None:
        """Ends at a signal, unless the validation has ended, too."""
        if told and not epoch_ends and not stopped:
            _assign(self._seeds)
            self._save()
            raise SystemExit(PREEMPTED)


def _values(variables: Iterable[keras.Variable]) -> _Values:
    return [(variable, whole_value(variable)) for variable in variables]


def _assign(values: _Values) -> None:
    for variable, value in values:
        assign_whole(variable, value)


def _is_finite(logs: Logs) -> bool:
    return bool(np.all(np.isfinite(logs.get("loss", 0.0))))


def _read_past(data: Epochs, epochs: int) -> None:
    """Reads what earlier epochs have used, as they did: the order may depend on the reading."""
    for _ in range(epochs):
        with data.next() as epoch:
            if not isinstance(epoch.iterator, Iterator):
                return  # workers that read for themselves keep no common order
            steps = 0
            while epoch.steps is None or steps < epoch.steps:
                try:
                    next(epoch.iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                steps += 1
        data.is_done(epoch, steps, stopped=False)
