"""Checkpoints of one `fit(checkpoint_dir=...)`: when to save, and where to resume.

A job that resumes gives the numbers of a training without a break.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist_ext.cluster.liveness import log_line
from tfdist_ext.data.epochs import Epochs
from tfdist_ext.errors import PeerError, TrainingError
from tfdist_ext.failures import preemption
from tfdist_ext.launcher.exit_codes import PREEMPTED, command_line, is_launched, is_started_again
from tfdist_ext.training._keras_private import step_variables
from tfdist_ext.training.agreement.equality import LOSS_AND_METRICS, compile_texts
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.callbacks.callback_state import (
    CallbackState,
    callback_state,
    continue_log_files,
    restore_callbacks,
)
from tfdist_ext.training.checkpoints.folder import CheckpointFolder, FolderTakenError
from tfdist_ext.training.checkpoints.format import Progress, differences
from tfdist_ext.training.checkpoints.saving import arrays_of, at_step, restore_checkpoint
from tfdist_ext.training.state import run_on_chief, snapshot, whole_slots
from tfdist_ext.training.steps.scope import Execution, Logs
from tfdist_ext.training.variables import optimizers_of
from tfdist_ext.user_frames import warn


class CheckpointManager:
    """The checkpoints of one `fit`.

    Every task makes the same calls, in this order: `seed`, `resume`, and in the scope of `training`
    first `training_has_begun`. In each epoch `epoch_has_begun`, around each execution `max_steps`
    and `steps_done`, then `epoch_ends`, `epoch_is_done` and `announce`. At the end
    `training_is_done`. Only the chief needs to see the folder.

    Args:
        folder: where checkpoints are, or will be.
        every: also save in the middle of an epoch, after each `every` of its global batches.
        epochs: of the whole training.
        in_background: write files in a thread.

    Attributes:
        progress: of the training.

    Raises:
        TrainingError: the folder cannot be read, or none of its checkpoints is complete.
    """

    def __init__(
        self,
        folder: str | Path,
        model: keras.Model,
        reduction: Reduction,
        every: int | None,
        epochs: int,
        in_background: bool,
    ):
        self._model = model
        self._reduction = reduction
        self._callbacks: Sequence[keras.callbacks.Callback] = ()  # those that run on this task
        self._data: Epochs  # since `resume`
        self._every = every
        self._epochs = epochs
        self.progress = Progress()
        self._unannounced = Progress()  # of a checkpoint that callbacks have not seen
        self._resumes_inside = False  # the training may begin in the middle of an epoch
        # Restores what callbacks may change before the first step of a job that resumes.
        self._restore: Callable[[], None] = lambda: None
        self._report_progress = functools.partial(reduction.peers.enters, "checkpoint")
        self._folder = CheckpointFolder(folder, self._report_progress, in_background=in_background)
        run_on_chief(reduction, self._folder.find_newest, f"read {folder}")

    def seed(self) -> int:
        """Returns the seed of the order of examples: of the job before, or a new one."""
        seed = self._reduction.seed(self._folder.progress.seed)
        self.progress = replace(self.progress, seed=seed)
        return seed

    def resume(
        self, data: Epochs, initial_epoch: int, callbacks: Sequence[keras.callbacks.Callback]
    ) -> int:
        """Restores the newest checkpoint and the position in the data, then takes the folder.

        A job that cannot train does not end the job that trains in this folder.

        Args:
            initial_epoch: the epoch to begin with if there is no checkpoint.
            callbacks: those that run on this task, and the history.

        Returns:
            The epoch to begin with.

        Raises:
            TrainingError: `checkpoint_every` is not possible; another loss; other data inside an
                epoch; the folder cannot be written.
        """
        first = self._restored_epoch(data, initial_epoch, callbacks)
        run_on_chief(self._reduction, self._folder.take, f"write to {self._folder.path}")
        return first

    def _restored_epoch(
        self, data: Epochs, initial_epoch: int, callbacks: Sequence[keras.callbacks.Callback]
    ) -> int:
        """Returns the epoch to begin with, after restoring the newest checkpoint."""
        self._data, self._resumes_inside = data, data.resumes_inside
        if self._every is not None and not self._resumes_inside:
            raise TrainingError(
                "checkpoint_every needs data that can resume inside an epoch: arrays,"
                " tfd.data.from_arrays((x, y), global_batch_size=64, seed=0) or from_tfrecords, or"
                " from_dataset_fn with a function that takes the epoch."
            )
        folder, model = self._folder, self._model
        self._callbacks = callbacks
        settings: dict[str, Any] = {**data.sizes, "shuffle": self.progress.seed != 0}
        settings |= compile_texts(model, LOSS_AND_METRICS)
        self.progress = replace(
            self.progress, epoch=initial_epoch, first_epoch=initial_epoch, settings=settings
        )
        if not self._reduction.any_worker(folder.newest is not None):
            return initial_epoch
        path = folder.newest or folder.path
        rates = _learning_rates(model)
        progress, state = restore_checkpoint(model, self._reduction, path)
        changes = differences(progress.settings, settings)
        self._check_can_resume(path, progress, changes)
        progress = replace(progress, seed=self.progress.seed, settings=settings)
        self.progress = self._unannounced = progress
        self._restore = _restoring(model, state, callbacks)
        continue_log_files(state, callbacks)
        is_done = progress.stopped or progress.epoch >= self._epochs
        if self._reduction.is_chief:
            complete = f"training in {folder.path} is complete after {progress}; nothing to do"
            restored = differences(rates, _learning_rates(model))
            changes += [f"{change}, as in the checkpoint" for change in restored]
            resumes = "; ".join([f"resuming after {progress}, from {path}", *changes])
            log_line(complete if is_done else resumes)
        epochs = progress.epoch - progress.first_epoch
        report = self._report_progress
        data.resume(epochs, progress.batches, progress.data, reads=not is_done, report=report)
        return max(self._epochs, progress.epoch) if is_done else progress.epoch

    def _check_can_resume(self, path: str, progress: Progress, changes: list[str]) -> None:
        """Raises TrainingError for another loss, or for other data inside an epoch."""
        if of_loss := [change for change in changes if change.split()[0] in LOSS_AND_METRICS]:
            raise TrainingError(
                f"{path} belongs to a training with another loss or other metrics:"
                f" {', '.join(of_loss)}. Compile the model as before, or use another"
                " checkpoint_dir. To train these weights with another loss, call"
                " restore_checkpoint(path) before fit(checkpoint_dir=...) with a new folder."
            )
        if progress.batches and (changes or not self._resumes_inside):
            raise TrainingError(
                f"The checkpoint is in the middle of an epoch, at {progress}, where this job cannot"
                f" resume: {', '.join(changes) or 'this data begins with an epoch'}. Use the same"
                " data and arguments to the end of the epoch, or another checkpoint_dir."
            )

    def training_has_begun(self) -> None:
        """After `on_train_begin`: restores callbacks, and what they may have changed.

        The restored checkpoint is announced: the job before may have ended too early.
        """
        self._restore()
        self.announce()

    def epoch_has_begun(self) -> None:
        """After `on_epoch_begin`: undoes it in an epoch that callbacks have begun before."""
        if self.progress.batches:
            self._restore()
        self._restore = lambda: None

    def announce(self) -> None:
        """Calls `on_checkpoint_end` when the checkpoint of the last epoch is on disk."""
        progress, self._unannounced = self._unannounced, Progress()
        if not progress.epoch or progress.batches:
            return
        hooks = [getattr(callback, "on_checkpoint_end", None) for callback in self._callbacks]
        with self._reduction.peers.barrier(f"epoch {progress.epoch}, checkpoint"):
            has_hooks = self._reduction.any_worker(any(hooks))  # one may be on the chief only
        if not has_hooks:
            return
        self._run_on_chief(CheckpointFolder.wait)
        newest = self._folder.newest
        path = newest if newest is None or "://" in newest else Path(newest)
        for hook in filter(None, hooks):
            hook(progress.epoch - 1, path)

    def max_steps(self) -> int | None:
        """Returns the number of steps up to the next checkpoint; None: any number."""
        return None if self._every is None else self._every - self.progress.batches % self._every

    def steps_done(self, execution: Execution, *, epoch_ends: bool, stopped: bool) -> None:
        """Saves after each `every` global batches, and at a signal.

        Args:
            stopped: a callback has stopped the training.

        Raises:
            SystemExit: a task has received SIGTERM, and the epoch is not done.
        """
        if self._resumes_inside:
            batches = self.progress.batches + execution.steps
            self.progress = replace(self.progress, batches=batches)
        if epoch_ends:  # it is saved after its callbacks
            return
        due = self._every is not None and self.progress.batches % self._every == 0
        stop_requested = execution.stop_requested
        if (due or stop_requested) and self._resumes_inside and _is_finite(execution.logs):
            self._save(replace(self.progress, stopped=stopped))
        if stop_requested:
            raise preemption(PREEMPTED)

    def epoch_ends(self, epoch: int) -> Progress:
        """Returns the progress after an epoch, before `on_epoch_end`."""
        data = self._data.state()
        self.progress = replace(self.progress, epoch=epoch + 1, batches=0, data=data)
        return self.progress

    def epoch_is_done(self, epoch: int, logs: Logs, *, stopped: bool) -> None:
        """Saves after an epoch, unless its loss is not finite.

        Args:
            stopped: a callback has stopped the training, maybe in the middle of the epoch.
        """
        if _is_finite(logs):
            self._save(replace(self.progress, stopped=stopped))
        elif self._reduction.is_chief:
            warn(
                f"the loss of epoch {epoch + 1} is {logs['loss']}: no checkpoint is written, and"
                f" the checkpoints in {self._folder.path} stay. To end such a training, pass the"
                " callback keras.callbacks.TerminateOnNaN()."
            )

    def training_is_done(self) -> None:
        """Notes in the folder that the training has completed."""
        self._run_on_chief(lambda folder: folder.finish(self._epochs))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Scope of the training, which saves before a signal ends it.

        If it fails or is ended, the chief prints how to resume it.
        """
        with self._reduction.peers.ends_at_a_step():
            try:
                yield
            except FolderTakenError:  # its message says what to do
                raise
            except BaseException as error:
                self._report(error)
                raise
            finally:
                self._folder.close()

    def _report(self, error: BaseException) -> None:
        """Waits for the last file after an error, and says how to resume the training."""
        folder = self._folder
        try:
            folder.wait()
        except Exception as failure:
            log_line(
                f"the last checkpoint could not be written: {type(failure).__name__}: {failure}"
            )
        hint = f"Checkpoints go to {folder.path} on the chief."
        if folder.newest is not None:
            hint = f"The last checkpoint is {folder.newest}, after {folder.progress}."
            if not is_started_again():
                line = command_line() or "fit() with the same arguments"
                by_hand = self._reduction.multi_worker and not is_launched()
                where = " on every machine" if by_hand else ""
                hint = f"{hint} To resume, run again{where}: {line}"
        if isinstance(error, PeerError) and hint not in str(error):
            error.args = (f"{error} {hint}",)
        if self._reduction.is_chief:
            is_signal = isinstance(error, SystemExit) and error.code == PREEMPTED
            reason = "a signal" if is_signal else type(error).__name__
            # A progress bar may have left its line open.
            log_line(f"\ntraining stopped by {reason}. {hint}")

    def _save(self, progress: Progress) -> None:
        """Begins to write a checkpoint; every task must call."""
        progress = at_step(replace(progress, data=self._data.state()), self._model)
        self.progress = self._unannounced = progress

        def begin(folder: CheckpointFolder) -> None:
            folder.begin(progress, arrays_of(self._model, callback_state(self._callbacks)))

        with whole_slots(self._reduction, self._model):
            self._run_on_chief(begin)

    def _run_on_chief(self, action: Callable[[CheckpointFolder], None]) -> None:
        folder = self._folder
        run_on_chief(self._reduction, lambda: action(folder), f"write to {folder.path}")


def _restoring(
    model: keras.Model, state: CallbackState, callbacks: Sequence[keras.callbacks.Callback]
) -> Callable[[], None]:
    """Returns a function that restores callbacks, and the numbers that callbacks may change."""
    optimizers = optimizers_of(model).values()
    numbers = [v for optimizer in optimizers for v in optimizer.variables if not tuple(v.shape)]
    restore_numbers = snapshot([*numbers, *model.metrics_variables])

    def restore() -> None:
        restore_numbers()
        restore_callbacks(state, callbacks)

    return restore


def _learning_rates(model: keras.Model) -> dict[str, str]:
    rates = {name: step_variables(optimizer)[1] for name, optimizer in optimizers_of(model).items()}
    return {f"{n}.learning_rate": f"{float(r):.6g}" for n, r in rates.items() if r is not None}


def _is_finite(logs: Logs) -> bool:
    return bool(np.all(np.isfinite(logs.get("loss", 0.0))))
