"""DistributedModel: Keras's fit, evaluate and predict, on any strategy.

`distribute` makes one from a Keras model, or from a function that builds a model. This module
checks arguments before anything expensive starts, and puts the parts of a training together.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import keras
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.pipelines import Structure
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.messages import counted, shown
from tfdist_ext.placement.specs import size_text
from tfdist_ext.strategies import create_strategy
from tfdist_ext.strategies.explanation import evaluates
from tfdist_ext.strategies.factory import check_spans_cluster
from tfdist_ext.strategies.reductions import bucket_bytes_of
from tfdist_ext.training._keras_private import metrics_in_order, overrides, train_validation_split
from tfdist_ext.training.agreement.barriers import peers_of
from tfdist_ext.training.agreement.equality import (
    SAME_ARGUMENTS,
    SAME_DATA,
    SAME_MODEL,
    check_equal_across_workers,
    describe_data,
)
from tfdist_ext.training.agreement.model_description import describe_model
from tfdist_ext.training.agreement.task_status import on_every_worker
from tfdist_ext.training.building.build import (
    adopt,
    batch_normalization_layers,
    build,
    build_sharded_optimizers,
    creation_scope,
    deferred_builds,
    recompile,
)
from tfdist_ext.training.callbacks.in_cluster import (
    Callbacks,
    callbacks_of_this_task,
    check_supported,
    overridable,
    redirect_model_methods,
    redirected_method,
    refusing_compile,
)
from tfdist_ext.training.callbacks.worker_tensorboard import WorkerTensorBoard
from tfdist_ext.training.checkpoints.evaluator import evaluate_checkpoints
from tfdist_ext.training.checkpoints.format import Progress
from tfdist_ext.training.checkpoints.manager import CheckpointManager
from tfdist_ext.training.checkpoints.saving import SavingMixin
from tfdist_ext.training.inputs import Epochs, GlobalBatches, read
from tfdist_ext.training.loop import Loop, Validation, end_training, predict, train
from tfdist_ext.training.parameter_server.engine import (
    ParameterServerEngine,
    ParameterServerPredictor,
)
from tfdist_ext.training.sharded_inputs import check_no_other_arguments, read_sharded
from tfdist_ext.training.state import (
    broadcast_variables,
    run_on_chief,
    sharded_bytes,
    snapshot,
    state_of,
    whole_slots,
)
from tfdist_ext.training.steps.scope import Logs
from tfdist_ext.training.synchronous.engine import (
    Predictor,
    SynchronousEngine,
    SynchronousProgram,
)
from tfdist_ext.training.synchronous.model_step import OneTrace
from tfdist_ext.user_frames import filter_traceback, warn

__all__ = ["DistributedModel", "check_counts", "distribute"]


@filter_traceback
class DistributedModel(SavingMixin):
    """A Keras model that trains on all replicas of a strategy.

    All batch sizes are global: the number of examples of one step, over all replicas of all tasks.
    In a cluster, all tasks make the same calls with the same data.
    """

    def __init__(
        self,
        model_or_builder: keras.Model | Callable[[], keras.Model],
        strategy: tf.distribute.Strategy,
        *,
        synchronize_batch_norm: bool | None = None,
        one_trace: OneTrace = "auto",
    ):
        """Arguments and errors are those of `distribute`."""
        self._created: list[tf.Variable] = []  # they do not have the chief's values yet
        self._model = adopt(model_or_builder, strategy, self._created)
        self._builder = None if isinstance(model_or_builder, keras.Model) else model_or_builder
        self._strategy = strategy
        self._synchronize_batch_norm = synchronize_batch_norm
        self._built_for = None
        self._progress = Progress()
        self._loops: dict[tuple[str, bool], Loop] = {}  # by kind, and whether steps are timed
        self._predictor: Predictor | ParameterServerPredictor | None = None
        self._predictor_made_for: tuple[object, ...] = ()
        self._engine: SynchronousEngine | ParameterServerEngine
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            self._engine = ParameterServerEngine(strategy)
        else:
            self._engine = SynchronousEngine(strategy, one_trace)
        self._reduction = self._engine.reduction
        self._check_batch_normalization()
        # Of a running fit, for the model's own evaluate.
        self._cached_validation: tuple[Epochs, keras.callbacks.CallbackList] | None = None
        self._compared: tuple[object, ...] | None = None  # what `compile` had set
        self._unify()

    @property
    def keras_model(self) -> keras.Model:
        """The Keras model. Its variables are on the devices of the strategy."""
        return self._model

    @property
    def strategy(self) -> tf.distribute.Strategy:
        return self._strategy

    def traces(self) -> list[str]:
        """Returns the lines of `tfd.explain` about traces and unsynchronized layers."""
        found = {kind: loop.program.traces for (kind, _), loop in self._loops.items()}
        if self._predictor is not None:
            found["predict"] = self._predictor.traces
        traces = [f"{kind}: {how}" for kind, how in found.items()]
        here, whole = sharded_bytes(self._model)
        shared = f"optimizer state: {size_text(here)} of {size_text(whole)} here" if whole else ""
        return [*traces, *filter(None, [shared, self._unsynchronized()])]

    @overridable
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
        epochs = min(epochs, keras.config.max_epochs() or epochs)
        counts = {
            "batch_size": batch_size,
            "epochs": epochs,
            "initial_epoch": initial_epoch,
            "steps_per_epoch": steps_per_epoch,
            "validation_steps": validation_steps,
            "validation_batch_size": validation_batch_size,
            "checkpoint_every": checkpoint_every,
        }
        check_supported(callbacks, self._strategy)
        self._check_call(
            "fit",
            counts,
            x=x,
            shuffle=shuffle,
            class_weight=class_weight,
            validation_data="none" if validation_data is None else "given",
            validation_split=validation_split,
            validation_freq=validation_freq,
            checkpoint_dir="none" if checkpoint_dir is None else "given",
        )
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        sizes = {"batch_size": validation_batch_size or batch_size, "steps": validation_steps}
        if (cluster := evaluates(self._strategy)) is not None:
            self._reduction.peers.enters("")  # it waits for checkpoints, as long as it takes
            evaluate_checkpoints(
                self,
                cluster,
                checkpoint_dir=checkpoint_dir,
                epochs=epochs,
                validation_data=validation_data,
                callbacks=callbacks,
                verbose=verbose,
                **sizes,
            )
        saved = None
        # Whether `fit` knows at each step where it is in this data.
        keeps_position = isinstance(x, ShardedDataset) and not self._workers_may_read(x)
        if checkpoint_dir is not None:
            saved = CheckpointManager(
                checkpoint_dir,
                self._model,
                self._reduction,
                x if keeps_position else None,
                checkpoint_every,
                epochs,
                in_background=checkpoint_async and isinstance(self._engine, SynchronousEngine),
            )
        elif checkpoint_every is not None:
            raise TrainingError("checkpoint_every needs checkpoint_dir, a folder for checkpoints.")
        how = {"batch_size": batch_size, "shuffle": shuffle, "class_weight": class_weight}
        seed = self._new_seed if saved is None else saved.seed
        arrays = x, y, sample_weight
        data = self._read("train", *arrays, steps=steps_per_epoch, seed=seed, **how)
        data.reset()
        validation = self._validation(validation_data, sizes, validation_freq)
        hooks = self._callbacks(
            callbacks, verbose, epochs=epochs, steps=data.steps, add_history=True
        )
        self._model.stop_training = False
        if saved is not None:
            initial_epoch = saved.resume(data, initial_epoch, hooks.callbacks)
        is_chief = self._reduction.is_chief
        with (
            contextlib.nullcontext() if saved is None else saved.training(),
            redirect_model_methods(self, self._model, is_chief=is_chief),
        ):
            with refusing_compile(self._model, "fit"):
                hooks.on_train_begin()
                if saved is not None:
                    saved.training_has_begun()
                remaining = range(initial_epoch, epochs)
                logs: Logs = {}
                loop = self._train_loop(hooks)
                for each in train(loop, remaining, data, hooks, saved, validation):
                    logs, self._progress = each
                if isinstance(self._model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                    self._engine.finalize(self._model)
            end_training(self._reduction, logs, hooks, saved)
        return self._model.history

    def _train_loop(self, hooks: keras.callbacks.CallbackList) -> Loop:
        """The training steps, which a WorkerTensorBoard times."""
        boards = [each for each in hooks.callbacks if isinstance(each, WorkerTensorBoard)]
        if len(boards) > 1:  # the times of a step can only be read once
            raise TrainingError(
                f"`fit` got {len(boards)} WorkerTensorBoard callbacks. Pass only one."
            )
        loop = self._loop("train", timed=bool(boards))
        for board in boards:
            assert isinstance(loop.program, SynchronousProgram)
            board.follow(loop.program, self._reduction)
        return loop

    def _loop(self, kind: str, *, timed: bool = False) -> Loop:
        """Returns the loop of "train" or "test" steps; a new one after `compile`."""
        model, found = self._model, self._loops.get((kind, timed))
        if found is None or found.made_for != _compiled_parts(model):
            program = self._engine.make_program(model, kind, timed=timed)  # may change settings
            found = Loop(model, self._reduction, kind, program, made_for=_compiled_parts(model))
            self._loops[kind, timed] = found
        return found

    @overridable
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
        if _use_cached_eval_dataset and self._cached_validation is not None:
            logs = self._evaluate(*self._cached_validation)
            return logs if return_dict else metrics_in_order(self._model, logs)
        self._check_call("evaluate", {"batch_size": batch_size, "steps": steps}, x=x)
        data = x, y, sample_weight
        epochs = self._read("test", *data, batch_size=batch_size, steps=steps)
        hooks = self._callbacks(callbacks, verbose, epochs=1, steps=epochs.steps)
        logs = self._evaluate(epochs, hooks)
        return logs if return_dict else metrics_in_order(self._model, logs)

    @overridable
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
        self._check_call("predict", {"batch_size": batch_size, "steps": steps}, x=x)
        if isinstance(x, FunctionDataset) and (
            self._reduction.multi_worker or self._workers_may_read(x)
        ):
            raise TrainingError(
                "`predict` cannot use from_dataset_fn on several workers, where examples have no"
                " order. Use from_arrays, from_tfrecords, arrays, or a tf.data.Dataset."
            )
        epochs = self._read("predict", x, batch_size=batch_size, steps=steps)
        return self._predict(
            epochs, self._callbacks(callbacks, verbose, epochs=1, steps=epochs.steps)
        )

    @overridable
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
        logs = self._on_batch("train", (x, y, sample_weight), class_weight=class_weight)
        return logs if return_dict else metrics_in_order(self._model, logs)

    @overridable
    @on_every_worker
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Returns the loss and metrics of one global batch, like `keras.Model.test_on_batch`."""
        logs = self._on_batch("test", (x, y, sample_weight))
        return logs if return_dict else metrics_in_order(self._model, logs)

    @overridable
    @on_every_worker
    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs for one global batch, as NumPy arrays on every task."""
        epochs = self._read("predict", x, batch_size=_rows(x))
        return self._predict(epochs, keras.callbacks.CallbackList())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Keras model's outputs for tensors, computed on this task alone."""
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the Keras model: `summary`, `layers`, or `generate` of KerasHub.

        A method of the Keras model runs on this task, on the first replica's copies of the
        variables. Its own calls of `self.fit`, `self.evaluate`, `self.predict`, ... run on the
        whole strategy. `compile` and `build` create variables for the strategy. Only the chief
        calls methods that are named `save_...` or `export_...`, and the other tasks wait.
        """
        if name.startswith("_"):  # also where this object is not complete, as in copy and pickle
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in REFUSED:
            return functools.partial(_refuse, name)
        found = getattr(self._model, name)
        if name in CREATING:
            return filter_traceback(functools.partial(self._create, name, found))
        if getattr(found, "__self__", None) is not self._model:
            return found
        method = redirected_method(self, found)
        if name.startswith(("save_", "export_")):
            return filter_traceback(functools.partial(self._write, name, method))
        return method

    def _create(self, name: str, method: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        with self._reduction.call(name):
            with creation_scope(self._strategy, self._created):
                method(*args, **kwargs)
            self._unify()

    def _write(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._reduction.call(name):
            write = functools.partial(method, *args, **kwargs)
            with whole_slots(self._reduction, self._model):
                return run_on_chief(self._reduction, write, f"do {name}()")

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._model)})

    def __repr__(self) -> str:
        replicas = self._strategy.num_replicas_in_sync
        return (
            f"<DistributedModel {self._model.name!r} on {type(self._strategy).__name__}, replicas:"
            f" {replicas}; keras_model is the Keras model>"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def _predict(self, epochs: Epochs, hooks: keras.callbacks.CallbackList) -> Any:
        compiled = _compiled_parts(self._model)
        if self._predictor is None or self._predictor_made_for != compiled:
            self._predictor = self._engine.make_predictor(self._model)
            self._predictor_made_for = compiled
        return predict(self._model, self._reduction, self._predictor, epochs, hooks)

    def _on_batch(self, kind: str, data: tuple[Any, ...], **options: Any) -> Logs:
        self._check_call(f"{kind}_on_batch", {})
        epochs = self._read(kind, *data, batch_size=_rows(data[0]), **options)
        with epochs.next() as batch:
            return self._loop(kind).run(batch, keras.callbacks.CallbackList())[0]

    def _validation(
        self, data: Any, sizes: dict[str, Any], frequency: int | list[int]
    ) -> Validation | None:
        """Reads the validation data of a `fit`; None without data."""
        if data is None:
            return None
        if frequency == 0 or not isinstance(frequency, int | list | tuple | set):
            raise TrainingError(
                f"validation_freq must be a number of epochs, or a list of epochs from 1, got"
                f" {frequency!r}."
            )
        arrays = keras.utils.unpack_x_y_sample_weight(data)
        batches = self._global_batches(*arrays, **sizes)
        epochs = self._epochs(batches, sizes["steps"], "validation ")
        # What Keras's fit passes to the model's own evaluate.
        given = {**dict(zip(("x", "y", "sample_weight"), arrays, strict=True)), **sizes}

        def evaluate(hooks: keras.callbacks.CallbackList) -> Logs:
            if not overrides(self._model, "evaluate"):
                return self._evaluate(epochs, hooks)
            self._cached_validation = epochs, hooks
            try:
                options = {"return_dict": True, "_use_cached_eval_dataset": True}
                return dict(self.evaluate(**given, callbacks=hooks, **options))
            finally:
                self._cached_validation = None

        return Validation(evaluate, frequency)

    def _evaluate(self, epochs: Epochs, hooks: keras.callbacks.CallbackList) -> Logs:
        self._model.stop_evaluating = False
        # A callback may evaluate in the middle of an epoch of a fit, and a checkpoint follows.
        is_training = any(loop.is_running for loop in self._loops.values())
        restore_metrics = snapshot(self._model.metrics_variables if is_training else ())
        with refusing_compile(self._model, "evaluate"):
            epochs.rewind()
            hooks.on_test_begin()
            with epochs.next() as data:
                logs, steps = self._loop("test").run(data, hooks)
        epochs.end_epoch(data, steps, stopped=bool(self._model.stop_evaluating))
        hooks.on_test_end(logs)
        restore_metrics()
        return logs

    def _callbacks(
        self, callbacks: Callbacks, verbose: str | int, **params: Any
    ) -> keras.callbacks.CallbackList:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        chief = self._reduction.is_chief
        verbose = 1 if verbose == "auto" else int(verbose)
        return keras.callbacks.CallbackList(
            callbacks_of_this_task(callbacks, is_chief=chief),
            add_progbar=chief and verbose != 0,
            model=self._model,
            verbose=verbose,
            **params,
        )

    def _check_call(self, call: str, counts: dict[str, Any], **arguments: Any) -> None:
        """Check the arguments of a call; all workers must get the same ones."""
        check_counts(**counts)
        if not self._model.compiled and not call.startswith("predict"):
            raise TrainingError(
                f"the model must be compiled for {call}(). Call compile(optimizer, loss) in the"
                " function given to distribute(), or on the model before it is distributed."
            )
        if self._reduction.multi_worker:
            check_equal_across_workers(self._reduction, {**counts, **arguments}, SAME_ARGUMENTS)

    def _workers_may_read(self, x: Any) -> TypeGuard[FunctionDataset]:
        """Returns whether workers of parameter servers may read this data themselves."""
        on_servers = isinstance(self._engine, ParameterServerEngine)
        return on_servers and isinstance(x, FunctionDataset) and not x.takes_epoch

    def _new_seed(self) -> int:
        """Returns a seed for the order of examples, from Python's generator, as in Keras."""
        return int(self._reduction.from_chief(random.randint(1, 2**31 - 1)))

    def _global_batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        seed: Callable[[], int] | None = None,
        **options: Any,
    ) -> GlobalBatches:
        """Reads the data of a call as global batches; see `inputs.read`.

        Args:
            seed: given for data to train on. Without it, a ShardedDataset is read from its start.
        """
        if not isinstance(x, ShardedDataset):
            replicas = self._reduction.replicas
            return read(x, y, sample_weight, seed=seed, replicas=replicas, **options)
        given = {name: options.get(name) for name in ("class_weight", "batch_size")}
        check_no_other_arguments(x, y=y, sample_weight=sample_weight, **given)
        on_workers = None
        if isinstance(self._engine, ParameterServerEngine) and self._workers_may_read(x):
            on_workers = self._engine.batches_on_workers(x)
        return on_workers or read_sharded(x, self._reduction, from_position=seed is not None)

    def _read(self, kind: str, *data: Any, steps: int | None = None, **options: Any) -> Epochs:
        """Reads the data of a call, and builds the model for its kind of step."""
        batches = self._global_batches(*data, steps=steps, **options)
        epochs = self._epochs(batches, steps)
        self._build(batches, kind)
        return epochs

    def _epochs(self, batches: GlobalBatches, steps: int | None, of: str = "") -> Epochs:
        """Returns the epochs of a call, and compares the data of all workers."""
        inspect = None
        if self._reduction.multi_worker:
            # TensorFlow may know the batch size of one worker's dataset and not of another's.
            batch_size = batches.batch_size if batches.dataset is None else None
            sizes = {"batch_size": batch_size, "batches in the data": batches.steps}
            sizes = {f"{of}{name}": size for name, size in sizes.items()}
            check_equal_across_workers(self._reduction, sizes, SAME_ARGUMENTS)

            def compare(data: Structure) -> None:
                described = describe_data(data, of)
                check_equal_across_workers(self._reduction, described, SAME_DATA)

            if batches.arrays is not None:
                compare(batches.arrays)
            if batches.dataset is not None:
                inspect = compare
        feed = functools.partial(self._engine.feed, eagerly=bool(self._model.run_eagerly))
        return Epochs(batches, feed, steps, inspect)

    def _build(self, batches: GlobalBatches, kind: str) -> None:
        """Create variables, metrics and optimizer slots, before a step is traced."""
        self._built_for = batches.element_spec
        if kind != "predict":
            recompile(self._model, self._strategy, self._created)
        build(self._model, self._built_for, self._strategy, self._created, kind=kind)
        self._check_batch_normalization()  # of layers that are made in the first call, too
        self._unify()

    def _unsynchronized(self) -> str:
        """Returns a sentence about BatchNormalization that is not synchronized, or ""."""
        layers = batch_normalization_layers(self._model)
        names = [layer.name for layer in layers if layer.trainable and not layer.synchronized]
        if not names or self._strategy.num_replicas_in_sync == 1 or self._model.run_eagerly:
            return ""
        return (
            f"BatchNormalization is not synchronized in {counted(len(names), 'layer')}"
            f" {shown(names)}: each replica normalizes its own rows of the global batch"
        )

    def _check_batch_normalization(self) -> None:
        """Turn on `synchronized`, or warn once where it is off."""
        if self._synchronize_batch_norm:
            for layer in batch_normalization_layers(self._model):
                layer.synchronized = True
        elif self._synchronize_batch_norm is None and (layers := self._unsynchronized()):
            self._synchronize_batch_norm = False
            if self._reduction.is_chief:
                warn(
                    f"{layers}, so training differs from one device. Pass"
                    " synchronize_batch_norm=True to tfd.distribute to normalize over the global"
                    " batch, or synchronize_batch_norm=False to keep this and silence the warning."
                )

    def _unify(self) -> None:
        """Compare the workers' models, and give new variables the chief's values.

        Models are compared when they have new variables, and after `compile`. Every worker must
        call.
        """
        created = list({id(variable): variable for variable in self._created}.values())
        self._created.clear()
        if not self._reduction.multi_worker:
            return
        compiled = _compiled_parts(self._model)
        is_new = bool(created or deferred_builds(self._model)) or self._compared != compiled
        if self._reduction.any_worker(is_new):
            described = describe_model(self._model, created)
            described["bucket_bytes of the strategy"] = bucket_bytes_of(self._strategy)
            check_equal_across_workers(self._reduction, described, SAME_MODEL)
            # Weights that came along are each worker's own.
            others = state_of(self._model).values() if self._compared is None else ()
            broadcast_variables(self._reduction, [*others, *created])
            build_sharded_optimizers(self._model, self._reduction)
            self._compared = compiled


