"""DistributedModel: Keras's fit, evaluate and predict, on any strategy.

`distribute` inserts `DistributedModel` into the class of a Keras model, between the user's class
and `keras.Model`. So a user's `fit` reaches this `fit` by `super()`, and a callback's `self.model`
is the distributed model. Serialization sees the user's class: a copy, a clone and a loaded model
are plain Keras models.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies import create_strategy
from tfdist_ext.strategies.factory import check_spans_cluster
from tfdist_ext.training._keras_private import metrics_in_order, overrides, stateless_scope
from tfdist_ext.training._tf_private import records_gradients
from tfdist_ext.training.agreement.barriers import peers_of
from tfdist_ext.training.building import input_signature, is_in, moved_out
from tfdist_ext.training.callbacks.callback_state import Callbacks
from tfdist_ext.training.checkpoints.format import Progress
from tfdist_ext.training.checkpoints.saving import (
    at_step,
    load_on_chief,
    restore_checkpoint,
    write_checkpoint,
)
from tfdist_ext.training.distribution import Distribution, FitArguments, rows_of_arrays
from tfdist_ext.training.state import check_has_variables
from tfdist_ext.training.synchronous.model_step import OneTrace
from tfdist_ext.user_frames import filter_traceback, warn

_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_every_worker(method: _Method) -> _Method:
    """Decorator of a method of DistributedModel that every worker must call."""

    @functools.wraps(method)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._tfdist_ext.reduction.call(method.__name__):
            return method(self, *args, **kwargs)

    return cast(_Method, called)


class _Attribute:
    """A property that does not hide an attribute of the user's model with the same name."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        return self if model is None else self._function(model)


