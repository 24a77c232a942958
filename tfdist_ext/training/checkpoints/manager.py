"""fit(checkpoint_dir=...): saved after each epoch, continued by the next job as if never ended."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.cluster.liveness.reports import say
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import PeerError, TrainingError
from tfdist_ext.launch.command_line import LAST_CHECKPOINT, command_line, is_started_again
from tfdist_ext.launch.exit_codes import PREEMPTED
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.checkpoints.atomic_write import AnyPath, checkpoint_folder
from tfdist_ext.training.checkpoints.chief import run_on_chief
from tfdist_ext.training.checkpoints.file import assign_whole, whole_value
from tfdist_ext.training.checkpoints.folder import (
    LAST,
    CheckpointFolder,
    FolderTakenError,
    Progress,
)
from tfdist_ext.training.checkpoints.saving import (
    BackgroundWriter,
    restore_checkpoint,
    save_checkpoint,
)
from tfdist_ext.training.checkpoints.state import (
    CallbackState,
    callback_state,
    continue_log_files,
    restore_callbacks,
)
from tfdist_ext.training.protocols import Callbacks, Logs, Reduction, StepListener
from tfdist_ext.training.variables import optimizers_of, with_inner_optimizers
from tfdist_ext.user_frames import warn

if TYPE_CHECKING:
    from tfdist_ext.training.loop import Epochs

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """The checkpoints of one `fit`; without a folder it does nothing.

    Every task makes the same calls. The folder is the chief's: the others need not see it.

    Args:
        folder: where checkpoints are, or will be.
        data: what is trained on, where it keeps a position: that is part of the checkpoints.
        every: also a checkpoint after so many global batches, in the middle of an epoch.
        epochs: of the whole training.

    Raises:
        TrainingError: another callback restores the model too; no checkpoint in the folder can be
            read, or none be written there; the folder is no path, a file, or the address of an
            object store; or `every` is no number from 1, or for data without a position.
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
        # Opened on the chief alone.
        self._files = None if folder is None else CheckpointFolder(checkpoint_folder(folder))
        self._model = model
        self._reduction = reduction
        self._progress = Progress()
        self._latest: tuple[str, Progress] | None = None  # file, without a name where not the chief
        self._begun: Progress | None = None  # of the file that is being written
        self._writer: BackgroundWriter | None = None
        self._was_done = False
        self._data = data
        self._inside = False  # whether the training may begin in the middle of an epoch
        self._every = every
        self._epochs = epochs
        self._batch_size = 0  # of arrays
        self._in_epoch = 0  # global batches of the current epoch that are done
        self._since = 0  # global batches since the last checkpoint
        self._known = CallbackState()  # what callbacks knew in the checkpoint that was restored
        self._rates: list[tuple[keras.Variable, np.ndarray]] = []  # in that checkpoint
        self._metrics: list[tuple[keras.Variable, np.ndarray]] = []
        self._stopped = False  # one of them has told the training to stop
        self._saved = -1  # epochs that are done in the checkpoint that this fit has written last
        self._announces = False  # a callback wants to know of each checkpoint
        self._announced: tuple[str, Progress] | None = None
        if data is not None:
            self._check_every(data.resumes_inside_epochs)
        if self._files is None:
            return
        if in_background:
            self._writer = BackgroundWriter(lambda: reduction.peers.enters("checkpoint"))
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        self._callbacks = keras.tree.flatten(callbacks or [])
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in self._callbacks):
            raise TrainingError(
                "one of checkpoint_dir and the callback BackupAndRestore must restore the model,"
                " got both: give one of them."
            )
        opened = functools.partial(self._files.open, epochs)
        run_on_chief(reduction, opened, f"open {self._files.path}")
        # A callback may be on the chief alone; all of them wait for the file.
        self._announces = reduction.any_worker(bool(_with_hook(self._callbacks)))

    @property
    def folder(self) -> str:
        """Where the checkpoints are; "" where there are to be none."""
        return "" if self._files is None else str(self._files.path.absolute())

    def seed(self) -> int:
        """The seed of the order of examples on all tasks: that of the job before, or a new one.

        A new one comes from Python's generator, as Keras takes its seeds.
        """
        checkpoints = {} if self._files is None else self._files.index.checkpoints
        latest = next(reversed(checkpoints.values()), Progress())
        drawn = random.randint(1, 2**31 - 1)  # also where it is not needed: the next fit draws, too
        seed = latest.seed or drawn
        self._progress = replace(self._progress, seed=int(self._reduction.from_chief(seed)))
        return self._progress.seed

    def check_position(self, data: Epochs) -> None:
        """Before the model is built: whether it can be saved in the middle of an epoch."""
        if self._data is None:
            self._check_every(data.can_begin_anywhere)
            self._batch_size = data.batch_size or 0

    def _check_every(self, inside: bool) -> None:
        self._inside = inside
        every = self._every
        if every is None:
            return
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise TrainingError(f"checkpoint_every must be 1 or more batches, got {every!r}.")
        if self._files is None or not inside:
            raise TrainingError(
                "checkpoint_every needs checkpoint_dir, and data that knows its position in an"
                " epoch: arrays, tfd.data.from_arrays((x, y), global_batch_size=64, seed=0) or"
                " from_tfrecords, or from_dataset_fn where the function takes the epoch."
            )

    def resume(self, data: Epochs, initial_epoch: int) -> int:
        """The epoch to begin with, model and data brought to where they were before it.

        Args:
            initial_epoch: the epoch where there is nothing to resume from.
        """
        self._progress = replace(
            self._progress,
            epoch=initial_epoch,
            first_epoch=initial_epoch,
            batch_size=self._batch_size,
        )
        if self._files is None:
            return initial_epoch
        index = self._files.index
        last = self._files.last_state(self._epochs)
        name = last or next(reversed(index.checkpoints), None)
        if not self._reduction.any_worker(name is not None):
            return initial_epoch
        path = self._files.path / (name or "")
        self._progress, self._known = restore_checkpoint(
            self._model, self._reduction, path, verified=True
        )
        self._rates, self._metrics = (
            [(variable, whole_value(variable)) for variable in variables]
            for variables in (_rates_of(self._model), self._model.metrics_variables)
        )
        self._latest = (name or "", self._progress)
        as_before = bool(self._progress.data) == (self._data is not None)
        if self._progress.batches and not (self._inside and as_before):
            raise TrainingError(
                "the data must be of the kind that the training began with, arrays or a"
                f" ShardedDataset, got other data: the checkpoint in"
                f" {self._files.path} is of the middle of an epoch, after"
                f" {self._progress.batches} global batches."
            )
        before = self._progress.batch_size
        if self._progress.batches and before and before != self._batch_size:
            raise TrainingError(
                f"the batch size must be {before} in the middle of an epoch, got"
                f" {self._batch_size}: the checkpoint in {self._files.path} is after"
                f" {self._progress.batches} global batches of that size. Go on with it to the end"
                " of the epoch, or with another checkpoint_dir."
            )
        self._progress = replace(self._progress, batch_size=self._batch_size)
        self._was_done = self._reduction.any_worker(last is not None)
        if self._reduction.is_chief:
            say(self._what_is_resumed(self._files, path))
        done = self._progress.epoch - self._progress.first_epoch
        if self._data is not None and self._progress.data:
            self._data.restore(json.loads(self._progress.data))
        elif self._data is not None and not self._was_done:  # it was other data
            for _ in range(done):
                self._data.end_epoch()
        if self._was_done:
            return max(self._epochs, self._progress.epoch)
        index.epochs_when_done = None
        self._by_chief(self._files.write_index)
        if self._reduction.is_chief:
            continue_log_files(self._known, self._callbacks)
        if self._data is not None:
            self._in_epoch = self._progress.batches if self._progress.data else 0
            data.begin_at_position(completed=self._in_epoch)
        elif data.begin_after(done, completed=self._progress.batches):
            self._in_epoch = self._progress.batches
        else:
            _read_past(data, done)
        return self._progress.epoch - bool(self._progress.trained)

    def trained(self) -> Logs | None:
        """The logs of the epoch's training, where the job before has ended in its validation."""
        text, self._progress = self._progress.trained, replace(self._progress, trained="")
        return {name: _as_log(value) for name, value in json.loads(text).items()} if text else None

    def validation(self, epoch: int, logs: Logs, *, complete: bool) -> StepListener | None:
        """The listener of an epoch's validation, which a signal may end; None where none may.

        Args:
            logs: of the epoch's training.
            complete: all of its global batches are done.
        """
        ends = self._files is not None and complete and not self._model.stop_training
        return _Validation(self, self._model, epoch, logs) if ends and _is_finite(logs) else None

    def ends_in_validation(self, epoch: int, logs: Logs) -> NoReturn:
        """Save what is there before an epoch's validation, for the job that does it.

        Raises:
            SystemExit: always.
        """
        text = json.dumps({name: np.asarray(value).tolist() for name, value in logs.items()})
        self._progress = replace(self._progress, epoch=epoch + 1, batches=0, trained=text)
        self._save_in_index()
        raise SystemExit(PREEMPTED)

    def restore_callbacks(self) -> bool:
        """After `on_train_begin`: give callbacks what they knew; whether one had said to stop."""
        if not self._known:
            return False
        self._put_back(metrics=False)
        return restore_callbacks(self._known, self._with_history)

    def announce(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Tell callbacks of the checkpoint of the last epoch, when it is on disk.

        Of the one that was restored, too: the job before may not have come to it.
        """
        if not self._announces:
            return
        if self._writer is not None:
            self._by_chief(self._writer.wait)
            self._is_written()
        if self._latest is None or self._latest == self._announced:
            return
        assert self._files is not None
        self._announced = self._latest
        name, progress = self._latest
        if progress.epoch and not progress.batches and not progress.trained:
            path = self._files.path / name if self._reduction.is_chief else None
            for callback in _with_hook(callbacks):
                callback.on_checkpoint_end(progress.epoch - 1, path)

    def epoch_has_begun(self) -> None:
        """After `on_epoch_begin`, which callbacks have seen before in an epoch that goes on."""
        if self._known and (self._progress.batches or self._progress.trained):
            self._put_back(metrics=True)
            restore_callbacks(self._known, self._with_history)
        self._known = CallbackState()

    def _put_back(self, *, metrics: bool) -> None:
        """Rates and metrics of the checkpoint: hooks that have run before have set others."""
        for variable, value in [*self._rates, *(self._metrics if metrics else ())]:
            assign_whole(variable, value)

    def max_steps(self) -> int | None:
        """How many global batches there may be before the next checkpoint; None: any number."""
        return None if self._every is None else self._every - self._since

    def steps_done(
        self, steps: int, logs: Logs, *, epoch_ends: bool, stopped: bool, told: bool
    ) -> None:
        """Write a checkpoint whenever `every` global batches more are done, and at a signal.

        Raises:
            SystemExit: `told`, a task has got a signal to end, and the epoch is not done.
        """
        self._stopped = stopped
        self._since += steps
        self._in_epoch += steps
        due = self._every is not None and self._since >= self._every
        if due:
            self._since = 0
        # At the end of an epoch there is one anyway, when callbacks have seen it.
        if epoch_ends or (self._data is not None and self._inside and not self._data.steps_done):
            return
        if (due or told) and self._inside and _is_finite(logs):
            self._progress = replace(self._progress, batches=self._in_epoch)
            self._save_in_index()
        if told:
            raise SystemExit(PREEMPTED)

    def epoch_is_done(self, epoch: int, logs: Logs, *, complete: bool, stopped: bool) -> Progress:
        """Save what is there after an epoch, unless its loss says that the weights are lost.

        Args:
            complete: all of its global batches are done.
            stopped: a callback has told the training to stop.
        """
        self._stopped = stopped
        if complete or self._data is None:
            self._progress = replace(self._progress, epoch=epoch + 1, batches=0)
            self._in_epoch = 0
        else:  # told to stop in the middle
            done = self._in_epoch if self._inside else 0
            self._progress = replace(self._progress, epoch=epoch, batches=done)
        if self._files is None:
            return self._progress
        if _is_finite(logs):
            self._save_in_index()
            self._saved = -1 if self._progress.batches else self._progress.epoch
        elif self._reduction.is_chief:
            warn(
                f"the loss of epoch {epoch + 1} is {logs['loss']}: no checkpoint is written,"
                f" and those in {self._files.path} stay."
            )
        return self._progress

    def training_is_done(self, logs: Logs) -> None:
        """Save the state at the end of `fit`, and say in the index that it is the end."""
        if self._files is None:
            return
        if self._was_done:  # what hooks make of its end, they had made of it before
            assert self._latest is not None
            path = self._files.path / self._latest[0]
            restore_checkpoint(self._model, self._reduction, path)
            return
        if self._writer is not None:
            self._by_chief(self._writer.wait)
            self._is_written()
        finite = _is_finite(logs)
        if finite:
            name = f"{LAST}{self._progress.epoch:05d}.h5"
            if not self._link_to_last_epoch(self._files, name):
                self._save(self._files, name, epochs_when_done=self._epochs)
        self._by_chief(functools.partial(self._files.add_last, self._epochs, written=finite))

    def resume_hint(self) -> str:
        """For a person: the last checkpoint, and the command that resumes from it, if needed."""
        if self._files is None:
            return "There is no checkpoint: fit() was called without checkpoint_dir."
        folder = self._files.path
        if self._latest is None:
            return f"There is no checkpoint in {folder} yet."
        name, progress = self._latest
        what = str(folder / name) if name else f"in {folder} on the chief"
        sentence = f"{LAST_CHECKPOINT} {what}, after {_completed(progress)}."
        if is_started_again():
            return sentence
        line = command_line()
        run = "call fit() again with the same arguments" if line is None else f"run again: {line}"
        return f"{sentence} To resume from it, {run}"

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Scope of the training, which saves before a signal ends it.

        Where it fails or is ended, the chief says how to resume it.
        """
        saves = self._files is not None
        ends = self._reduction.peers.ends_at_a_step if saves else contextlib.nullcontext
        try:
            with ends():
                yield
            self._end_writing()
        except FolderTakenError:  # which says what to do, and that is not to run it again
            raise
        except BaseException as error:
            self._end_writing(after=error)
            if isinstance(error, PeerError) and (hint := self.resume_hint()) not in str(error):
                error.args = (f"{error} {hint}",)
            if self._files is not None and self._reduction.is_chief:
                # After a line that a progress bar has not ended.
                told = isinstance(error, SystemExit) and error.code == PREEMPTED
                why = "a signal" if told else type(error).__name__
                say(f"\ntraining stopped by {why}. {self.resume_hint()}")
            raise
        finally:
            if self._writer is not None:
                self._writer.close()
            if self._files is not None:
                self._files.close()

    def _save_in_index(self) -> None:
        assert self._files is not None  # whoever calls has looked
        progress = self._progress
        middle = f"-batch-{progress.batches:08d}" if progress.batches else ""
        name = f"epoch-{progress.epoch:05d}{middle}.h5"
        self._progress = self._save(self._files, name, self._writer, self._add)
        self._is_written()  # the one before
        self._begun = self._progress
        if self._writer is None:
            self._is_written()

    def _add(self, progress: Progress) -> None:
        """On the chief: a checkpoint of an epoch is there."""
        assert self._files is not None
        self._files.add(progress)
        self._latest = self._files.written, progress

    def _is_written(self) -> None:
        """The checkpoint that was begun last is there; on the others, which hear no more of it."""
        if self._begun is not None and not self._reduction.is_chief:
            self._latest = "", self._begun
        self._begun = None

    def _end_writing(self, after: BaseException | None = None) -> None:
        """Wait for the file that is being written; what is wrong is said after another error."""
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except Exception as error:
            if after is None:
                raise
            say(f"the last checkpoint could not be written: {type(error).__name__}: {error}")
        self._is_written()

    def _link_to_last_epoch(self, files: CheckpointFolder, name: str) -> bool:
        """Call the checkpoint of the last epoch the state at the end, if it is; whether it was."""
        complete = self._saved == self._progress.epoch == self._epochs
        if self._reduction.any_worker(not complete or self._changes_at_end):
            return False
        linked: list[bool] = []
        self._by_chief(lambda: linked.append(files.link(name)))
        return not self._reduction.any_worker(self._reduction.is_chief and not linked[0])

    @property
    def _changes_at_end(self) -> bool:
        """Whether the state may be another one after the callbacks' `on_train_end`."""
        averages = any(
            getattr(each, "use_ema", False)
            for optimizer in optimizers_of(self._model).values()
            for each in with_inner_optimizers(optimizer)
        )
        return averages or any(map(_may_change_model, self._callbacks))

    def _what_is_resumed(self, files: CheckpointFolder, path: AnyPath) -> str:
        progress = self._progress
        if self._was_done:
            done = files.index.epochs_when_done
            return f"training in {files.path} is complete after {done} epochs; nothing to do"
        if progress.trained:
            return f"resuming with the validation of epoch {progress.epoch}, of {path}"
        batch = f", batch {progress.batches + 1}" if progress.batches else ""
        return f"resuming from epoch {progress.epoch + 1}{batch}, step {progress.step}, of {path}"

    def _save(
        self,
        files: CheckpointFolder,
        name: str,
        writer: BackgroundWriter | None = None,
        written: Callable[[Progress], object] = lambda progress: None,
        **attributes: int,
    ) -> Progress:
        data = "" if self._data is None else json.dumps(self._data.state())
        return save_checkpoint(
            self._model,
            self._reduction,
            files.path / name,
            replace(self._progress, data=data),
            place=files.new_file,
            attributes={**files.attributes, **attributes},
            callbacks=lambda: callback_state(self._with_history, stopped=self._stopped),
            writer=writer,
            written=written,
        )

    @property
    def _with_history(self) -> list[keras.callbacks.Callback]:
        return [*self._callbacks, self._model.history]

    def _by_chief(self, action: Callable[[], None]) -> None:
        assert self._files is not None
        run_on_chief(self._reduction, action, f"write to {self._files.path}")


class _Validation:
    """A listener that lets a signal end a validation; the next job begins it again.

    Args:
        manager: saves.
        epoch: that is validated.
        logs: of its training.
    """

    def __init__(self, manager: CheckpointManager, model: keras.Model, epoch: int, logs: Logs):
        self._manager = manager
        self._epoch = epoch
        self._logs = logs
        # What a validation changes besides metrics: it may draw random numbers.
        states = [each for each in model.non_trainable_variables if each.name == _SEED_STATE]
        self._states = [(variable, whole_value(variable)) for variable in states]
        self._seeds = kp.seed_state()

    def max_steps(self) -> None:
        """Any number."""

    def steps_done(
        self, steps: int, logs: Logs, *, epoch_ends: bool, stopped: bool, told: bool
    ) -> None:
        """End at a signal, unless the validation has ended, too."""
        if not told or epoch_ends or stopped:
            return
        for variable, value in self._states:
            assign_whole(variable, value)
        if self._seeds is not None:
            kp.global_seed_generator().state.assign(self._seeds)
        self._manager.ends_in_validation(self._epoch, self._logs)


_SEED_STATE = "seed_generator_state"  # of layers, as Keras names it


def _as_log(value: Any) -> Any:
    return value if isinstance(value, float) else np.asarray(value)


# The `on_train_end` of these callbacks does not change the model.
_ONLY_LOOK = (
    keras.callbacks.Callback,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)


def _may_change_model(callback: keras.callbacks.Callback) -> bool:
    if getattr(callback, "restore_best_weights", False):
        return True
    method = getattr(callback.on_train_end, "__func__", None)
    return method not in [kind.on_train_end for kind in _ONLY_LOOK]


def _with_hook(callbacks: Iterable[keras.callbacks.Callback]) -> list[Any]:
    """Those that are to be told of checkpoints."""
    return [each for each in callbacks if hasattr(each, "on_checkpoint_end")]


def _rates_of(model: keras.Model) -> list[keras.Variable]:
    """The learning rates that are variables."""
    rates = [
        kp.step_variables(optimizer)[1]
        for optimizer in optimizers_of(model).values()
        if isinstance(optimizer, keras.optimizers.Optimizer)
    ]
    return [rate for rate in rates if rate is not None]


def _completed(progress: Progress) -> str:
    if progress.batches:
        return f"batch {progress.batches} of epoch {progress.epoch + 1} (step {progress.step})"
    before = ", before its validation" if progress.trained else ""
    return f"epoch {progress.epoch}{before} (step {progress.step})"


def _is_finite(logs: Logs) -> bool:
    return bool(np.all(np.isfinite(logs.get("loss", 0.0))))


def _read_past(data: Epochs, epochs: int) -> None:
    """Read what the epochs before have used, as they did: the order may come from the reading."""
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