def _compiled_parts(model: keras.Model) -> tuple[object, ...]:
    """Returns the settings of `compile`. Steps are compiled again after one of them changes."""
    eagerly = bool(model.run_eagerly)
    if not model.compiled:
        return (eagerly,)
    return model.optimizer, model.loss, model.metrics, eagerly, model.jit_compile


# Methods of Keras's models that create variables.
CREATING = ("build", "build_from_config", "compile", "compile_from_config")

# Methods of Keras's models that would do something on one replica alone -> what to do instead.
_ONE_STEP = (
    "It would change only the copies of the first replica. Call {}, which runs on all replicas."
)
_COMPILED = "fit(), evaluate() and predict() compile their own steps, and compile() drops them."
_VARIABLES = "Call it on the model before distribute(), which creates variables for the strategy."
REFUSED = {
    "train_step": _ONE_STEP.format("train_on_batch(x, y)"),
    "test_step": _ONE_STEP.format("test_on_batch(x, y)"),
    "predict_step": _ONE_STEP.format("predict_on_batch(x)"),
    **dict.fromkeys([f"make_{kind}_function" for kind in ("train", "test", "predict")], _COMPILED),
    **dict.fromkeys(["add_weight", "add_variable", "quantize", "quantized_build"], _VARIABLES),
}


