"""Which callbacks run on which task."""

from __future__ import annotations

import importlib.util
from typing import Any

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.chiefs_part import follow_chief
from tfdist_ext.training.protocols import Reduction

__all__ = [
    "check_tensorboard",
    "follow_chief_if_restored",
    "for_this_task",
    "looks_at_batches",
]

# They write files, or print: the chief alone does.
_WRITING_CALLBACKS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def for_this_task(callbacks: Any, *, is_chief: bool) -> list[keras.callbacks.Callback]:
    """The given callbacks that run on this task: all on the chief, elsewhere all but writers.

    What changes the training (EarlyStopping, schedules) runs everywhere: logs are the same on
    every task, so each decides the same.

    Raises:
        TrainingError: a callback writes for TensorBoard, which is not installed.
    """
    given = keras.tree.flatten(callbacks) if callbacks else []
    if is_chief:
        for callback in given:
            if isinstance(callback, keras.callbacks.TensorBoard):
                check_tensorboard(callback)
        return given
    kept = [callback for callback in given if not isinstance(callback, _WRITING_CALLBACKS)]
    for callback in kept:
        if getattr(callback, "verbose", 0):
            callback.verbose = 0
    return kept


def check_tensorboard(callback: keras.callbacks.Callback) -> None:
    """TensorFlow would say so after the first epoch, by an error that names no callback."""
    if importlib.util.find_spec("tensorboard") is None:
        raise TrainingError(
            f"{type(callback).__name__} needs the package tensorboard, which TensorFlow does not"
            ' bring: pip install tensorboard, or install this package as "tfdist_ext[tensorboard]".'
        )


def looks_at_batches(callbacks: Any, kind: str) -> bool:
    """Whether a callback wants to be called for each batch of `kind`: train, test or predict."""
    hooks = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    if kind == "train":
        hooks += ["on_batch_begin", "on_batch_end"]
    return any(
        _overrides(callback, hook)
        for callback in keras.tree.flatten(callbacks or [])
        if _by_batch(callback)
        for hook in hooks
    )


def follow_chief_if_restored(model: keras.Model, reduction: Reduction, callbacks: Any) -> None:
    """BackupAndRestore reads its files on the chief; the others take over what it read."""
    given = keras.tree.flatten(callbacks or [])
    restores = any(isinstance(c, keras.callbacks.BackupAndRestore) for c in given)
    if not reduction.multi_worker or not restores:
        return
    epoch = kp.restored_epoch(model)
    epoch = int(reduction.from_chief(-1 if epoch is None else epoch))
    if epoch < 0:
        return
    kp.set_restored_epoch(model, epoch)
    follow_chief(model, reduction)


def _by_batch(callback: keras.callbacks.Callback) -> bool:
    """False for Keras's own that define batch hooks but, as set up, do nothing in them."""
    if isinstance(callback, keras.callbacks.ProgbarLogger | keras.callbacks.History):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore):
        return callback.save_freq != "epoch"
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq != "epoch" or kp.traces_batches(callback)
    return True


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    method = getattr(callback, hook)
    default = getattr(keras.callbacks.Callback, hook)
    return getattr(method, "__func__", method) is not default
