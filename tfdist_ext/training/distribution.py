"""What a distributed model has beyond Keras: its strategy, its engine and its compiled steps.

`Distribution` puts the parts of a training together: the data of a call becomes global batches, the
model is built for them, and its steps are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data._keras_private import train_validation_split
from tfdist_ext.data.batches import Batches
from tfdist_ext.data.epochs import Epochs
from tfdist_ext.data.pipelines import Specs, Structure
from tfdist_ext.data.reading import batches_of
from tfdist_ext.errors import TrainingError
from tfdist_ext.messages import counted, shown
from tfdist_ext.placement.specs import size_text
from tfdist_ext.strategies.explanation import evaluates
from tfdist_ext.strategies.owned_sums import sums_of
from tfdist_ext.training._keras_private import layers_of, raw_value
from tfdist_ext.training.agreement.equality import (
    SAME_ARGUMENTS,
    SAME_DATA,
    SAME_MODEL,
    check_equal_across_workers,
    describe_data,
    describe_model,
)
from tfdist_ext.training.building import (
    adopt,
    build,
    build_sharded_optimizers,
    creation_scope,
    deferred_builds,
    move,
)
from tfdist_ext.training.callbacks.callback_state import Callbacks
from tfdist_ext.training.callbacks.worker_tensorboard import WorkerTensorBoard
from tfdist_ext.training.checkpoints.evaluator import evaluate_checkpoints
from tfdist_ext.training.checkpoints.format import Progress
from tfdist_ext.training.checkpoints.manager import CheckpointManager
from tfdist_ext.training.loop import (
    Loop,
    MadeFor,
    Validation,
    compile_settings,
    end_training,
    predict,
    train,
)
from tfdist_ext.training.parameter_server.engine import (
    ParameterServerEngine,
    ParameterServerPredictor,
)
from tfdist_ext.training.state import (
    broadcast_variables,
    check_equal_weights,
    run_on_chief,
    sharded_bytes,
    snapshot,
    state_of,
    whole_slots,
)
from tfdist_ext.training.steps.scope import Logs, metrics_and_others
from tfdist_ext.training.synchronous.engine import (
    Predictor,
    SynchronousEngine,
    SynchronousProgram,
)
from tfdist_ext.training.synchronous.model_step import OneTrace
from tfdist_ext.user_frames import warn

# They write files, or print: only the chief runs them.
_WRITING_CALLBACKS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),  # since Keras 3.15
)

# Arguments of `fit`: numbers, and others that must be the same on all workers.
_COUNTS = (
    *("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "validation_steps"),
    *("validation_batch_size", "checkpoint_every"),
)
_EQUAL = ("x", "shuffle", "class_weight", "validation_split", "validation_freq")


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `DistributedModel.fit`."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: Callbacks
    validation_split: float
    validation_data: Any
    shuffle: bool | str
    class_weight: dict[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | list[int]
    checkpoint_dir: str | Path | None
    checkpoint_every: int | None
    checkpoint_async: bool

    @property
    def validation_sizes(self) -> dict[str, Any]:
        """The arguments that `evaluate` gets."""
        batch_size = self.validation_batch_size or self.batch_size
        return {"batch_size": batch_size, "steps": self.validation_steps}

    def resolved(self) -> FitArguments:
        """Returns the arguments with Keras's limit of epochs, and with the data split."""
        epochs = min(self.epochs, keras.config.max_epochs() or self.epochs)
        if not self.validation_split or self.validation_data is not None:
            return replace(self, epochs=epochs)
        (x, y, sample_weight), validation_data = train_validation_split(
            (self.x, self.y, self.sample_weight), validation_split=self.validation_split
        )
        data = {"x": x, "y": y, "sample_weight": sample_weight}
        return replace(self, epochs=epochs, validation_data=validation_data, **data)


