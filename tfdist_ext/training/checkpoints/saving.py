"""What a `DistributedModel` writes and reads: models, exports, checkpoints.

In a cluster the chief writes and reads, and sends its state to the others. So a folder on the
chief's own disk is enough, and no task can read another file than the others.
"""

from __future__ import annotations

import functools
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.pipelines import Specs
from tfdist_ext.errors import TrainingError
from tfdist_ext.training._keras_private import global_seed_generator, seed_state
from tfdist_ext.training.agreement.task_status import Reduction, on_every_worker
from tfdist_ext.training.building.build import (
    Builder,
    build_sharded_optimizers,
    creation_scope,
    export,
)
from tfdist_ext.training.callbacks.in_cluster import CallbackState
from tfdist_ext.training.checkpoints.format import (
    Arrays,
    CheckpointFile,
    Progress,
    encode_checkpoint,
    open_checkpoint,
    write_atomically,
)
from tfdist_ext.training.state import (
    METRICS,
    MODEL,
    RowsAssigner,
    blocks,
    broadcast_bytes,
    broadcast_state,
    check_has_variables,
    group_of,
    run_on_chief,
    state_of,
    whole_slots,
)
from tfdist_ext.training.variables import optimizers_of
from tfdist_ext.user_frames import filter_traceback

__all__ = ["SavingMixin", "arrays_of", "at_step", "restore_checkpoint"]

# The state of callbacks, and of the generator that draws without a seed.
_OTHERS, _SEEDS = "others", "seed_generator"

_SHOWN = 6  # variables that a message names


@filter_traceback
class SavingMixin:
    """The saving methods of a `DistributedModel`. Every task of a cluster makes the same calls."""

    _model: keras.Model
    _strategy: tf.distribute.Strategy
    _reduction: Reduction
    _builder: Builder
    _built_for: Specs  # tf.TypeSpecs of a batch, once one was seen
    _progress: Progress
    _created: list[tf.Variable]

    @on_every_worker
    def save(self, filepath: str | Path, overwrite: bool = True, **kwargs: Any) -> None:
        """Writes the model like `keras.Model.save`. Plain Keras can load it.

        Call it on every task. The chief writes the file, and the other tasks wait for it.
        """
        save = functools.partial(self._model.save, filepath, overwrite=overwrite, **kwargs)
        with whole_slots(self._reduction, self._model):
            run_on_chief(self._reduction, save, f"write {filepath}")

    @on_every_worker
    def export(self, filepath: str | Path, **kwargs: Any) -> None:
        """Writes a SavedModel like `keras.Model.export`, for `tf.saved_model.load`.

        Call it on every task. The chief writes the files, and the other tasks wait for them. The
        chief needs memory for a copy of the model.

        Raises:
            TrainingError: the model has no variables yet, or cannot be copied.
        """
        run_on_chief(
            self._reduction,
            lambda: export(self._model, str(filepath), self._builder, self._built_for, **kwargs),
            f"export to {filepath}",
        )

    @on_every_worker
    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint: weights, optimizer, metrics, random seeds, epoch and step.

        Call it on every task. The chief writes the file, and the other tasks wait for it. The file
        appears when it is complete. `restore_checkpoint` can read it on any strategy.

        Raises:
            TrainingError: the model has no variables yet, the path is a folder, or the file cannot
                be written.
        """
        self._complete_state("save_checkpoint")
        self._progress = at_step(self._progress, self._model)

        def write() -> None:
            if tf.io.gfile.isdir(path):
                raise TrainingError(
                    f"{path} is a folder, but a checkpoint is a file. Add a file name."
                )
            report = functools.partial(self._reduction.peers.enters, "checkpoint")
            content = encode_checkpoint(self._progress, arrays_of(self._model, {}), report)
            write_atomically(os.fspath(path), content)

        with whole_slots(self._reduction, self._model):
            run_on_chief(self._reduction, write, f"write the checkpoint {path}")

    @on_every_worker
    def restore_checkpoint(self, path: str | os.PathLike[str]) -> Progress:
        """Restores a checkpoint of `save_checkpoint` or `fit`, from any strategy.

        Call it on every task. The chief reads the file and sends the values to the other tasks. If
        the model is not compiled, only the weights are restored.

        Returns:
            The progress of the training. `.epoch` is the number of completed epochs, which you can
            pass as `fit(initial_epoch=...)`. `.step` is the number of completed steps.

        Raises:
            TrainingError: the file does not exist, is not a checkpoint, is incomplete or damaged,
                or belongs to another model or optimizer. All tasks raise the same error, and the
                model does not change.
        """
        self._complete_state("restore_checkpoint")
        self._progress, _ = restore_checkpoint(self._model, self._reduction, os.fspath(path))
        return self._progress

    @on_every_worker
    def load_weights(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Loads weights like `keras.Model.load_weights`. Only the chief needs the file.

        Call it on every task. The chief reads the file and sends the weights to the other tasks.
        """
        load = functools.partial(type(self._model).load_weights, self._model, filepath)

        with whole_slots(self._reduction, self._model, restores=True):
            try:
                run_on_chief(self._reduction, lambda: load(*args, **kwargs), f"load {filepath}")
            finally:  # after an error, a part may have been read
                broadcast_state(self._reduction, self._model)

    def _complete_state(self, call: str) -> None:
        """Builds the optimizer's slots, if no step has made them yet.

        Raises:
            TrainingError: the model has no variables.
        """
        check_has_variables(self._model, call)
        optimizer = getattr(self._model, "optimizer", None)  # there is none before compile
        if optimizer is not None and not optimizer.built:
            with creation_scope(self._strategy, self._created):
                optimizer.build(self._model.trainable_variables)
            build_sharded_optimizers(self._model, self._reduction)


