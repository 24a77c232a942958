"""What a `DistributedModel` writes and reads back: models, exports, checkpoints.

In a cluster the chief writes and reads, and the others wait and take over its state. So a folder
on the chief's own disk is enough, and no task can come upon another file than the others. A
checkpoint is the whole state of a model in one file, restored on any strategy from any other.

As it is, a model cannot be exported where its variables are partitioned, and one on parameter
servers is traced with variables of other machines. So what is exported is a copy without a
strategy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.building.build import build, creation_scope
from tfdist_ext.training.building.cloning import (
    clone_model,
    copy_flags_and_assets,
    truncate_message,
)
from tfdist_ext.training.checkpoints.atomic_write import AnyPath, atomic_write, path_of
from tfdist_ext.training.checkpoints.chief import (
    broadcast_arrays,
    broadcast_state,
    broadcast_text,
    run_on_chief,
)
from tfdist_ext.training.checkpoints.file import (
    CheckpointFile,
    CopiesInMemory,
    assign_rows,
    assign_whole,
    blocks,
    whole_value,
    write_checkpoint,
)
from tfdist_ext.training.checkpoints.folder import Progress, finished_checkpoints, training_is_done
from tfdist_ext.training.checkpoints.state import MODEL, CallbackState, kinds_of, matching, state_of
from tfdist_ext.training.programs import Engine
from tfdist_ext.training.protocols import Reduction, Specs, on_every_worker
from tfdist_ext.user_frames import filter_traceback

__all__ = [
    "Progress",
    "SavingMixin",
    "export",
    "finished_checkpoints",
    "restore_checkpoint",
    "save_checkpoint",
    "training_is_done",
]


# Groups of arrays: what callbacks know, and the generator that draws without a seed.
_CALLBACKS, _RANDOM = "callbacks", "random"


# Makes a model once more; None where there is only the model itself.
Builder: TypeAlias = Callable[[], keras.Model] | None


@filter_traceback
class SavingMixin:
    """The saving methods of a `DistributedModel`. Every task of a cluster makes the same calls."""

    _model: keras.Model
    _strategy: tf.distribute.Strategy
    _reduction: Reduction
    _engine: Engine[Reduction]
    _builder: Builder
    _built_for: Specs  # tf.TypeSpecs of a batch, once one was seen
    _progress: Progress
    _created: list[tf.Variable]

    @on_every_worker
    def save(self, filepath: str | Path, overwrite: bool = True, **kwargs: Any) -> None:
        """Write the model as `keras.Model.save` does; plain Keras loads it.

        Call it on every task: the chief writes, and all wait until the file is there.
        """
        run_on_chief(
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
        run_on_chief(
            self._reduction,
            lambda: export(self._model, str(filepath), self._builder, self._built_for, **kwargs),
            f"export to {filepath}",
        )

    @on_every_worker
    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write all state to one file: weights, optimizer, metrics, random seeds, epoch, step.

        Call it on every task: the chief writes, and all wait until the file is there. It appears
        when it is complete. `restore_checkpoint` reads it on any strategy.

        Raises:
            TrainingError: a model without variables yet, or a path that is a folder.
        """
        file = path_of(path)
        self._build_optimizer()
        self._progress = save_checkpoint(self._model, self._reduction, file, self._progress)

    @on_every_worker
    def restore_checkpoint(self, path: str | os.PathLike[str]) -> Progress:
        """Take over the state in a file of `save_checkpoint`, whatever strategy it was saved on.

        Call it on every task: the chief reads, and the others take over what it has read. A model
        that is not compiled takes the weights alone.

        Returns:
            `.epoch`, the epochs that were done, for `fit(initial_epoch=...)`, and `.step`.

        Raises:
            TrainingError: on every task: no such file, no checkpoint or a part of one, a damaged
                one, or one of another model or another optimizer. Nothing is changed then.
        """
        file = path_of(path)
        self._build_optimizer()
        self._progress, _ = restore_checkpoint(self._model, self._reduction, file)
        self._engine.state_is_restored()
        return self._progress

    @on_every_worker
    def load_weights(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """As `keras.Model.load_weights`; the file need only be there for the chief.

        Call it on every task: the chief reads, and the others take over what it has read.
        """
        load = functools.partial(type(self._model).load_weights, self._model, filepath)
        failure: Exception | None = None
        try:
            run_on_chief(self._reduction, lambda: load(*args, **kwargs), f"load {filepath}")
        except Exception as error:  # what does not fit may have been read in part
            failure = error
        broadcast_state(self._model, self._reduction)
        if failure is not None:
            raise failure

    def _build_optimizer(self) -> None:
        """Build the optimizer's slots, where no step has made them yet."""
        model = self._model
        optimizer = getattr(model, "optimizer", None)  # there is none before compile
        if model.built and optimizer is not None and not optimizer.built:
            with creation_scope(self._strategy, self._created):
                optimizer.build(model.trainable_variables)


_NO_COPY = (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError)


def export(
    model: keras.Model, filepath: str, builder: Builder, spec: Specs, **arguments: Any
) -> None:
    """As `keras.Model.export`, on this task alone.

    Args:
        builder: makes the model once more, where it cannot be copied from its config.
        spec: tf.TypeSpecs of the batch that the model was built for; None: unknown.
        arguments: those of `keras.Model.export`.

    Raises:
        TrainingError: the model has no variables yet, or there is no way to copy it.
    """
    policy = keras.config.dtype_policy()

    def copy_and_export() -> None:
        keras.config.set_dtype_policy(policy)  # a setting of each thread
        copy = _plain_copy(model, builder, spec)
        if not kp.is_graph_of_layers(model) and spec is not None:
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
            arguments.setdefault("input_signature", [inputs])
        copy.export(filepath, **arguments)

    # A new thread is outside of all scopes, whatever strategy's is open in this one.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(copy_and_export).result()


def _plain_copy(model: keras.Model, builder: Builder, spec: Specs) -> keras.Model:
    """The model with its weights in ordinary variables of this process, not compiled."""
    _check_has_variables(model, "export")
    try:
        copy = clone_model(model)
    except _NO_COPY as error:
        if builder is None:
            raise TrainingError(
                f"the model {model.name!r} ({type(model).__name__}) cannot be copied for export:"
                f" {truncate_message(error)} Give its class a get_config()."
            ) from error
        copy = builder()
    if len(copy.variables) != len(model.variables) and spec is not None:
        build(copy, spec, tf.distribute.get_strategy(), kind="predict")
    copy_flags_and_assets(model, copy)
    values, targets = state_of(model)[MODEL], state_of(copy)[MODEL]
    if list(values) != list(targets):
        differs = sorted({*values} ^ {*targets})
        raise TrainingError(
            f"the copy of {model.name!r} to export must have the model's own variables, got other"
            f" ones: {', '.join(differs[:6])}. Give its class a complete get_config()."
        )
    for name, target in targets.items():
        assign_whole(target, whole_value(values[name]))
    return copy


class BackgroundWriter:
    """Writes checkpoints in a thread, one after another, from copies of the state.

    The training stands still while it is copied, and while the one before is not written yet.
    """

    def __init__(self, waits: Callable[[], object]):
        """
        Args:
            waits: called now and then by who waits, where something was written since.
        """
        self.copies = CopiesInMemory()
        self._waits = waits
        self._blocks = 0
        self._running: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "tfdist-checkpoints", _in_the_background)

    def begin(self, write: Callable[[Callable[[], object]], None]) -> None:
        """Run `write(wrote)` in the thread; `wrote` is to be called after each block."""
        self._running = self._thread.submit(write, self._wrote)

    def wait(self) -> None:
        """Return when all is written.

        Raises:
            Exception: what kept it from being written.
        """
        running, seen = self._running, -1
        while running is not None:
            with contextlib.suppress(FutureTimeoutError):
                self._running = None if running.done() else running
                return running.result(_WAITS)
            if seen != self._blocks:
                seen = self._blocks
                self._waits()

    def close(self) -> None:
        """Give back the thread, and the memory of the copies."""
        self._thread.shutdown()
        self.copies = CopiesInMemory()

    def _wrote(self) -> None:
        self._blocks += 1


