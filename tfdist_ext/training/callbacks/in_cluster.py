"""Callbacks in a cluster: which run on which task, and what their `self.model` does.

A model may also override methods of Keras's trainer, as KerasHub's tasks override `fit`. Such a
`fit` prepares the data or the callbacks and calls `super().fit(...)`. While it runs,
`keras.Model.fit` is replaced: for this model it calls the distributed implementation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar, cast

import keras

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.callbacks.worker_tensorboard import check_tensorboard
from tfdist_ext.training.state import broadcast_variables, state_of
from tfdist_ext.training.steps.replaced import (
    functions_in_place,
    redirect_methods,
    substitutes,
    target_of,
)
from tfdist_ext.user_frames import filter_traceback

Function: TypeAlias = Callable[..., Any]

# What Keras's fit, evaluate and predict take as callbacks.
_Callback: TypeAlias = keras.callbacks.Callback
Callbacks: TypeAlias = _Callback | keras.callbacks.CallbackList | Sequence[_Callback] | None
Method = TypeVar("Method", bound=Function)


class TrainedModel(Protocol):
    """The methods of a `DistributedModel` that callbacks and the evaluator call."""

    @property
    def keras_model(self) -> keras.Model: ...

    def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...

    def predict(self, *args: Any, **kwargs: Any) -> Any: ...

    def load_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def restore_checkpoint(self, path: str) -> Any: ...


# They write files, or print: only the chief runs them.
_WRITING_CALLBACKS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def callbacks_of_this_task(
    callbacks: Callbacks, *, is_chief: bool
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that run on this task: all on the chief, elsewhere no writers.

    Callbacks that change the training (EarlyStopping, schedules) run on every task. They decide the
    same, because logs are the same on every task.

    Raises:
        TrainingError: a callback writes for TensorBoard, which is not installed.
    """
    given = keras.tree.flatten(callbacks or [])
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


def uses_batch_hooks(callbacks: Callbacks, kind: str) -> bool:
    """Whether a callback wants to be called for each batch of `kind`: train, test or predict."""
    hooks = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    if kind == "train":
        hooks += ["on_batch_begin", "on_batch_end"]
    return any(
        getattr(method := getattr(callback, hook), "__func__", method)
        is not getattr(keras.callbacks.Callback, hook)
        for callback in keras.tree.flatten(callbacks or [])
        if not _ignores_batches(callback)
        for hook in hooks
    )


def _ignores_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback of Keras does nothing in the batch hooks that it has."""
    match callback:
        case keras.callbacks.ProgbarLogger() | keras.callbacks.History():
            return True
        case keras.callbacks.ModelCheckpoint() | keras.callbacks.BackupAndRestore():
            return callback.save_freq == "epoch"
        case keras.callbacks.TensorBoard():
            return callback.update_freq == "epoch" and not kp.traces_batches(callback)
    return False


def has_backup(callbacks: Callbacks, checkpoint_dir: str | Path | None) -> bool:
    """Returns whether BackupAndRestore is among the callbacks of a `fit`.

    Raises:
        TrainingError: `checkpoint_dir` is given, too.
    """
    given = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or [])
    found = any(isinstance(each, keras.callbacks.BackupAndRestore) for each in given)
    if found and checkpoint_dir is not None:
        raise TrainingError(
            "Both checkpoint_dir and the callback BackupAndRestore would restore the model: give"
            " one of them."
        )
    return found


def restored_epoch(model: keras.Model, reduction: Reduction) -> int | None:
    """Returns the epoch that BackupAndRestore found; copies the chief's state to all tasks."""
    epoch = kp.restored_epoch(model)
    epoch = int(reduction.from_chief(-1 if epoch is None else epoch))
    if epoch < 0:
        return None
    broadcast_variables(reduction, state_of(model).values())
    return epoch


def redirect_model_methods(
    distributed: TrainedModel, model: keras.Model, callbacks: Callbacks, *, is_chief: bool
) -> contextlib.AbstractContextManager[None]:
    """Scope in which callbacks get methods of `distributed` as methods of the Keras model.

    - `evaluate` and `predict` of Keras fail, or are wrong, on a strategy.
    - `save`, `save_weights` and `export` do nothing on tasks that are not the chief. They do not
      wait for the chief, because the other tasks may not run the callback.
    - `load_weights` reads on the chief, for all tasks. BackupAndRestore runs on the chief alone,
      so it reads for itself (see `restored_epoch`).
    """
    given = keras.tree.flatten(callbacks or [])
    backups = [kp.backup_of(c) for c in given if isinstance(c, keras.callbacks.BackupAndRestore)]

    def load_weights(filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        if filepath in backups:
            type(model).load_weights(model, filepath, *args, **kwargs)
        else:
            distributed.load_weights(filepath, *args, **kwargs)

    not_written = ("export", "save", "save_weights") if not is_chief else ()
    return redirect_methods(
        model,
        evaluate=distributed.evaluate,
        predict=distributed.predict,
        load_weights=load_weights,
        **dict.fromkeys(not_written, lambda *args, **kwargs: None),
    )


def refusing_compile(model: keras.Model, method: str) -> contextlib.AbstractContextManager[None]:
    """Scope of running steps, in which `compile` is refused."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise TrainingError(
            f"compile() was called while {method}() is running, whose steps are already compiled."
            f" Call compile() before or after {method}(). A callback can assign settings of the"
            " optimizer instead, for example model.optimizer.learning_rate = 0.001."
        )

    return redirect_methods(model, compile=refuse)


# Methods that a model's class may override and call by super().
TRAINER_METHODS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)

_TARGETS = [target_of(name, keras.Model, name) for name in TRAINER_METHODS]


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model's class overrides `fit`, `evaluate`, ... of `keras.Model`."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def overridable(method: Method) -> Method:
    """Decorator for methods of a DistributedModel that replace those of `keras.Model`.

    If the Keras model's class overrides the method, the override is called with all arguments, and
    its `super()` call reaches `method`.
    """

    @functools.wraps(method)
    def call(self: TrainedModel, *args: Any, **kwargs: Any) -> Any:
        model, name = self.keras_model, method.__name__
        if not overrides(model, name):
            return method(self, *args, **kwargs)
        with _trained_by(self):
            return getattr(type(model), name)(model, *args, **kwargs)

    vars(call)["distributed"] = method
    return cast(Method, call)


def redirected_method(distributed: TrainedModel, method: Function) -> Function:
    """Returns a method of the Keras model that calls the distributed `fit`, `evaluate`, ..."""

    @filter_traceback
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _trained_by(distributed):
            return method(*args, **kwargs)

    return call


@contextlib.contextmanager
def _trained_by(distributed: TrainedModel) -> Iterator[None]:
    """Scope in which `keras.Model.fit`, ... of this model are those of the DistributedModel."""

    def redirected(name: str) -> Function:
        method = getattr(type(distributed), name).distributed

        def called(original: Function, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            if model is not distributed.keras_model:  # another one, in a method of this model
                return original(model, *args, **kwargs)
            return method(distributed, *args, **kwargs)

        return called

    functions = {name: redirected(name) for name in TRAINER_METHODS}
    with functions_in_place(_TARGETS), substitutes(functions):
        yield
