"""DistributedModel: Keras's fit, evaluate and predict, on any synchronous strategy."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.strategies import create_strategy
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.adopt import adopt, build, recompile
from tfdist_ext.training.epochs import Epochs, validates
from tfdist_ext.training.inputs import GlobalBatches, read
from tfdist_ext.training.loop import Loop
from tfdist_ext.training.predicting import Predictor
from tfdist_ext.training.reduction import Reduction
from tfdist_ext.training.roles import follow_chief, follow_chief_if_restored, for_this_task
from tfdist_ext.training.same_data import check_same_call, warn_of_different_data
from tfdist_ext.training.steps import StepProgram

__all__ = ["DistributedModel", "distribute"]


def distribute(
    model_or_builder: keras.Model | Callable[[], keras.Model],
    strategy: tf.distribute.Strategy | None = None,
) -> DistributedModel:
    """Put a Keras model on a strategy.

    Args:
        model_or_builder: a function without arguments that returns a model (compiled or not),
            or an existing model, trained or not. Of an existing model a copy is made, with its
            weights, compile settings and optimizer state; the original stays as it is.
        strategy: any synchronous `tf.distribute.Strategy`; by default the one whose scope is
            open, else `create_strategy()`.

    Raises:
        TrainingError: not a model, one that cannot be copied from its config, or a strategy
            that is none or is asynchronous.
    """
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise TrainingError(
            f"strategy takes a tf.distribute.Strategy; {strategy!r} arrived. By name it is made"
            " with create_strategy(name)."
        )
    if strategy is None:
        has_scope = tf.distribute.has_strategy()
        strategy = tf.distribute.get_strategy() if has_scope else create_strategy()
    _check_synchronous(strategy)  # before any variable is made
    return DistributedModel(adopt(model_or_builder, strategy), strategy)


class DistributedModel:
    """A Keras model whose steps run on all replicas of a strategy.

    In a cluster every task makes the same calls with the same data. Batch sizes are global: the
    examples that all replicas of all tasks use in one step together.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        _check_synchronous(strategy)
        self._model = model
        self._strategy = strategy
        self._reduction = Reduction(strategy)
        # Weights that came along are each worker's own; where they differ, the chief's count.
        follow_chief(model, self._reduction)
        self._programs: dict[str, tuple[Any, StepProgram]] = {}
        self._predictor: Predictor | None = None
        self._warned_of_xla = False

    @property
    def keras_model(self) -> keras.Model:
        """The Keras model, its variables on the strategy's devices."""
        return self._model

    @property
    def strategy(self) -> tf.distribute.Strategy:
        return self._strategy

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
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
    ) -> keras.callbacks.History:
        """Train as `keras.Model.fit` does; the arguments mean what they mean there.

        Differences: `batch_size` is that of the global batch; arrays are shuffled in one order,
        the same on every task; with `steps_per_execution` left at 1, as many steps run in one
        execution as take some tenths of a second, unless a callback looks at each batch. In a
        cluster only the chief prints and writes files.

        Raises:
            TrainingError: data or arguments that cannot be distributed.
            ValueError: what Keras itself refuses; the model is not compiled.
        """
        self._check_compiled("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = kp.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        batches = read(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            seed=self._shared_seed,
        )
        check_same_call(
            self._reduction,
            epochs=epochs,
            initial_epoch=initial_epoch,
            with_validation=validation_data is not None,
        )
        warn_of_different_data(x, y, self._reduction)
        train = self._epochs(batches, steps_per_epoch)
        self._prepare(batches)
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            size = validation_batch_size or batch_size
            val_batches = read(val_x, val_y, val_weight, batch_size=size, steps=validation_steps)
            validation = self._epochs(val_batches, validation_steps)

        hooks = self._callbacks(
            callbacks, verbose, epochs=epochs, steps=train.steps, add_history=True
        )
        model = self._model
        model.stop_training = False
        loop = Loop(model, self._reduction, hooks, "train")
        program = self._program("train")
        hooks.on_train_begin()
        follow_chief_if_restored(model, self._reduction, callbacks)
        logs: dict[str, Any] = {}
        for epoch in range(kp.restored_epoch(model) or initial_epoch, epochs):
            hooks.on_epoch_begin(epoch)
            with train.next() as data:
                logs, steps = loop.run(program, data)
            if data.steps is None or (steps < data.steps and not model.stop_training):
                train.ended_after(steps)
            if validation is not None and validates(epoch, validation_freq):
                val_logs = self._evaluate(validation, hooks)
                logs = {**logs, **{f"val_{name}": value for name, value in val_logs.items()}}
            hooks.on_epoch_end(epoch, logs)
            if self._reduction.any_worker(model.stop_training):
                break
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            with self._strategy.scope():
                model.optimizer.finalize_variable_values(model.trainable_weights)
        hooks.on_train_end(logs)
        return model.history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics over all examples, as `keras.Model.evaluate` returns them.

        The same numbers come back on every task. `batch_size` is that of the global batch.
        """
        self._check_compiled("evaluate")
        batches = read(x, y, sample_weight, batch_size=batch_size, steps=steps)
        epochs = self._epochs(batches, steps)
        self._prepare(batches)
        hooks = self._callbacks(callbacks, verbose, epochs=1, steps=epochs.steps)
        logs = self._evaluate(epochs, hooks)
        return logs if return_dict else kp.metrics_in_order(self._model, logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The model's outputs for all rows, in input order, on every task, as NumPy arrays.

        `batch_size` is that of the global batch.
        """
        batches = read(x, batch_size=batch_size, steps=steps)
        epochs = self._epochs(batches, steps)
        build(self._model, batches.element_spec, self._strategy, with_targets=False)
        hooks = self._callbacks(callbacks, verbose, epochs=1, steps=epochs.steps)
        if self._predictor is None or self._predictor.eager != self._model.run_eagerly:
            self._predictor = Predictor(self._model, self._strategy, self._reduction)
        return self._predictor.predict(epochs, hooks)

    def save(self, filepath: str | Path, overwrite: bool = True, **kwargs: Any) -> None:
        """Write the model as `keras.Model.save` does; plain Keras loads it.

        Call it on every task: the chief writes, and all wait until the file is there.
        """
        failure: Exception | None = None
        if self._reduction.is_chief:
            try:
                self._model.save(filepath, overwrite=overwrite, **kwargs)
            except Exception as error:  # the others must not wait for a file that never comes
                failure = error
        failed_elsewhere = self._reduction.any_worker(failure is not None)
        if failure is not None:
            raise failure
        if failed_elsewhere:
            time.sleep(1)  # the chief's own error is the one to be seen first
            raise TrainingError(f"the chief could not write {filepath}: see the chief's error.")

    def _evaluate(self, epochs: Epochs, hooks: Any) -> dict[str, Any]:
        self._model.stop_evaluating = False
        hooks.on_test_begin()
        epochs.rewind()
        with epochs.next() as data:
            loop = Loop(self._model, self._reduction, hooks, "test")
            logs, steps = loop.run(self._program("test"), data)
        if data.steps is None or steps < data.steps:
            epochs.ended_after(steps)
        hooks.on_test_end(logs)
        return logs

    def _callbacks(self, callbacks: Any, verbose: str | int, **params: Any) -> Any:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        chief = self._reduction.is_chief
        verbose = 1 if verbose == "auto" else int(verbose)
        return keras.callbacks.CallbackList(
            for_this_task(callbacks, is_chief=chief),
            add_progbar=chief and verbose != 0,
            model=self._model,
            verbose=verbose,
            **params,
        )

    def _epochs(self, batches: GlobalBatches, asked: int | None) -> Epochs:
        on = self._reduction
        check_same_call(on, steps=batches.steps, asked=asked, batch_size=batches.batch_size)
        if on.feeds_on_host:
            parts = batches.on_host(on.first_replica, on.local_replicas, on.replicas)
        else:
            parts = batches.distributed(self._strategy)
        return Epochs(batches, parts, asked)

    def _program(self, kind: str) -> StepProgram:
        """The compiled steps, made anew when the model was compiled since."""
        compiled = (self._model.optimizer, self._model.loss, self._model.metrics)
        made_for, program = self._programs.get(kind, (None, None))
        if program is None or made_for != compiled:
            program = StepProgram(self._model, self._strategy, self._reduction, kind)
            self._programs[kind] = (compiled, program)
        return program

    def _prepare(self, batches: GlobalBatches) -> None:
        """Everything must exist before a step is traced: variables, metrics, optimizer slots."""
        recompile(self._model, self._model, self._strategy)
        build(self._model, batches.element_spec, self._strategy)
        if self._model.jit_compile and self._strategy.num_replicas_in_sync > 1:
            if not self._warned_of_xla:
                warnings.warn(
                    f"jit_compile=True is off: XLA does not compile steps under"
                    f" {type(self._strategy).__name__} with"
                    f" {self._strategy.num_replicas_in_sync} replicas.",
                    stacklevel=3,
                )
                self._warned_of_xla = True
            self._model.jit_compile = False

    def _shared_seed(self) -> int:
        """One seed for all tasks, from Python's generator as Keras takes its seeds."""
        return int(self._reduction.from_chief(random.randint(1, 2**31 - 1)))

    def _check_compiled(self, method: str) -> None:
        if not self._model.compiled:
            raise TrainingError(
                f"{method}() needs a compiled model: call compile(optimizer, loss) in the function"
                " given to distribute(), or on the model before it is distributed."
            )


def _check_synchronous(strategy: tf.distribute.Strategy) -> None:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise TrainingError(
            "distribute() trains synchronously, and ParameterServerStrategy is asynchronous: drive"
            " it with tf.distribute.coordinator.ClusterCoordinator, or choose another strategy."
        )