@filter_traceback
class DistributedModel(keras.Model):
    """A Keras model that trains on all replicas of a strategy. `distribute` makes one.

    All batch sizes are global: the number of examples of one step, over all replicas of all tasks.
    In a cluster, all tasks make the same calls with the same data.
    """

    _tfdist_ext: Distribution

    @_Attribute
    def keras_model(self) -> keras.Model:
        """The model itself."""
        return self

    @_Attribute
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that the variables are in."""
        return self._tfdist_ext.strategy

    def _tfdist_explained(self) -> tuple[tf.distribute.Strategy, list[str]]:
        """Returns the strategy, and the lines about steps, for `tfd.explain`."""
        return self._tfdist_ext.strategy, self._tfdist_ext.traces()

    @on_every_worker
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        checkpoint_async: bool = True,
    ) -> keras.callbacks.History:
        """Trains the model. Takes the arguments of `keras.Model.fit`.

        `batch_size` is the global batch size. Arrays are shuffled in the same order on all tasks. A
        `ShardedDataset` has its own order. In a cluster, only the chief prints and writes files. An
        `evaluator` task does not train: it evaluates each new checkpoint on the validation data,
        and exits when the training is complete.

        If `steps_per_execution` is 1, one execution runs the steps of about a second. If a callback
        has batch methods, such as `on_train_batch_end`, one execution runs one step.

        Args:
            checkpoint_dir: a folder for checkpoints. `fit` saves a checkpoint after each epoch and
                keeps the last three. A new job with the same folder resumes from the newest one,
                and gives the same results as a training without interruption.
            checkpoint_every: also saves a checkpoint after this number of global batches. `x` must
                be arrays or a `tfd.data.ShardedDataset`.
            checkpoint_async: if True, writes checkpoints in the background, from a copy of the
                state in the memory of the chief. If False, the training waits until the checkpoint
                is on disk. With parameter servers, the training always waits.

        Raises:
            TrainingError: the data or an argument cannot be distributed, the model is not compiled,
                or `checkpoint_dir` cannot be written, contains checkpoints of another model, or is
                in use by a newer job.
            ValueError: Keras rejects an argument.
        """
        arguments = dict(locals())
        del arguments["self"]
        return self._tfdist_ext.fit(FitArguments(**arguments))

    @on_every_worker
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
        *,
        _use_cached_eval_dataset: bool = False,  # Keras's fit gives it to a model's own evaluate
    ) -> Any:
        """Returns the loss and metrics of all examples, like `keras.Model.evaluate`.

        All tasks return the same numbers. `batch_size` is the global batch size.
        """
        state = self._tfdist_ext
        if _use_cached_eval_dataset and state.cached_validation is not None:
            epochs, hooks = state.cached_validation
        else:
            state.check_call("evaluate", {"batch_size": batch_size, "steps": steps}, x=x)
            epochs = state.read("test", x, y, sample_weight, batch_size=batch_size, steps=steps)
            hooks = state.callbacks(callbacks, verbose, epochs=1, steps=epochs.steps)
        logs = state.evaluate(epochs, hooks)
        return logs if return_dict else metrics_in_order(self, logs)

    @on_every_worker
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
    ) -> Any:
        """Returns the outputs for all rows, in their order, as NumPy arrays on every task.

        `batch_size` is the global batch size.
        """
        state = self._tfdist_ext
        state.check_call("predict", {"batch_size": batch_size, "steps": steps}, x=x)
        epochs = state.read("predict", x, batch_size=batch_size, steps=steps)
        return state.predict(
            epochs, state.callbacks(callbacks, verbose, epochs=1, steps=epochs.steps)
        )

    @on_every_worker
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one global batch, like `keras.Model.train_on_batch`."""
        state = self._tfdist_ext
        logs = state.on_batch("train", (x, y, sample_weight), class_weight=class_weight)
        return logs if return_dict else metrics_in_order(self, logs)

    @on_every_worker
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Returns the loss and metrics of one global batch, like `keras.Model.test_on_batch`."""
        state = self._tfdist_ext
        logs = state.on_batch("test", (x, y, sample_weight))
        return logs if return_dict else metrics_in_order(self, logs)

    @on_every_worker
    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs for one global batch, as NumPy arrays on every task."""
        state = self._tfdist_ext
        epochs = state.read("predict", x, batch_size=rows_of_arrays(x))
        return state.predict(epochs, keras.callbacks.CallbackList())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        # Keras's own fit calls in this context of TensorFlow's default strategy.
        if type(context) is tf.distribute.ReplicaContext and records_gradients():
            trained = self.trainable_weights
            if not all(is_in(variable, context.strategy) for variable in trained):
                raise TrainingError(
                    f"{self.name!r} is distributed, but it is inside of a model that is not."
                    " Training the outer model would change only the copies of the first replica."
                    " Distribute the outer model: tfd.distribute(model, strategy)."
                )
        return super().__call__(*args, **kwargs)

    @functools.wraps(keras.Model.compile)
    def compile(self, *args: Any, **kwargs: Any) -> None:
        self._tfdist_ext.check_is_idle("compile")
        super().compile(*args, **kwargs)
        self._tfdist_ext.forget_steps()

    def save(
        self,
        filepath: str | Path,
        overwrite: bool = True,
        zipped: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the model like `keras.Model.save`. Plain Keras can load it.

        Call it on every task. The chief writes the file, and the other tasks wait for it. In a
        callback of `fit` the other tasks do nothing.
        """
        save = functools.partial(super().save, filepath, overwrite, zipped, **kwargs)
        self._tfdist_ext.write("save", save, f"write {filepath}")

    def save_weights(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Writes the weights like `keras.Model.save_weights`. See `save`."""
        save = functools.partial(super().save_weights, filepath, *args, **kwargs)
        self._tfdist_ext.write("save_weights", save, f"write {filepath}")

    def export(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Writes a SavedModel like `keras.Model.export`, for `tf.saved_model.load`.

        Call it on every task. The chief writes the files, and needs memory for a copy of the
        variables. See `save`.

        Raises:
            TrainingError: the model has no variables yet.
        """
        check_has_variables(self, "export")
        export = super().export

        def write() -> None:
            with moved_out(self):
                options = {**input_signature(self, self._tfdist_ext.built_for), **kwargs}
                export(str(filepath), *args, **options)

        self._tfdist_ext.write("export", write, f"export to {filepath}")

    @on_every_worker
    def load_weights(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Loads weights like `keras.Model.load_weights`. Only the chief needs the file.

        Call it on every task. The chief reads the file and sends the weights to the other tasks.
        """
        load = functools.partial(super().load_weights, filepath, *args, **kwargs)
        load_on_chief(self, self._tfdist_ext.reduction, load, f"load {filepath}")

    @on_every_worker
    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint: weights, optimizer, metrics, random seeds, epoch and step.

        Call it on every task. The chief writes the file, and the other tasks wait for it. The file
        appears when it is complete. `restore_checkpoint` can read it on any strategy.

        Raises:
            TrainingError: the model has no variables yet, the path is a folder, or the file cannot
                be written.
        """
        state = self._tfdist_ext
        check_has_variables(self, "save_checkpoint")
        state.complete_optimizer()
        state.progress = at_step(state.progress, self)
        write_checkpoint(self, state.reduction, state.progress, os.fspath(path))

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
        state = self._tfdist_ext
        check_has_variables(self, "restore_checkpoint")
        state.complete_optimizer()
        state.progress, _ = restore_checkpoint(self, state.reduction, os.fspath(path))
        return state.progress

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled or copied model is a plain Keras model: its class is the user's."""
        function, arguments = super().__reduce__()
        return getattr(self.__class__, function.__name__, function), arguments


class _NotRegistered:
    """A user's `__init_subclass__` is not called for the inserted class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _insert_into_class(model: keras.Model) -> None:
    """Makes a model a DistributedModel: Python finds the methods after those of the user's class.

    `__class__` is still the user's class, which serialization and `clone_model` ask for.
    """
    cls = type(model)
    if issubclass(cls, DistributedModel):
        return

    def new(_: type, *args: Any, **kwargs: Any) -> keras.Model:
        return cls(*args, **kwargs)

    members: dict[str, Any] = {"__new__": new}  # type(model)(...) is a plain Keras model
    for name in set(dir(cls)) - set(dir(DistributedModel)):
        method = inspect.getattr_static(cls, name)
        if name.startswith(("save_", "export_")) and inspect.isfunction(method):
            members[name] = _on_chief(name, method)  # such as `save_to_preset` of KerasHub
    for kind in ("train", "test", "predict"):
        members[f"{kind}_step"] = _only_in_steps(kind)
        members[name := f"make_{kind}_function"] = _refused_function(kind)
        if overrides(model, name):
            warn(
                f"{cls.__name__}.{name} is not called: a distributed model compiles its own steps."
                f" Override {kind}_step instead."
            )
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    members |= {"__doc__": cls.__doc__, "__class__": property(lambda model: cls)}
    inserted = type(cls.__name__, (_NotRegistered, cls, DistributedModel), members)
    object.__setattr__(model, "__class__", inserted)


def _on_chief(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that the chief alone calls."""

    @filter_traceback
    @functools.wraps(method)
    def write(self: DistributedModel, *args: Any, **kwargs: Any) -> Any:
        return self._tfdist_ext.write(name, functools.partial(method, self, *args, **kwargs))

    return write


def _only_in_steps(kind: str) -> Callable[..., Any]:
    """Returns a step that is refused where it would run on the first replica alone."""
    name = f"{kind}_step"

    @filter_traceback
    def step(self: DistributedModel, *args: Any, **kwargs: Any) -> Any:
        in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        if stateless_scope() is None and not in_replica:
            raise TrainingError(
                f"Do not call {name}() on a DistributedModel. It would change only the copies of"
                f" the first replica. Call {kind}_on_batch(), which runs on all replicas."
            )
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return step


def _refused_function(kind: str) -> Callable[..., Any]:
    """Returns the function of a step that is refused: `keras.Model.fit` itself asks for it."""

    @filter_traceback
    def make(self: DistributedModel, *args: Any, **kwargs: Any) -> NoReturn:
        raise TrainingError(
            f"make_{kind}_function() is not supported on a DistributedModel, which compiles its"
            " own steps. If a method of your model calls a method of keras.Model by the name of the"
            " class, such as keras.Model.fit(self, x), call super().fit(x)."
        )

    return make


@filter_traceback
def distribute(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy | None = None,
    *,
    synchronize_batch_norm: bool | None = None,
    lazy_updates: bool = False,
    one_trace: OneTrace = "auto",
) -> DistributedModel:
    """Distributes a Keras model over the replicas of a strategy.

    Args:
        model_or_builder: a function without arguments that returns a Keras model, or an existing
            model. The variables of an existing model, of its optimizers and its metrics move to the
            strategy, and the model becomes the result. A model that is distributed twice moves to
            the second strategy.
        strategy: any `tf.distribute.Strategy`. The default is the strategy of the current scope,
            or `create_strategy()` outside of a scope.
        synchronize_batch_norm: if True, sets `synchronized=True` in every BatchNormalization, so
            that it normalizes with the statistics of the global batch, as on one device. A saved
            model keeps the setting. If False or None, each replica normalizes with the statistics
            of its own rows, unless a layer is already synchronized. None also warns if several
            replicas train such a layer.
        lazy_updates: if True, an optimizer updates only the rows of an embedding table that the
            global batch has used, and their slots. Rows of a batch that occur several times are
            summed first. Weight decay and the decay of moments apply to a row when it is used, so
            the training differs from Keras's, and large tables train faster. If False, this happens
            only where it changes no number, as with Adagrad. The class of your own optimizer needs
            the attribute `updates_by_row = True`. Source: LazyAdam of TensorFlow 1, PyTorch's
            SparseAdam.
        one_trace: if True, TensorFlow traces each step once for all replicas of a task, which makes
            the first step shorter. If a step cannot be traced once, a warning and
            `tfd.explain(model)` give the reason. If False, TensorFlow traces each step once per
            replica. "auto" means True on CPUs, and False on GPUs and TPUs, where a single trace
            is not tested.

    Returns:
        The model itself, which is a `DistributedModel` now and still an instance of its class.

    Raises:
        TrainingError: the first argument is not a model and does not return one, the model cannot
            move to the strategy, or `strategy` is not a strategy. The first step raises it if
            `lazy_updates` is True and the optimizer does not update each row alone.
        StrategyError: the strategy uses one machine, but the environment describes a cluster with
            several tasks.
    """
    if one_trace not in ("auto", True, False):
        raise TrainingError(f"one_trace must be 'auto', True or False, got {one_trace!r}.")
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise TrainingError(
            f"strategy must be a tf.distribute.Strategy, got {strategy!r}. Use"
            " create_strategy(name)."
        )
    if strategy is None:
        inside = tf.distribute.has_strategy()
        strategy = tf.distribute.get_strategy() if inside else create_strategy()
    check_spans_cluster(strategy)
    return distribute_on(
        model_or_builder, strategy, synchronize_batch_norm, one_trace, lazy_updates=lazy_updates
    )


def distribute_on(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy,
    synchronize_batch_norm: bool | None = None,
    one_trace: OneTrace = "auto",
    *,
    lazy_updates: bool = False,
) -> DistributedModel:
    """`distribute` on a strategy that may use one machine of a cluster."""
    if isinstance(model_or_builder, DistributedModel):
        model_or_builder._tfdist_ext.check_is_idle("distribute")
    with peers_of(strategy).call("distribute"):
        state = Distribution(
            model_or_builder, strategy, synchronize_batch_norm, one_trace, lazy_updates
        )
    _insert_into_class(state.model)
    # Not by setattr: Keras would look for variables and layers in it.
    vars(state.model)["_tfdist_ext"] = state
    return state.model