class Distribution:
    """The strategy of a distributed model, its engine, and its compiled steps.

    Attributes:
        model: its variables are in the strategy.
        progress: of the training: epochs and steps.
        built_for: tf.TypeSpecs of a global batch, after the first call; None before.
        cached_validation: the validation data of the running `fit`, and its callbacks.
        fits: the number of running calls of `fit`, which a callback may nest.
    """

    def __init__(
        self,
        model_or_builder: keras.Model | Callable[[], keras.Model],
        strategy: tf.distribute.Strategy,
        synchronize_batch_norm: bool | None,
        one_trace: OneTrace,
        lazy_updates: bool,
    ):
        """Arguments and errors are those of `distribute`."""
        self._created: list[tf.Variable] = []  # not yet broadcast from the chief
        self.model = adopt(model_or_builder, strategy, self._created)
        self.strategy = strategy
        self.progress = Progress()
        self.built_for: Specs = None
        self.cached_validation: tuple[Epochs, keras.callbacks.CallbackList] | None = None
        self.fits = 0
        self._synchronize_batch_norm = synchronize_batch_norm
        self._running: list[str] = []  # methods that run compiled steps
        self._loops: dict[tuple[str, bool], Loop] = {}  # by kind, and whether steps are timed
        self._predictor: tuple[Predictor | ParameterServerPredictor, MadeFor] | None = None
        self.engine: SynchronousEngine | ParameterServerEngine
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            self.engine = ParameterServerEngine(strategy, lazy_updates=lazy_updates)
        else:
            self.engine = SynchronousEngine(strategy, one_trace, lazy_updates=lazy_updates)
        self.reduction = self.engine.reduction
        self._check_batch_normalization()
        self._compared: tuple[object, ...] | None = None  # what `compile` had set
        self._unify()
        self._move()

    def traces(self) -> list[str]:
        """Returns the lines of `tfd.explain` about traces and unsynchronized layers."""
        programs = {kind: loop.program.traces for (kind, _), loop in self._loops.items()}
        if self._predictor is not None:
            programs["predict"] = self._predictor[0].traces
        traces = [f"{kind}: {how}" for kind, how in programs.items()]
        here, whole = sharded_bytes(self.model)
        shared = f"optimizer state: {size_text(here)} of {size_text(whole)} here" if whole else ""
        return [*traces, *filter(None, [shared, self._unsynchronized()])]

    @contextlib.contextmanager
    def refusing_compile(self, method: str) -> Iterator[None]:
        """Scope of running steps, in which `compile` is refused."""
        self._running.append(method)
        try:
            yield
        finally:
            self._running.remove(method)

    def forget_steps(self) -> None:
        """Makes the next calls compile their steps again."""
        self._loops.clear()
        self._predictor = None

    def check_is_idle(self, call: str) -> None:
        """Raises TrainingError if compiled steps run."""
        for method in self._running[-1:]:
            raise TrainingError(
                f"{call}() was called while {method}() is running with steps already compiled."
                f" Call {call}() before or after {method}()."
            )

    def write(self, name: str, action: Callable[[], Any], what: str = "") -> Any:
        """Calls a function that writes files, on the chief alone.

        Every worker must call, and waits for the chief. In a `fit` the other tasks do nothing and
        do not wait, because they may not run the callback that writes.
        """
        if self.fits:
            return action() if self.reduction.is_chief else None
        with self.reduction.call(name), whole_slots(self.reduction, self.model):
            return run_on_chief(self.reduction, action, what or f"do {name}()")

    def complete_optimizer(self) -> None:
        """Builds the optimizer's slots, if no step has made them yet."""
        self._move()
        optimizer = getattr(self.model, "optimizer", None)  # there is none before compile
        if optimizer is not None and not optimizer.built:
            with creation_scope(self.strategy, self._created):
                optimizer.build(self.model.trainable_variables)
            build_sharded_optimizers(self.model, self.reduction)

    def fit(self, call: FitArguments) -> keras.callbacks.History:
        """Checks the arguments, makes batches, builds the model, resumes and trains."""
        self._check_fit(call)
        call = call.resolved()
        if (cluster := evaluates(self.strategy)) is not None:
            self.reduction.peers.enters("")  # it waits for checkpoints, as long as it takes
            evaluate_checkpoints(
                self.model,
                cluster,
                checkpoint_dir=call.checkpoint_dir,
                epochs=call.epochs,
                validation_data=call.validation_data,
                callbacks=call.callbacks,
                verbose=call.verbose,
                **call.validation_sizes,
            )
        saved = None
        if call.checkpoint_dir is not None:
            in_background = call.checkpoint_async and isinstance(self.engine, SynchronousEngine)
            folder, every = call.checkpoint_dir, call.checkpoint_every
            saved = CheckpointManager(
                folder, self.model, self.reduction, every, call.epochs, in_background=in_background
            )
        data = self.read(
            "train",
            *(call.x, call.y, call.sample_weight),
            batch_size=call.batch_size,
            steps=call.steps_per_epoch,
            shuffle=call.shuffle,
            class_weight=call.class_weight,
            seed=self.reduction.seed if saved is None else saved.seed,
        )
        if self.reduction.multi_worker:
            check_equal_weights(self.reduction, self.model)
        data.reset()
        validation = self._validation(call)
        params = {"epochs": call.epochs, "steps": data.steps, "add_history": True}
        hooks = self.callbacks(call.callbacks, call.verbose, **params)
        self.model.stop_training = False
        first = call.initial_epoch
        if saved is not None:
            first = saved.resume(data, first, hooks.callbacks)
        self.train(range(first, call.epochs), data, hooks, saved, validation)
        return self.model.history

    def _check_fit(self, call: FitArguments) -> None:
        """Check the arguments of a `fit`; all workers must get the same ones."""
        check_supported(call.callbacks, self.strategy)
        counts = {name: getattr(call, name) for name in _COUNTS}
        equal = {name: getattr(call, name) for name in _EQUAL}
        for name in ("validation_data", "checkpoint_dir"):  # which may differ between machines
            equal[name] = "none" if getattr(call, name) is None else "given"
        self.check_call("fit", counts, **equal)
        if call.checkpoint_every is not None and call.checkpoint_dir is None:
            raise TrainingError("checkpoint_every needs checkpoint_dir, a folder for checkpoints.")

    def train(
        self,
        epochs: range,
        data: Epochs,
        hooks: keras.callbacks.CallbackList,
        saved: CheckpointManager | None,
        validation: Validation | None,
    ) -> None:
        """Trains the epochs of a `fit`. Its callbacks may run on the chief alone."""
        self.fits += 1
        try:
            with contextlib.nullcontext() if saved is None else saved.training():
                with self.refusing_compile("fit"):
                    hooks.on_train_begin()
                    if saved is not None:
                        saved.training_has_begun()
                    logs: Logs = {}
                    self.progress = Progress(epochs.start) if saved is None else saved.progress
                    loop = self.train_loop(hooks)
                    done = train(loop, epochs, data, hooks, saved, validation)
                    for epoch_logs, self.progress in done:
                        logs = epoch_logs
                    if saved is not None:
                        self.progress = saved.progress
                    if isinstance(self.model.optimizer, keras.optimizers.Optimizer) and epochs.stop:
                        self.engine.finalize(self.model)
                end_training(self.reduction, logs, hooks, saved)
        finally:
            self.fits -= 1

    def train_loop(self, hooks: keras.callbacks.CallbackList) -> Loop:
        """The training steps, which a WorkerTensorBoard times."""
        boards = [hook for hook in hooks.callbacks if isinstance(hook, WorkerTensorBoard)]
        if len(boards) > 1:  # the times of a step can only be read once
            raise TrainingError(
                f"`fit` got {len(boards)} WorkerTensorBoard callbacks. Pass only one."
            )
        loop = self.loop("train", timed=bool(boards))
        for board in boards:
            assert isinstance(loop.program, SynchronousProgram)
            board.follow(loop.program, self.reduction)
        return loop

    def loop(self, kind: str, *, timed: bool = False) -> Loop:
        """Returns the loop of "train" or "test" steps; a new one after `compile`."""
        model, loop = self.model, self._loops.get((kind, timed))
        if loop is None or not loop.made_for.is_current():
            program = self.engine.make_program(model, kind, timed=timed)  # may change settings
            loop = Loop(model, self.reduction, kind, program, made_for=MadeFor(model))
            self._loops[kind, timed] = loop
        return loop

    def predict(self, epochs: Epochs, hooks: keras.callbacks.CallbackList) -> Any:
        if self._predictor is None or not self._predictor[1].is_current():
            self._predictor = self.engine.make_predictor(self.model), MadeFor(self.model)
        return predict(self.model, self.reduction, self._predictor[0], epochs, hooks)

    def on_batch(self, kind: str, data: tuple[Any, ...], **options: Any) -> Logs:
        self.check_call(f"{kind}_on_batch", {})
        epochs = self.read(kind, *data, batch_size=rows_of_arrays(data[0]), **options)
        with epochs.next() as batch:
            return self.loop(kind).run(batch, keras.callbacks.CallbackList())[0]

    def _validation(self, call: FitArguments) -> Validation | None:
        """Reads the validation data of a `fit`; None without data."""
        data, sizes, frequency = call.validation_data, call.validation_sizes, call.validation_freq
        if data is None:
            return None
        if frequency == 0 or not isinstance(frequency, int | list | tuple | set):
            raise TrainingError(
                f"validation_freq must be a number of epochs, or a list of epochs from 1, got"
                f" {frequency!r}."
            )
        arrays = keras.utils.unpack_x_y_sample_weight(data)
        batches = batches_of(*arrays, readers=self.engine.readers, **sizes)
        epochs = self.epochs(batches, sizes["steps"], "validation ")
        # What Keras's fit passes to the model's own evaluate.
        arguments = {**dict(zip(("x", "y", "sample_weight"), arrays, strict=True)), **sizes}

        def evaluate(epoch: int, hooks: keras.callbacks.CallbackList) -> Logs:
            number = epoch + 1
            is_due = number % frequency == 0 if isinstance(frequency, int) else number in frequency
            if not is_due:
                return {}
            self.cached_validation = epochs, hooks
            try:
                options = {"return_dict": True, "_use_cached_eval_dataset": True}
                return dict(self.model.evaluate(**arguments, callbacks=hooks, **options))
            finally:
                self.cached_validation = None

        return evaluate

    def evaluate(self, epochs: Epochs, hooks: keras.callbacks.CallbackList) -> Logs:
        self.model.stop_evaluating = False
        # A callback may evaluate in the middle of an epoch of a fit, and a checkpoint follows.
        is_in_callback = self.fits and self.cached_validation is None
        metrics, _ = metrics_and_others(self.model) if is_in_callback else ((), ())
        restore_metrics = snapshot(metrics)
        with self.refusing_compile("evaluate"):
            epochs.rewind()
            hooks.on_test_begin()
            with epochs.next() as data:
                logs, steps = self.loop("test").run(data, hooks)
        epochs.end_epoch(data, steps, stopped=bool(self.model.stop_evaluating))
        hooks.on_test_end(logs)
        restore_metrics()
        return logs

    def callbacks(
        self, callbacks: Callbacks, verbose: str | int, **params: Any
    ) -> keras.callbacks.CallbackList:
        chief = self.reduction.is_chief
        if isinstance(callbacks, keras.callbacks.CallbackList):
            if chief:
                return callbacks
            callbacks = callbacks.callbacks
        verbose = 1 if verbose == "auto" else int(verbose)
        return keras.callbacks.CallbackList(
            callbacks_of_this_task(callbacks, is_chief=chief),
            add_progbar=chief and verbose != 0,
            model=self.model,
            verbose=verbose,
            **params,
        )

    def check_call(self, call: str, counts: dict[str, Any], **arguments: Any) -> None:
        """Check the arguments of a call; all workers must get the same ones."""
        check_counts(**counts)
        if not self.model.compiled and not call.startswith("predict"):
            raise TrainingError(
                f"the model must be compiled for {call}(). Call compile(optimizer, loss) in the"
                " function given to distribute(), or on the model before it is distributed."
            )
        if self.reduction.multi_worker:
            check_equal_across_workers(self.reduction, {**counts, **arguments}, SAME_ARGUMENTS)

    def read(self, kind: str, *data: Any, steps: int | None = None, **options: Any) -> Epochs:
        """Reads the data of a call, and builds the model for its kind of step."""
        batches = batches_of(*data, steps=steps, readers=self.engine.readers, **options)
        if kind == "predict" and not batches.has_order:
            raise TrainingError(
                "`predict` cannot use from_dataset_fn on several workers, where examples have no"
                " order. Use from_arrays, from_tfrecords, arrays, or a tf.data.Dataset."
            )
        epochs = self.epochs(batches, steps)
        self.build(batches, kind)
        return epochs

    def epochs(self, batches: Batches, steps: int | None, prefix: str = "") -> Epochs:
        """Returns the epochs of a call, and compares the data of all workers."""
        eagerly, inspect = bool(self.model.run_eagerly), None
        if eagerly and batches.reads_own_shard:
            raise TrainingError(
                "run_eagerly=True computes each global batch on every worker, but from_dataset_fn"
                " gives each worker its own examples. Debug with one worker, or with arrays, a"
                " tf.data.Dataset, from_arrays or from_tfrecords."
            )
        if self.reduction.multi_worker:
            settings = {f"{prefix}{name}": value for name, value in batches.settings.items()}
            check_equal_across_workers(self.reduction, settings, SAME_ARGUMENTS)

            def compare(data: Structure) -> None:
                described = describe_data(data, prefix)
                check_equal_across_workers(self.reduction, described, SAME_DATA)

            if batches.arrays is not None:
                compare(batches.arrays)
            inspect = compare if batches.is_read_by_all else None
        feed = functools.partial(self.engine.feed, eagerly=eagerly)
        return Epochs(batches, feed, steps, inspect)

    def build(self, batches: Batches, kind: str) -> None:
        """Create variables, metrics and optimizer slots, before a step is traced."""
        self.built_for = batches.element_spec
        self._move()
        build(self.model, self.built_for, self.strategy, self._created, kind=kind)
        self._check_batch_normalization()  # of layers that are made in the first call, too
        self._unify()

    def _move(self) -> None:
        """Moves what is not in the strategy yet. Compiled steps use the old variables."""
        if move(self.model, self.strategy, self._created):
            self.forget_steps()

    def _unsynchronized(self) -> str:
        """Returns a sentence about BatchNormalization that is not synchronized, or ""."""
        layers = layers_of(self.model, keras.layers.BatchNormalization)
        names = [layer.name for layer in layers if layer.trainable and not layer.synchronized]
        if not names or self.strategy.num_replicas_in_sync == 1 or self.model.run_eagerly:
            return ""
        return (
            f"BatchNormalization is not synchronized in {counted(len(names), 'layer')}"
            f" {shown(names)}: each replica normalizes its own rows of the global batch"
        )

    def _check_batch_normalization(self) -> None:
        """Turn on `synchronized`, or warn once where it is off."""
        if self._synchronize_batch_norm:
            for layer in layers_of(self.model, keras.layers.BatchNormalization):
                layer.synchronized = True
        elif self._synchronize_batch_norm is None and (layers := self._unsynchronized()):
            self._synchronize_batch_norm = False
            if self.reduction.is_chief:
                warn(
                    f"{layers}, so training differs from one device. Pass"
                    " synchronize_batch_norm=True to tfd.distribute to normalize over the global"
                    " batch, or synchronize_batch_norm=False to keep this and silence the warning."
                )

    def _unify(self) -> None:
        """Compare the workers' models, and give new variables the chief's values.

        Models are compared when they have new variables, and after `compile`. A given model moves
        when it is equal on all workers. Every worker must call.
        """
        compiled = compile_settings(self.model)
        is_new = bool(self._created or deferred_builds(self.model)) or self._compared != compiled
        if self.reduction.multi_worker and self.reduction.any_worker(is_new):
            # Weights that came along are each worker's own.
            given_weights = state_of(self.model).values() if self._compared is None else ()
            described = describe_model(self.model, [*map(raw_value, given_weights), *self._created])
            sums = sums_of(self.strategy)
            described["bucket_bytes of the strategy"] = sums.bucket_bytes
            described["gradient_dtype of the strategy"] = sums.narrow and sums.narrow.dtype.name
            check_equal_across_workers(self.reduction, described, SAME_MODEL)
            self._move()
            broadcast_variables(self.reduction, [*given_weights, *self._created])
            build_sharded_optimizers(self.model, self.reduction)
            self._compared = compiled
        self._created.clear()


