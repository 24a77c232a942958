"""Checkpoints of one `fit(checkpoint_dir=...)`: when to save, and where to resume.

A job that resumes gives the numbers of a training without a break.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

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
from tfdist_ext.training.checkpoints.saving import at_step, content_of, restore_checkpoint
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
        self._data = data
        self._every = every
        self._epochs = epochs
        self._progress = Progress()
        self._unannounced: Progress | None = None  # callbacks have not seen this checkpoint
        self._is_complete = False  # the training was done before
        self._resumes_inside = False  # the training may begin in the middle of an epoch
        self._since = 0  # global batches since the last checkpoint
        # From the checkpoint that was restored, until its epoch has begun:
        self._callback_state = CallbackState()
        self._rates_and_metrics: _Values = []
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        self._callbacks = keras.tree.flatten(callbacks or [])
        self._announces = False
        if self._files is None:
            return
        self._writer = Writer(
            self._files.write,
            functools.partial(reduction.peers.enters, "checkpoint"),
            in_background=in_background,
        )
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in self._callbacks):
            raise TrainingError(
                "Both checkpoint_dir and the callback BackupAndRestore would restore the model:"
                " give one of them."
            )
        opened = functools.partial(self._files.open, epochs)
        run_on_chief(reduction, opened, f"open {self._files.path}")
        # A callback may be on the chief only, and all tasks wait for the file.
        self._announces = reduction.any_worker(bool(_with_hook(self._callbacks)))

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
        """Checks, before the model is built, whether `checkpoint_every` is possible.

        Raises:
            TrainingError: `every` is not a number from 1, or the data has no position.
        """
        if self._data is None:
            self._resumes_inside = data.can_begin_anywhere
            self._progress = replace(self._progress, batch_size=data.batch_size or 0)
        else:
            self._resumes_inside = self._data.resumes_inside_epochs
        every = self._every
        if every is None:
            return
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise TrainingError(f"checkpoint_every must be 1 or more batches, got {every!r}.")
        if self._files is None or not self._resumes_inside:
            raise TrainingError(
                "checkpoint_every needs checkpoint_dir, and data that knows its position in an"
                " epoch: arrays, tfd.data.from_arrays((x, y), global_batch_size=64, seed=0) or"
                " from_tfrecords, or from_dataset_fn where the function takes the epoch."
            )

    def resume(self, data: Epochs, initial_epoch: int) -> int:
        """Restores the newest checkpoint and the position in the data.

        Args:
            initial_epoch: the epoch to begin with if there is no checkpoint.

        Returns:
            The epoch to begin with.
        """
        self._progress = replace(self._progress, epoch=initial_epoch, first_epoch=initial_epoch)
        files, model = self._files, self._model
        if files is None or not self._reduction.any_worker(files.newest is not None):
            return initial_epoch
        path = files.file(files.newest or "")
        progress, self._callback_state = restore_checkpoint(
            model, self._reduction, path, verified=True
        )
        self._check_same_data(progress)
        self._progress = self._unannounced = replace(progress, batch_size=self._progress.batch_size)
        self._rates_and_metrics = _values([*_rates_of(model), *model.metrics_variables])
        self._is_complete = self._reduction.any_worker(files.complete_after is not None)
        if self._reduction.is_chief:
            say(self._resume_message(path))
        done = progress.epoch - progress.first_epoch
        if self._data is not None and progress.data is not None:
            self._data.restore(progress.data)
        elif self._data is not None and not self._is_complete:  # the job before had other data
            for _ in range(done):
                self._data.end_epoch()
        if self._is_complete:
            return max(self._epochs, progress.epoch)
        if self._reduction.is_chief:
            continue_log_files(self._callback_state, self._callbacks)
        if self._data is not None:
            data.begin_at_position(completed=progress.batches)
        elif not data.begin_after(done, completed=progress.batches):
            _read_past(data, done)
        return progress.epoch - (progress.trained is not None)

    def _check_same_data(self, saved: Progress) -> None:
        """Raises TrainingError if this data cannot begin in the middle of the saved epoch."""
        size = self._progress.batch_size
        if not saved.batches or (self._resumes_inside and saved.batch_size == size):
            return

        def described(size: int) -> str:
            return f"arrays with a batch size of {size}" if size else "a ShardedDataset"

        got = described(size) if self._resumes_inside else "data that has no position"
        raise TrainingError(
            f"The checkpoint is in the middle of an epoch, at {saved}. It continues with"
            f" {described(saved.batch_size)}, got {got}. Use the same data to the end of the epoch,"
            " or another checkpoint_dir."
        )

    def restore_callbacks(self) -> bool:
        """After `on_train_begin`: restores callbacks; returns whether one stopped the training."""
        if not self._callback_state:
            return False
        _assign(self._rates_and_metrics)
        return restore_callbacks(self._callback_state, self._with_history)

    def epoch_has_begun(self) -> None:
        """After `on_epoch_begin`: undoes it in an epoch that callbacks have begun before."""
        if self._progress.batches or self._progress.trained is not None:
            self.restore_callbacks()
        self._callback_state = CallbackState()

    def announce(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Calls `on_checkpoint_end` for the checkpoint of the last epoch, when it is on disk.

        A restored checkpoint is announced too: the job before may have ended too early.
        """
        if not self._announces:
            return
        assert self._files is not None
        self._run_on_chief(self._writer.wait)
        progress, self._unannounced = self._unannounced, None
        if progress is None or progress.batches or progress.trained or not progress.epoch:
            return  # not of a whole epoch
        path = finished_checkpoints(self._files.path)[-1] if self._reduction.is_chief else None
        for callback in _with_hook(callbacks):
            callback.on_checkpoint_end(progress.epoch - 1, path)

    def trained(self) -> Logs | None:
        """Returns the logs of the epoch's training, if the job before ended in its validation."""
        logs, self._progress = self._progress.trained, replace(self._progress, trained=None)
        if logs is None:
            return None
        return {k: v if isinstance(v, float) else np.asarray(v) for k, v in logs.items()}

    def validation(self, epoch: int, logs: Logs, *, complete: bool) -> StepListener | None:
        """Returns a listener that lets a signal end a validation; None if it must not end.

        Args:
            logs: of the epoch's training.
            complete: all global batches of the epoch are done.
        """
        may_end = self._files is not None and complete and not self._model.stop_training
        if not may_end or not _is_finite(logs):
            return None
        end = functools.partial(self._end_before_validation, epoch, logs)
        return _ValidationListener(self._model, end)

    def _end_before_validation(self, epoch: int, logs: Logs) -> NoReturn:
        trained = {name: np.asarray(value).tolist() for name, value in logs.items()}
        self._progress = replace(self._progress, epoch=epoch + 1, batches=0, trained=trained)
        self._save()
        raise SystemExit(PREEMPTED)

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
        # The end of an epoch is saved anyway, after its callbacks.
        at_end = self._data is not None and self._resumes_inside and not self._data.steps_done
        if epoch_ends or at_end:
            return
        if (due or told) and self._resumes_inside and _is_finite(logs):
            self._save(stopped=stopped)
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
            self._save(stopped=stopped)
        elif self._reduction.is_chief:
            warn(
                f"the loss of epoch {epoch + 1} is {logs['loss']}: no checkpoint is written,"
                f" and those in {self._files.path} stay."
            )
        return self._progress

    def training_is_done(self, logs: Logs) -> None:
        """Notes in the folder that the training has completed."""
        if self._files is None or self._is_complete:
            return
        self._run_on_chief(self._writer.wait)
        saved = _is_finite(logs)
        self._run_on_chief(functools.partial(self._files.finish, self._epochs, saved=saved))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Scope of the training, which saves before a signal ends it.

        If it fails or is ended, the chief prints how to resume it.
        """
        saves = self._files is not None
        ends = self._reduction.peers.ends_at_a_step if saves else contextlib.nullcontext
        try:
            with ends():
                yield
            if saves:
                self._writer.wait()
        except FolderTakenError:  # its message says what to do
            raise
        except BaseException as error:
            self._report(error)
            raise
        finally:
            if saves:
                self._writer.close()

    def _report(self, error: BaseException) -> None:
        """Waits for the last file after an error, and says how to resume the training."""
        if self._files is not None:
            try:
                self._writer.wait()
            except Exception as failure:
                name = type(failure).__name__
                say(f"the last checkpoint could not be written: {name}: {failure}")
        hint = self.resume_hint()
        if isinstance(error, PeerError) and hint not in str(error):
            error.args = (f"{error} {hint}",)
        if self._files is not None and self._reduction.is_chief:
            is_signal = isinstance(error, SystemExit) and error.code == PREEMPTED
            reason = "a signal" if is_signal else type(error).__name__
            # A progress bar may have left its line open.
            say(f"\ntraining stopped by {reason}. {hint}")

    def resume_hint(self) -> str:
        """Returns the last checkpoint, and the command that resumes from it, if one is needed."""
        files = self._files
        if files is None:
            return "There is no checkpoint: fit() was called without checkpoint_dir."
        if not self._reduction.is_chief:
            sentence = f"Checkpoints are in {files.path} on the chief."
        elif files.newest is None:
            return f"There is no checkpoint in {files.path} yet."
        else:
            sentence = f"The last checkpoint is {files.file(files.newest)}, after {files.progress}."
        if is_started_again():
            return sentence
        line = command_line()
        run = "call fit() again with the same arguments" if line is None else f"run again: {line}"
        return f"{sentence} To resume, {run}"

    def _save(self, *, stopped: bool = False) -> None:
        """Begins to write a checkpoint; every task must call.

        Args:
            stopped: a callback has told the training to stop.
        """
        data = None if self._data is None else self._data.state()
        progress = at_step(replace(self._progress, data=data), self._model)
        self._progress = self._unannounced = progress

        def begin() -> None:
            state = callback_state(self._with_history, stopped=stopped)
            self._writer.begin(content_of(self._model, progress, state))

        self._run_on_chief(begin)

    def _resume_message(self, path: str) -> str:
        progress, files = self._progress, self._files
        assert files is not None
        if self._is_complete:
            done = files.complete_after
            return f"training in {files.path} is complete after {done} epochs; nothing to do"
        if progress.trained is not None:
            return f"resuming with the validation of epoch {progress.epoch}, of {path}"
        batch = f", batch {progress.batches + 1}" if progress.batches else ""
        return f"resuming from epoch {progress.epoch + 1}{batch}, step {progress.step}, of {path}"

    @property
    def _with_history(self) -> list[keras.callbacks.Callback]:
        return [*self._callbacks, self._model.history]

    def _run_on_chief(self, action: Callable[[], None]) -> None:
        assert self._files is not None
        run_on_chief(self._reduction, action, f"write to {self._files.path}")


class _ValidationListener:
    """Lets a signal end a validation; the next job begins it again.

    Args:
        end: saves, and ends this job.
    """

    def __init__(self, model: keras.Model, end: Callable[[], NoReturn]):
        self._end = end
        # Besides metrics, a validation changes the states of random generators.
        self._states = _values(
            each for each in model.non_trainable_variables if each.name == "seed_generator_state"
        )
        self._seeds = kp.seed_state()

    def max_steps(self) -> None:
        """Any number."""

    def steps_done(
        self, steps: int, logs: Logs, *, epoch_ends: bool, stopped: bool, told: bool
    ) -> None:
        """Ends at a signal, unless the validation has ended, too."""
        if not told or epoch_ends or stopped:
            return
        _assign(self._states)
        if self._seeds is not None:
            kp.global_seed_generator().state.assign(self._seeds)
        self._end()


def _values(variables: Iterable[keras.Variable]) -> _Values:
    return [(variable, whole_value(variable)) for variable in variables]


def _assign(values: _Values) -> None:
    for variable, value in values:
        assign_whole(variable, value)


def _with_hook(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    return [each for each in callbacks if hasattr(each, "on_checkpoint_end")]


def _rates_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the learning rates that are variables."""
    rates = [
        kp.step_variables(optimizer)[1]
        for optimizer in optimizers_of(model).values()
        if isinstance(optimizer, keras.optimizers.Optimizer)
    ]
    return [rate for rate in rates if rate is not None]


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