_WAITS = 1.0  # seconds


def _in_the_background() -> None:
    """Let the training have the processor where both want it; a thread has its own niceness."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def save_checkpoint(
    model: keras.Model,
    reduction: Reduction,
    path: AnyPath,
    progress: Progress,
    *,
    place: Callable[[AnyPath], AbstractContextManager[AnyPath]] = atomic_write,
    attributes: Mapping[str, int | str] | None = None,
    callbacks: Callable[[], CallbackState] = dict,
    writer: BackgroundWriter | None = None,
    written: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Write the model's state to one file; every task must call, and returns when it is there.

    With a `writer` it returns when the state is copied; what is wrong with the file before is
    raised then.

    Args:
        place: on the chief: gives the file to write to, and puts it where it belongs.
        attributes: on the chief: what else is written into the file.
        callbacks: on the chief: gives what callbacks know.
        writer: writes the file in the background.
        written: called on the chief with the progress, when the file is there.

    Returns:
        The progress that was saved, its step that of the optimizer.

    Raises:
        TrainingError: the model has no variables, or `path` is a folder.
        OSError: the file cannot be written.
    """
    _check_has_variables(model, "save_checkpoint")
    optimizer = getattr(model, "optimizer", None)  # there is none before compile
    if optimizer is not None:
        progress = replace(progress, step=int(optimizer.iterations.numpy()))
    fields = {**asdict(progress), **(attributes or {})}

    def write(groups: Any, arrays: Any, kinds: Any, wrote: Callable[[], object]) -> None:
        write_checkpoint(path, groups, kinds, fields, place, arrays, wrote)
        written(progress)

    def act() -> None:
        if writer is not None:
            writer.wait()
        seeds, kinds = kp.seed_state(), kinds_of(model)
        arrays = {_CALLBACKS: callbacks(), _RANDOM: {} if seeds is None else {"state": seeds}}
        if writer is None:
            enters = functools.partial(reduction.peers.enters, "checkpoint")
            write(state_of(model), arrays, kinds, enters)
            return
        arrays = {
            name: {k: np.array(v) for k, v in group.items()} for name, group in arrays.items()
        }
        copied = writer.copies.of(state_of(model))
        writer.begin(functools.partial(write, copied, arrays, kinds))

    run_on_chief(reduction, act, f"write the checkpoint {path}")
    return progress