def arrays_of(model: keras.Model, callbacks: CallbackState) -> Arrays:
    """Returns what a checkpoint holds: all state of the model, and that of callbacks."""
    seeds = seed_state()
    others = callbacks if seeds is None else {**callbacks, _SEEDS: seeds}
    return {**state_of(model), **{f"{_OTHERS}/{name}": array for name, array in others.items()}}


def at_step(progress: Progress, model: keras.Model) -> Progress:
    """Returns the progress with the optimizer's step; a model without one leaves it unchanged."""
    optimizer = getattr(model, "optimizer", None)  # there is none before compile
    if optimizer is None:
        return progress
    return replace(progress, step=int(optimizer.iterations.numpy()))


def restore_checkpoint(
    model: keras.Model, reduction: Reduction, path: str, *, verified: bool = False
) -> tuple[Progress, CallbackState]:
    """Restores the state in a checkpoint; every task must call.

    Args:
        verified: the checksum has been compared before.

    Returns:
        The progress of the training, and the state of its callbacks.

    Raises:
        TrainingError: on every task: the file is missing, is not a checkpoint, is incomplete or
            damaged, or is of another model or optimizer; the model is unchanged then.
    """

    def read() -> bytes:
        with open_checkpoint(path, verified=verified) as file:
            variables = _variables_to_restore(file, model, path)
            for name, variable in variables.items():
                assign = RowsAssigner(variable)
                for start, stop in blocks(variable):
                    assign.next(file.read_rows(file.arrays[name], start, stop))
            others = {n: file.read(a) for n, a in file.arrays.items() if group_of(n) == _OTHERS}
            return b"".join(encode_checkpoint(file.progress, others))

    with whole_slots(reduction, model, restores=True):
        sent = run_on_chief(reduction, read, f"read the checkpoint {path}") or b""
        broadcast_state(reduction, model)
    received = CheckpointFile(io.BytesIO(broadcast_bytes(reduction, sent)))
    arrays = received.arrays.items()
    callbacks = {name.partition("/")[2]: received.read(array) for name, array in arrays}
    seeds = callbacks.pop(_SEEDS, None)
    if seeds is not None:
        global_seed_generator().state.assign(seeds)
    return received.progress, callbacks


def _variables_to_restore(
    file: CheckpointFile, model: keras.Model, path: str
) -> dict[str, keras.Variable]:
    """Returns name -> variable.

    If the model or the checkpoint has no optimizer, optimizers are left alone. Metrics take what
    the file has.

    Raises:
        TrainingError: another model, or another optimizer.
    """
    state = state_of(model)
    ignored = {METRICS, _OTHERS}
    optimizers = [{*map(group_of, names)} - {MODEL} - ignored for names in (state, file.arrays)]
    has_optimizers = model.compiled and optimizers_of(model)  # maybe not built yet
    if not (has_optimizers and optimizers[1]):
        ignored.update(*optimizers)
    found, saved = (
        {
            name: f"{tf.as_dtype(array.dtype).name} {tuple(array.shape)}"
            for name, array in named.items()
            if group_of(name) not in ignored
        }
        for named in (state, file.arrays)
    )
    if differing := [name for name in found | saved if found.get(name) != saved.get(name)]:
        shown = "; ".join(
            f"{name} is {saved.get(name, 'missing')} in the checkpoint and"
            f" {found.get(name, 'missing')} in the model"
            for name in differing[:_SHOWN]
        )
        raise TrainingError(
            f"{path} is a checkpoint of another model or optimizer: {shown}. Use"
            " the code that wrote it, or another checkpoint or folder. Build an optimizer of your"
            " own step before you restore it: optimizer.build(variables)."
        )
    return {
        name: variable
        for name, variable in state.items()
        if name in file.arrays and file.arrays[name].shape == tuple(variable.shape)
    }