@filter_traceback
def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise TrainingError(f"Do not call {name}() on a DistributedModel. {REFUSED[name]}")


def _rows(x: Any) -> int:
    first = keras.tree.flatten(x)[0]
    return int(first.shape[0]) if hasattr(first, "shape") else len(first)  # sparse: has no len()


@filter_traceback
def distribute(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy | None = None,
    *,
    synchronize_batch_norm: bool | None = None,
    one_trace: OneTrace = "auto",
) -> DistributedModel:
    """Distributes a Keras model over the replicas of a strategy.

    Args:
        model_or_builder: a function without arguments that returns a Keras model, or an existing
            model. An existing model is copied with its weights, compile settings and optimizer
            state, and does not change.
        strategy: any `tf.distribute.Strategy`. The default is the strategy of the current scope,
            or `create_strategy()` outside of a scope.
        synchronize_batch_norm: if True, sets `synchronized=True` in every BatchNormalization, so
            that it normalizes with the statistics of the global batch, as on one device. A saved
            model keeps the setting. If False or None, each replica normalizes with the statistics
            of its own rows, unless a layer is already synchronized. None also warns if several
            replicas train such a layer.
        one_trace: if True, TensorFlow traces each step once for all replicas of a task, which makes
            the first step shorter. If a step cannot be traced once, a warning and
            `tfd.explain(model)` give the reason. If False, TensorFlow traces each step once per
            replica. "auto" means True on CPUs, and False on GPUs and TPUs, where a single trace
            is not tested.

    Returns:
        A `DistributedModel`.

    Raises:
        TrainingError: the first argument is not a model and does not return one, the model cannot
            be copied from its config, or `strategy` is not a strategy.
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
    with peers_of(strategy).call("distribute"):
        return DistributedModel(
            model_or_builder,
            strategy,
            synchronize_batch_norm=synchronize_batch_norm,
            one_trace=one_trace,
        )


def check_counts(**counts: Any) -> None:
    """Raise TrainingError for a count that is not a whole number, or is too small."""
    for name, value in counts.items():
        least = 1 if name.endswith(("batch_size", "_every")) else 0  # 0 steps are all, as in Keras
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise TrainingError(f"{name} must be a whole number from {least}, got {value!r}.")