def restore_checkpoint(
    model: keras.Model, reduction: Reduction, path: AnyPath, *, verified: bool = False
) -> tuple[Progress, CallbackState]:
    """Give the model the state that a checkpoint holds; every task must call.

    Args:
        verified: the checksums have been compared before.

    Returns:
        The progress of the training, and what its callbacks knew.

    Raises:
        TrainingError: on every task: the file is missing, is not a checkpoint, is incomplete or
            damaged, or is of another model or optimizer; nothing is changed then.
            Or the model has no variables yet.
    """
    _check_has_variables(model, "restore_checkpoint")
    progress, callbacks, random = Progress(), CallbackState(), CallbackState()

    def read() -> None:
        nonlocal progress, callbacks, random
        with CheckpointFile(path) as file:
            pairs = matching(file, model, path)
            progress = Progress.of(file)
            if not verified:
                file.verify()  # nothing is changed before all is known to be good
            callbacks, random = file.arrays(_CALLBACKS), file.arrays(_RANDOM)
            for saved, variable in pairs:
                for start, stop in blocks(variable):
                    assign_rows(variable, start, file.rows(saved, start, stop))

    run_on_chief(reduction, read, f"read the checkpoint {path}")
    broadcast_state(model, reduction)
    numbers = reduction.from_chief(np.array([*progress.numbers.values()], np.int64)).tolist()
    texts = (broadcast_text(reduction, text) for text in (progress.data, progress.trained))
    progress = Progress(*numbers, *texts)
    for state in broadcast_arrays(reduction, random).values():
        kp.global_seed_generator().state.assign(state)
    return progress, broadcast_arrays(reduction, callbacks)


def _check_has_variables(model: keras.Model, call: str) -> None:
    if not model.built:
        raise TrainingError(
            f"the model must have variables before {call}(), got {model.name!r} without: begin it"
            " with keras.Input(shape), or call build(), fit() or predict() first."
        )