def callbacks_of_this_task(
    callbacks: Callbacks, *, is_chief: bool
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that run on this task: all on the chief, elsewhere no writers.

    Callbacks that change the training (EarlyStopping, schedules) run on every task. They decide the
    same, because logs are the same on every task.
    """
    flat = keras.tree.flatten(callbacks or [])
    if is_chief:
        return flat
    kept = [callback for callback in flat if not isinstance(callback, _WRITING_CALLBACKS)]
    for callback in kept:
        if getattr(callback, "verbose", 0):
            callback.verbose = 0
    return kept


def check_supported(callbacks: Callbacks, strategy: tf.distribute.Strategy) -> None:
    """Raises TrainingError for callbacks that do not work in a distributed `fit`."""
    for callback in keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or []):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise TrainingError(
                "fit() does not support the callback BackupAndRestore. Remove it, and call"
                " fit(checkpoint_dir=...), which saves each epoch and resumes."
            )
        is_swap = isinstance(callback, keras.callbacks.SwapEMAWeights)
        if is_swap and sums_of(strategy).owned is not None:
            raise TrainingError(
                "SwapEMAWeights needs the whole state of the optimizer, which workers share"
                " (shard_optimizer=True). Use a strategy without shard_optimizer=True."
            )


def rows_of_arrays(x: Any) -> int:
    """Returns the number of rows of the first array."""
    first = keras.tree.flatten(x)[0]
    return int(first.shape[0]) if hasattr(first, "shape") else len(first)  # sparse: has no len()


def check_counts(**counts: Any) -> None:
    """Raise TrainingError for a count that is not a whole number, or is too small."""
    for name, value in counts.items():
        least = 1 if name.endswith(("batch_size", "_every")) else 0  # 0 steps are all, as in Keras
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise TrainingError(f"{name} must be a whole number from {least}, got {value!r}.")
