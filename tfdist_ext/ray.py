"""Reports a training to Ray Train, if a `ray.train.tensorflow.TensorflowTrainer` runs it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.messages import optional_module
from tfdist_ext.user_frames import filter_traceback

#: The name of the file in a Ray checkpoint.
CHECKPOINT = "checkpoint.safetensors"


@filter_traceback
class ReportCallback(keras.callbacks.Callback):
    """Reports each epoch to Ray Train. Create it in the training function of the workers.

    Pass it to `fit` on all workers, because Ray waits until all workers have reported. A report
    contains the logs of the epoch, which are equal on all workers, and the number `epoch`, starting
    at 0. With `fit(checkpoint_dir=...)`, the chief adds the checkpoint of the epoch as a Ray
    checkpoint with one file, `tfd.ray.CHECKPOINT`, which `restore_checkpoint` reads. The training
    waits until Ray has copied the checkpoint to its storage.

    Raises:
        TrainingError: Ray is not installed, or this process is not a worker of a Ray trainer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._train = _ray_train()
        self._metrics: dict[str, Any] = {}
        self._is_due = False  # whether these metrics are to be reported

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._report_if_due()  # the last epoch had no checkpoint

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {name: np.asarray(value).tolist() for name, value in (logs or {}).items()}
        self._metrics, self._is_due = {**values, "epoch": epoch}, True

    def on_checkpoint_end(self, epoch: int, path: os.PathLike[str] | None) -> None:
        """Called by `fit` after it has saved the checkpoint of an epoch; path is None on others."""
        self._report_if_due(path)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._report_if_due()

    def get_state(self) -> dict[str, Any]:
        return self._metrics

    def set_state(self, state: dict[str, Any]) -> None:
        self._metrics = state
        # The last workers may have ended between a checkpoint and its report.
        latest = self._train.get_checkpoint()
        self._is_due = bool(state) and (latest is None or latest.get_metadata() != state)

    def _report_if_due(self, path: os.PathLike[str] | None = None) -> None:
        if not self._is_due:
            return
        self._is_due = False
        with contextlib.ExitStack() as stack:
            checkpoint = None
            if path is not None:
                folder = stack.enter_context(_folder_with(path))
                checkpoint = self._train.Checkpoint.from_directory(folder)
                checkpoint.set_metadata(self._metrics)
            self._train.report(dict(self._metrics), checkpoint=checkpoint)


@contextlib.contextmanager
def _folder_with(path: os.PathLike[str]) -> Iterator[str]:
    """A folder with only this file, as a link if possible."""
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        target = Path(folder, CHECKPOINT)
        try:
            os.link(path, target)
        except OSError:  # on another file system
            tf.io.gfile.copy(os.fspath(path), str(target))
        yield folder


def _ray_train() -> ModuleType:
    train = optional_module("ray.train", "ray[train]", "tfd.ray", error=TrainingError)
    try:
        train.get_context().get_world_rank()
    except RuntimeError as error:
        raise TrainingError(
            "ReportCallback can only be created in the function that a worker of a"
            f" TensorflowTrainer runs: {error} Outside Ray, remove it."
        ) from error
    return train
