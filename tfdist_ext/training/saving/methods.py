"""What a DistributedModel writes, and reads back. The chief does it, and the others wait."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras
import tensorflow as tf

from tfdist_ext.training.adopt import creation_scope
from tfdist_ext.training.chiefs_part import done_by_chief
from tfdist_ext.training.protocols import Reduction
from tfdist_ext.training.saving.checkpoints import Progress, restore_checkpoint, save_checkpoint
from tfdist_ext.training.saving.complete_files import local_path
from tfdist_ext.training.saving.exporting import export

__all__ = ["Saving", "on_every_worker"]

_Model = TypeVar("_Model", bound="Saving")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def on_every_worker(
    method: Callable[Concatenate[_Model, _Given], _Result],
) -> Callable[Concatenate[_Model, _Given], _Result]:
    """A public method that every worker must call: where one does not, the others say so."""

    @functools.wraps(method)
    def called(self: _Model, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self._reduction.call(method.__name__):
            return method(self, *args, **kwargs)

    return called


class Saving:
    """The saving methods of a `DistributedModel`. Every task of a cluster makes the same calls."""

    _model: keras.Model
    _strategy: tf.distribute.Strategy
    _reduction: Reduction
    _builder: Callable[[], keras.Model] | None
    _built_for: Any  # tf.TypeSpecs of a batch, once one was seen
    _progress: Progress

    @on_every_worker
    def save(self, filepath: str | Path, overwrite: bool = True, **kwargs: Any) -> None:
        """Write the model as `keras.Model.save` does; plain Keras loads it.

        Call it on every task: the chief writes, and all wait until the file is there.
        """
        done_by_chief(
            self._reduction,
            lambda: self._model.save(filepath, overwrite=overwrite, **kwargs),
            f"write {filepath}",
        )

    @on_every_worker
    def export(self, filepath: str | Path, **kwargs: Any) -> None:
        """Write a SavedModel as `keras.Model.export` does; `tf.saved_model.load` loads it.

        Call it on every task: the chief writes, and all wait until it is there. The chief needs
        memory for a copy of the model.

        Raises:
            TrainingError: a model without variables yet, or one that cannot be copied.
        """
        done_by_chief(
            self._reduction,
            lambda: export(self._model, str(filepath), self._builder, self._built_for, **kwargs),
            f"export to {filepath}",
        )

    @on_every_worker
    def save_checkpoint(self, path: str | Path) -> None:
        """Write all state to one file: weights, optimizer, metrics, random seeds, epoch, step.

        Call it on every task: the chief writes, and all wait until the file is there. It appears
        when it is complete. `restore_checkpoint` reads it on any strategy.

        Raises:
            TrainingError: a model without variables yet, or a path that is a folder or the
                address of an object store.
        """
        path = local_path(path)
        self._build_optimizer()
        self._progress = save_checkpoint(self._model, self._reduction, path, self._progress)

    @on_every_worker
    def restore_checkpoint(self, path: str | Path) -> Progress:
        """Take over the state in a file of `save_checkpoint`, whatever strategy it was saved on.

        Call it on every task: the chief reads, and the others take over what it has read. A model
        that is not compiled takes the weights alone.

        Returns:
            `.epoch`, the epochs that were done, for `fit(initial_epoch=...)`, and `.step`.

        Raises:
            TrainingError: on every task: no such file, no checkpoint or a part of one, a damaged
                one, or one of another model or another optimizer. Nothing is changed then.
        """
        path = local_path(path)
        self._build_optimizer()
        self._progress = restore_checkpoint(self._model, self._reduction, path)
        return self._progress

    def _build_optimizer(self) -> None:
        """Its slots, where no step has made them yet."""
        model = self._model
        optimizer = getattr(model, "optimizer", None)  # there is none before compile
        if model.built and optimizer is not None and not optimizer.built:
            with creation_scope(self._strategy):
                optimizer.build(model.trainable_variables)
