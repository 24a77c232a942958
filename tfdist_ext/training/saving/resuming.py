"""fit(checkpoint_dir=...): saved after each epoch, continued by the next job as if never ended."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.chiefs_part import done_by_chief
from tfdist_ext.training.epochs import Epochs
from tfdist_ext.training.reduction import Reduction
from tfdist_ext.training.same_data import check_same_call
from tfdist_ext.training.saving.checkpoint_index import Index, Progress
from tfdist_ext.training.saving.checkpoints import restore_checkpoint, save_checkpoint
from tfdist_ext.training.saving.complete_files import local_path

__all__ = ["Resumable"]


class Resumable:
    """The checkpoints of one `fit`; without a folder it does nothing.

    Every task makes the same calls. The folder is the chief's: the others need not see it.

    Args:
        folder: where checkpoints are, or will be.

    Raises:
        TrainingError: another callback restores the model too, the folder's index is broken, or
            the folder is the address of an object store.
        OSError: the folder cannot be made.
    """

    def __init__(
        self, folder: str | Path | None, model: keras.Model, reduction: Reduction, callbacks: Any
    ):
        self._folder = None if folder is None else local_path(folder)
        self._model = model
        self._reduction = reduction
        self._progress = Progress()
        self._index = Index()  # the chief's; empty elsewhere
        self._was_done = False
        check_same_call(reduction, with_checkpoint_dir=self._folder is not None)
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
        self._progress = replace(self._progress, first_epoch=initial_epoch)
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
        self._was_done = self._reduction.any_worker(at_end)
        if self._was_done:
            return max(epochs, self._progress.epoch)
        self._index.epochs_when_done = None
        self._write_index()
        done = self._progress.epoch - self._progress.first_epoch
        if not data.begin_after(done, feed):
            _read_past(data, done)
        return self._progress.epoch

    def epoch_is_done(self, epoch: int, logs: dict[str, Any]) -> Progress:
        """Save what is there after an epoch, unless its loss says that the weights are lost."""
        self._progress = replace(self._progress, epoch=epoch + 1)
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
        name = f"epoch-{epoch + 1:05d}.h5"
        self._index.checkpoints.pop(name, None)
        self._progress = self._save(name)
        self._index.checkpoints[name] = self._progress
        self._write_index()
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
        return save_checkpoint(self._model, self._reduction, self._folder / name, self._progress)

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
        if epoch.steps is None or steps < epoch.steps:
            data.ended_after(steps)
