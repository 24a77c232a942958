"""fit(checkpoint_dir=...): saved after each epoch, continued by the next job as if never ended."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.chiefs_part import done_by_chief
from tfdist_ext.training.epochs import Epochs
from tfdist_ext.training.global_batches import GlobalBatches
from tfdist_ext.training.reduction import Reduction
from tfdist_ext.training.saving.checkpoint_index import Index, Progress
from tfdist_ext.training.saving.checkpoints import restore_checkpoint, save_checkpoint
from tfdist_ext.training.saving.complete_files import local_path

__all__ = ["Resumable"]


class Resumable:
    """The checkpoints of one `fit`; without a folder it does nothing.

    Every task makes the same calls. The folder is the chief's: the others need not see it.

    Args:
        folder: where checkpoints are, or will be.
        data: what is trained on, where it keeps a position: that is part of the checkpoints.
        every: also a checkpoint after so many global batches, in the middle of an epoch.

    Raises:
        TrainingError: another callback restores the model too, the folder's index is broken, the
            folder is the address of an object store, or `every` is no number from 1, or for data
            without a position.
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | Path | None,
        model: keras.Model,
        reduction: Reduction,
        callbacks: Any,
        data: ShardedDataset | None = None,
        every: int | None = None,
    ):
        self._folder = None if folder is None else local_path(folder)
        self._model = model
        self._reduction = reduction
        self._progress = Progress()
        self._index = Index()  # the chief's; empty elsewhere
        self._was_done = False
        self._data = data
        self._every = every
        self._in_epoch = 0  # global batches of the current epoch that are done
        self._since = 0  # global batches since the last checkpoint
        self._check_every()
        if self._folder is None:
            return
        given = keras.tree.flatten(callbacks or [])
        if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in given):
            raise TrainingError(
                "both checkpoint_dir and the callback BackupAndRestore would restore the model:"
                " give one of them."
            )
        done_by_chief(reduction, self._open, f"open the checkpoints in {folder}")

    def seed(self) -> int:
        """Where the order of examples starts on all tasks: as in the job before, or anew.

        A new one comes from Python's generator, as Keras takes its seeds.
        """
        latest = next(reversed(self._index.checkpoints.values()), Progress())
        seed = latest.seed or random.randint(1, 2**31 - 1)
        self._progress = replace(self._progress, seed=int(self._reduction.from_chief(seed)))
        return self._progress.seed

    def resume(
        self, data: Epochs, feed: Callable[[Any], Any], initial_epoch: int, epochs: int
    ) -> int:
        """The epoch to begin with, model and data brought to where they were before it.

        Args:
            feed: what makes global batches the data set that `data` iterates over.
            initial_epoch: the epoch where there is nothing to go on from.
            epochs: of the whole training.
        """
        self._progress = replace(self._progress, epoch=initial_epoch, first_epoch=initial_epoch)
        if self._folder is None:
            return initial_epoch
        ended = self._index.epochs_when_done
        at_end = ended is not None and ended >= epochs and self._index.last_state is not None
        name = self._index.last_state if at_end else next(reversed(self._index.checkpoints), None)
        if not self._reduction.any_worker(name is not None):
            return initial_epoch
        self._progress = restore_checkpoint(
            self._model, self._reduction, self._folder / (name or "")
        )
        self._check_same_kind_of_data()
        self._was_done = self._reduction.any_worker(at_end)
        if self._was_done:
            if self._data is not None and self._progress.data:
                self._data.restore(json.loads(self._progress.data))
            return max(epochs, self._progress.epoch)
        self._index.epochs_when_done = None
        self._write_index()
        if self._data is not None and self._progress.data:
            self._data.restore(json.loads(self._progress.data))
            self._in_epoch = self._progress.batches
            data.begin_at_position(feed, behind=self._in_epoch)
            return self._progress.epoch
        done = self._progress.epoch - self._progress.first_epoch
        if self._data is not None:  # it was other data, without a position
            for _ in range(done):
                self._data.end_epoch()
            data.begin_at_position(feed, behind=0)
            return self._progress.epoch
        if not data.begin_after(done, feed):
            _read_past(data, done)
        return self._progress.epoch

    def watch(self, batches: GlobalBatches, asked: int | None) -> GlobalBatches:
        """The same batches, with a checkpoint whenever `every` of them are done.

        Args:
            asked: how many make an epoch, if not all of a pass.
        """
        of_data, every = self._data, self._every
        if of_data is None:
            return batches

        def done(steps: int, logs: dict[str, Any]) -> None:
            batches.done(steps, logs)
            self._since += steps
            self._in_epoch += steps
            # At the end of an epoch there is one anyway, when callbacks have seen it.
            behind = of_data.steps_behind
            at_end = behind in (0, batches.steps) or self._in_epoch == asked
            if every is not None and self._since >= every:
                self._since = 0
                if not at_end and _is_finite(logs):
                    self._progress = replace(self._progress, batches=self._in_epoch)
                    self._save_in_index()

        room = (lambda: None) if every is None else (lambda: every - self._since)
        return replace(batches, done=done, room=room)

    def epoch_is_done(self, epoch: int, logs: dict[str, Any], *, complete: bool) -> Progress:
        """Save what is there after an epoch, unless its loss says that the weights are lost.

        Args:
            complete: all of its global batches are done.
        """
        if complete or self._data is None:
            self._progress = replace(self._progress, epoch=epoch + 1, batches=0)
            self._in_epoch = 0
        else:  # told to stop in the middle
            done = self._in_epoch if self._data.resumes_inside_epochs else 0
            self._progress = replace(self._progress, epoch=epoch, batches=done)
        if self._folder is None:
            return self._progress
        if not _is_finite(logs):
            if self._reduction.is_chief:
                warnings.warn(
                    f"the loss of epoch {epoch + 1} is {logs['loss']}: no checkpoint is written,"
                    f" and those in {self._folder} stay.",
                    stacklevel=3,
                )
            return self._progress
        self._save_in_index()
        return self._progress

    def training_is_done(self, epochs: int, logs: dict[str, Any]) -> None:
        """Save the state at the end of `fit`, and say in the index that it is the end."""
        if self._folder is None or self._was_done:
            return
        self._index.last_state = None
        if _is_finite(logs):
            self._index.last_state = f"last-{self._progress.epoch:05d}.h5"
            self._save(self._index.last_state)
        self._index.epochs_when_done = epochs
        self._write_index()

    def _save_in_index(self) -> None:
        progress = self._progress
        middle = f"-batch-{progress.batches:08d}" if progress.batches else ""
        name = f"epoch-{progress.epoch:05d}{middle}.h5"
        self._index.checkpoints.pop(name, None)
        self._progress = self._save(name)
        self._index.checkpoints[name] = self._progress
        self._write_index()

    def _check_same_kind_of_data(self) -> None:
        if self._progress.batches and self._data is None:
            raise TrainingError(
                f"the checkpoint in {self._folder} is of the middle of an epoch: after"
                f" {self._progress.batches} global batches of a ShardedDataset, and other data"
                " arrived, which has no position. Go on with the data that was there."
            )

    def _check_every(self) -> None:
        every = self._every
        if every is None:
            return
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise TrainingError(f"checkpoint_every is 1 or more batches; {every!r} arrived.")
        if self._folder is None or self._data is None or not self._data.resumes_inside_epochs:
            raise TrainingError(
                "checkpoint_every needs checkpoint_dir, and data that knows its position in an"
                " epoch: of tfd.data.from_arrays((x, y), global_batch=64, seed=0) or"
                " from_tfrecords, or of from_dataset_fn where the function takes the epoch."
            )

    def _open(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._index = Index.read(self._folder)
        if removed := self._index.forget_removed(self._folder):
            warnings.warn(
                f"{self._folder} lacks {', '.join(removed)} of its index, and the training goes on"
                " from the files that are there.",
                stacklevel=3,
            )

    def _save(self, name: str) -> Progress:
        assert self._folder is not None
        data = "" if self._data is None else json.dumps(self._data.state())
        progress = replace(self._progress, data=data)
        return save_checkpoint(self._model, self._reduction, self._folder / name, progress)

    def _write_index(self) -> None:
        folder = self._folder
        assert folder is not None
        done_by_chief(self._reduction, lambda: self._index.write(folder), f"write to {folder}")


def _is_finite(logs: dict[str, Any]) -> bool:
    return math.isfinite(logs.get("loss", 0.0))


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
