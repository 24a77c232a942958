"""What a `DistributedModel` writes and reads: models, exports, checkpoints.

In a cluster the chief writes and reads, and sends its state to the others. So a folder on the
chief's own disk is enough, and no task can read another file than the others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import posixpath
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.building.build import creation_scope
from tfdist_ext.training.building.export import Builder, export
from tfdist_ext.training.checkpoints.callback_state import CallbackState
from tfdist_ext.training.checkpoints.format import (
    CheckpointFile,
    Progress,
    SavedArray,
    encode_checkpoint,
)
from tfdist_ext.training.checkpoints.paths import atomic_write, os_errors
from tfdist_ext.training.programs import Engine
from tfdist_ext.training.protocols import Reduction, Specs, on_every_worker
from tfdist_ext.training.state.chief import (
    broadcast_arrays,
    broadcast_state,
    broadcast_text,
    run_on_chief,
)
from tfdist_ext.training.state.naming import (
    METRICS,
    MODEL,
    check_has_variables,
    kinds_of,
    state_of,
)
from tfdist_ext.training.state.values import assign_rows, blocks, copy_value
from tfdist_ext.user_frames import filter_traceback

__all__ = ["SavingMixin", "Writer", "restore_checkpoint", "save_checkpoint"]

# Groups of arrays: the state of callbacks, and of the generator that draws without a seed.
_CALLBACKS, _RANDOM = "callbacks", "random"

_SHOWN = 6  # variables that a message names

Groups = Mapping[str, Mapping[str, keras.Variable | np.ndarray]]


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
        """Writes the model as `keras.Model.save` does; plain Keras loads it.

        Call it on every task: the chief writes, and all wait until the file is there.
        """
        run_on_chief(
            self._reduction,
            lambda: self._model.save(filepath, overwrite=overwrite, **kwargs),
            f"write {filepath}",
        )

    @on_every_worker
    def export(self, filepath: str | Path, **kwargs: Any) -> None:
        """Writes a SavedModel as `keras.Model.export` does; `tf.saved_model.load` loads it.

        Call it on every task: the chief writes, and all wait until it is there. The chief needs
        memory for a copy of the model.

        Raises:
            TrainingError: the model has no variables yet, or it cannot be copied.
        """
        run_on_chief(
            self._reduction,
            lambda: export(self._model, str(filepath), self._builder, self._built_for, **kwargs),
            f"export to {filepath}",
        )

    @on_every_worker
    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes all state to one file: weights, optimizer, metrics, random seeds, epoch, step.

        Call it on every task: the chief writes, and all wait until the file is there. It appears
        when it is complete. `restore_checkpoint` reads it on any strategy.

        Raises:
            TrainingError: the model has no variables yet, or the path is a folder.
            OSError: the file cannot be written.
        """
        file = os.fspath(path)
        self._build_optimizer()
        self._progress = save_checkpoint(
            self._model, self._reduction, file, self._progress, lambda: _single_file(file)
        )

    @on_every_worker
    def restore_checkpoint(self, path: str | os.PathLike[str]) -> Progress:
        """Restores the state in a file of `save_checkpoint`, whatever strategy saved it.

        Call it on every task: the chief reads, and sends what it has read to the others. A model
        that is not compiled takes the weights only.

        Returns:
            The progress. Its `.epoch` is the number of completed epochs, to be passed as
            `fit(initial_epoch=...)`, and its `.step` the number of steps.

        Raises:
            TrainingError: on every task: there is no such file, it is not a checkpoint, it is
                incomplete or damaged, or it is of another model or optimizer. The model is
                unchanged then.
        """
        self._build_optimizer()
        self._progress, _ = restore_checkpoint(self._model, self._reduction, os.fspath(path))
        self._engine.state_is_restored()
        return self._progress

    @on_every_worker
    def load_weights(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Loads weights as `keras.Model.load_weights` does; only the chief needs the file.

        Call it on every task: the chief reads, and sends what it has read to the others.
        """
        load = functools.partial(type(self._model).load_weights, self._model, filepath)
        failure: Exception | None = None
        try:
            run_on_chief(self._reduction, lambda: load(*args, **kwargs), f"load {filepath}")
        except Exception as error:  # a part may have been read
            failure = error
        broadcast_state(self._model, self._reduction)
        if failure is not None:
            raise failure

    def _build_optimizer(self) -> None:
        """Builds the optimizer's slots, if no step has made them yet."""
        model = self._model
        optimizer = getattr(model, "optimizer", None)  # there is none before compile
        if model.built and optimizer is not None and not optimizer.built:
            with creation_scope(self._strategy, self._created):
                optimizer.build(model.trainable_variables)


class Writer:
    """Writes checkpoints: at once, or in a thread, one after another, from copies of the state.

    With a thread, the training waits only while the state is copied, and while the checkpoint
    before is written.

    Args:
        waits: called after each block that is written while the training waits.
        in_background: use a thread.
    """

    def __init__(self, waits: Callable[[], object], *, in_background: bool = False):
        self._waits = waits
        self._blocks = 0
        self._running: futures.Future[None] | None = None
        self._buffers: dict[tuple[str, str], np.ndarray] = {}
        self._thread: futures.ThreadPoolExecutor | None = None
        if in_background:
            self._thread = futures.ThreadPoolExecutor(1, "tfdist-checkpoints", _lower_priority)

    def snapshot(self, groups: Groups) -> Groups:
        """Returns variables as the next `begin` needs them: copies, if it uses the thread.

        The copies before are overwritten.
        """
        if self._thread is None:
            return groups
        for group, variables in groups.items():
            for name, variable in variables.items():
                key = group, name
                self._buffers[key] = copy_value(variable, self._buffers.get(key))
        return {g: {name: self._buffers[g, name] for name in groups[g]} for g in groups}

    def begin(self, write: Callable[[Callable[[], object]], None]) -> None:
        """Runs `write(wrote)`; it calls `wrote` after each block."""
        if self._thread is None:
            write(self._waits)
        else:
            self._running = self._thread.submit(write, self._wrote)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            Exception: the error of `write`.
        """
        seen = -1
        while (running := self._running) is not None:
            if futures.wait([running], _WAITS).done:
                self._running = None
                return running.result()
            if seen != self._blocks:
                seen = self._blocks
                self._waits()

    def close(self) -> None:
        """Ends the thread, and frees the memory of the copies."""
        if self._thread is not None:
            self._thread.shutdown()
        self._buffers = {}

    def _wrote(self) -> None:
        self._blocks += 1


_WAITS = 1.0  # seconds


def _lower_priority() -> None:
    """Gives the training precedence; each thread has its own niceness."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def save_checkpoint(
    model: keras.Model,
    reduction: Reduction,
    path: str,
    progress: Progress,
    new_file: Callable[[], AbstractContextManager[Callable[[memoryview], None]]],
    *,
    callbacks: Callable[[], CallbackState] = dict,
    writer: Writer | None = None,
    written: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Writes the model's state to one file; every task must call, and returns when it is written.

    With a writer in the background it returns when the state is copied. An error of that file is
    raised by the next call.

    Args:
        path: of the file, for messages.
        new_file: opens a scope of the new file on the chief, which yields `write(data)`.
        callbacks: returns the state of callbacks, on the chief.
        writer: writes the file; by default at once.
        written: called on the chief with the progress, when the file is there.

    Returns:
        The progress that was saved, with the step of the optimizer.

    Raises:
        TrainingError: the model has no variables, or `path` is a folder.
        OSError: the file cannot be written.
    """
    check_has_variables(model, "save_checkpoint")
    optimizer = getattr(model, "optimizer", None)  # there is none before compile
    if optimizer is not None:
        progress = replace(progress, step=int(optimizer.iterations.numpy()))

    if writer is None:
        writer = Writer(functools.partial(reduction.peers.enters, "checkpoint"))

    def encode(groups: Groups, metadata: dict[str, Any], wrote: Callable[[], object]) -> None:
        with new_file() as write:
            encode_checkpoint(write, groups, metadata, wrote)
        written(progress)

    def save() -> None:
        writer.wait()
        seeds = kp.seed_state()
        others = {_CALLBACKS: callbacks(), _RANDOM: {} if seeds is None else {"state": seeds}}
        groups = {  # callbacks go on changing their arrays
            group: {name: np.array(value) for name, value in arrays.items()}
            for group, arrays in others.items()
        }
        metadata = {"progress": asdict(progress), "kinds": kinds_of(model)}
        state = writer.snapshot(state_of(model))
        writer.begin(functools.partial(encode, {**state, **groups}, metadata))

    run_on_chief(reduction, save, f"write the checkpoint {path}")
    return progress


@contextlib.contextmanager
def _single_file(path: str) -> Iterator[Callable[[memoryview], None]]:
    """Scope of a file of `save_checkpoint`; yields `write(data)`."""
    folder, name = posixpath.split(path)
    if not name or tf.io.gfile.isdir(path):
        raise TrainingError(f"a checkpoint must be a file, got the folder {path}: add a file name.")
    with os_errors(path):
        tf.io.gfile.makedirs(folder or ".")
    with atomic_write(path, posixpath.join(folder, f".{name}.unfinished")) as write:
        yield write


def restore_checkpoint(
    model: keras.Model, reduction: Reduction, path: str, *, verified: bool = False
) -> tuple[Progress, CallbackState]:
    """Restores the state in a checkpoint; every task must call.

    Args:
        verified: the checksums have been compared before.

    Returns:
        The progress of the training, and the state of its callbacks.

    Raises:
        TrainingError: on every task: the file is missing, is not a checkpoint, is incomplete or
            damaged, or is of another model or optimizer; the model is unchanged then.
            Or the model has no variables yet.
    """
    check_has_variables(model, "restore_checkpoint")
    text, callbacks, random = "", CallbackState(), CallbackState()

    def read() -> None:
        nonlocal text, callbacks, random
        with CheckpointFile(path) as file:
            pairs = _matching(file, model, path)
            if not verified:
                file.verify()  # before anything is changed
            text = json.dumps(file.metadata["progress"])
            callbacks, random = file.read_group(_CALLBACKS), file.read_group(_RANDOM)
            for saved, variable in pairs:
                for start, stop in blocks(variable):
                    assign_rows(variable, start, file.read_rows(saved, start, stop))

    run_on_chief(reduction, read, f"read the checkpoint {path}")
    broadcast_state(model, reduction)
    progress = Progress(**json.loads(broadcast_text(reduction, text)))
    for state in broadcast_arrays(reduction, random).values():
        kp.global_seed_generator().state.assign(state)
    return progress, broadcast_arrays(reduction, callbacks)


def _matching(
    file: CheckpointFile, model: keras.Model, path: str
) -> list[tuple[SavedArray, keras.Variable]]:
    """Returns (saved value, variable) of all variables to restore.

    A model that is not compiled takes no optimizer's state. Metrics take what the file has.

    Raises:
        TrainingError: another model, or another optimizer.
    """
    state = state_of(model)
    pairs = _pairs(
        file.group(MODEL),
        state[MODEL],
        f"{path} must be a checkpoint of this model, got one of another model",
    )
    for name, kind in kinds_of(model).items():
        saved_kind = file.metadata["kinds"].get(name)
        if saved_kind is None:
            continue  # the model that was saved was not compiled
        if saved_kind != kind:
            raise TrainingError(
                f"{path} must have the state of {kind}, the optimizer of the model, got that of"
                f" {saved_kind}: compile with {saved_kind}; or restore the weights alone, before"
                " compile()."
            )
        pairs += _pairs(
            file.group(name),
            state[name],
            f"{path} must have the state of this {kind}, got that of one with other slots, or set"
            " up differently",
        )
    metrics = file.group(METRICS)
    for name, variable in state[METRICS].items():
        saved = metrics.get(name)
        if saved is not None and saved.shape == tuple(variable.shape):
            pairs.append((saved, variable))
    return pairs


def _pairs(
    saved: Mapping[str, SavedArray], here: Mapping[str, keras.Variable], what: str
) -> list[tuple[SavedArray, keras.Variable]]:
    pairs = [(saved[name], variable) for name, variable in here.items() if name in saved]
    found = {
        "the checkpoint lacks": [name for name in here if name not in saved],
        "only the checkpoint has": [name for name in saved if name not in here],
        "of another shape or dtype:": [
            f"{new.path} (saved: {old.dtype} {old.shape}, here: {new.dtype} {tuple(new.shape)})"
            for old, new in pairs
            if old.shape != tuple(new.shape) or old.dtype != new.dtype
        ],
    }
    differences = [f"{words} {_shown(names)}" for words, names in found.items() if names]
    if differences:
        raise TrainingError(f"{what}: {'; '.join(differences)}.")
    return pairs


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
