"""The loop of `fit`, `evaluate` and `predict`: epochs, executions, steps per execution.

Every execution is a collective, so all tasks of a cluster must run the same executions. The tasks
agree where one may decide differently: only the chief runs callbacks that write, and a callback
may stop the training on one task.

Long executions are fast, because nothing waits for Python between their steps. Short executions
show progress, and let Ctrl-C and callbacks in. So an execution aims at a fixed time
(`StepsPerExecutionTuner`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.epochs import EMPTY, Epoch, Epochs
from tfdist_ext.data.pipelines import Structure, data_errors_as_raised
from tfdist_ext.errors import TrainingError
from tfdist_ext.failures import preemption
from tfdist_ext.launcher.exit_codes import PREEMPTED
from tfdist_ext.training._keras_private import in_one_array, layers_of, raw_value, traces_batches
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.callbacks.callback_state import Callbacks
from tfdist_ext.training.checkpoints.format import Progress
from tfdist_ext.training.checkpoints.manager import CheckpointManager
from tfdist_ext.training.parameter_server.engine import (
    ParameterServerPredictor,
    ParameterServerProgram,
)
from tfdist_ext.training.steps.scope import Execution, Logs
from tfdist_ext.training.synchronous.engine import Predictor, SynchronousProgram

# Since Keras 3.15.
_Orbax = getattr(keras.callbacks, "OrbaxCheckpoint", keras.callbacks.ModelCheckpoint)

# Both kinds have the same methods.
StepProgram: TypeAlias = SynchronousProgram | ParameterServerProgram

# (epoch, callbacks of the `fit`) -> logs of the validation; none if it is not due.
Validation: TypeAlias = Callable[[int, keras.callbacks.CallbackList], Logs]


def train(
    loop: Loop,
    epochs: range,
    data: Epochs,
    hooks: keras.callbacks.CallbackList,
    saved: CheckpointManager | None,
    validation: Validation | None,
) -> Iterator[tuple[Logs, Progress]]:
    """Trains; yields the logs of each epoch, and the training's progress, before `on_epoch_end`.

    Args:
        saved: the checkpoints of the training; None without a folder.
        validation: None without validation data.
    """
    model, reduction = loop.model, loop.reduction
    peers = reduction.peers
    for epoch in epochs:
        peers.enters("callbacks")
        hooks.on_epoch_begin(epoch)
        if saved is not None:
            saved.epoch_has_begun()
        with data.next() as batches:
            logs, steps = loop.run(batches, hooks, f"epoch {epoch + 1}, ", saved=saved)
        data.end_epoch(batches, steps, stopped=bool(model.stop_training))
        if validation is not None:
            val_logs = validation(epoch, hooks)
            logs = {**logs, **{f"val_{name}": value for name, value in val_logs.items()}}
        yield logs, Progress(epoch + 1) if saved is None else saved.epoch_ends(epoch)
        peers.enters("callbacks")
        hooks.on_epoch_end(epoch, logs)
        peers.enters("checkpoint")
        with peers.barrier(f"epoch {epoch + 1}, end"):
            flags = np.array([model.stop_training, peers.stop_requested], np.int32)
            stop, stop_requested = (reduction.sum_over_workers(flags) > 0).tolist()
            if saved is not None:
                saved.epoch_is_done(epoch, logs, stopped=stop)
        peers.enters("callbacks")
        if saved is not None:
            saved.announce()
        if stop:
            break
        if stop_requested and epoch + 1 < epochs.stop:
            raise preemption(PREEMPTED)


def end_training(
    reduction: Reduction,
    logs: Logs,
    hooks: keras.callbacks.CallbackList,
    saved: CheckpointManager | None,
) -> None:
    """Runs `on_train_end`, where callbacks may compile the model; marks the training done."""
    peers = reduction.peers
    peers.enters("callbacks")
    hooks.on_train_end(logs)
    peers.enters("checkpoint")
    with peers.barrier("end"):
        # Wait: the chief's callbacks may still write.
        stop_requested = reduction.any_worker(peers.stop_requested)
    if saved is not None:
        saved.training_is_done()
    if stop_requested:
        raise preemption(PREEMPTED)


def compile_settings(model: keras.Model) -> tuple[object, ...]:
    """Returns the settings of `compile`, and statistics that compiled steps have as constants.

    Steps are compiled again after one of them changes.
    """
    normalizing = [layer for layer in layers_of(model, keras.layers.Normalization) if layer.built]
    tensors = [tensor for layer in normalizing for tensor in (layer.mean, layer.variance)]
    statistics = [np.asarray(tf.get_static_value(tensor)).tobytes() for tensor in tensors]
    compiled = model.compiled and (model.optimizer, model.loss, model.metrics, model.jit_compile)
    return compiled, bool(model.run_eagerly), statistics


class MadeFor:
    """The settings and the variables of a model when its steps were compiled."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._settings = compile_settings(model)
        self._values = [(variable, raw_value(variable)) for variable in model.variables]

    def is_current(self) -> bool:
        """Whether the steps can still be used."""
        is_same = compile_settings(self._model) == self._settings
        is_same &= {*map(id, self._model.variables)} == {
            id(variable) for variable, _ in self._values
        }
        return is_same and not self._have_moved()

    def check_variables(self) -> None:
        """Raises TrainingError if a callback has moved the variables to another strategy."""
        if self._have_moved():
            raise TrainingError(
                f"The variables of {self._model.name!r} moved to another strategy while its steps"
                " ran. Call distribute(), and methods of models that share layers with this one on"
                " another strategy, before or after the training."
            )

    def _have_moved(self) -> bool:
        return any(raw_value(variable) is not value for variable, value in self._values)


class Loop:
    """Runs epochs of the compiled "train" or "test" steps of a model.

    Args:
        kind: "train" or "test".
        made_for: what the program was compiled for.
    """

    def __init__(
        self,
        model: keras.Model,
        reduction: Reduction,
        kind: str,
        program: StepProgram,
        made_for: MadeFor,
    ):
        self.model = model
        self.reduction = reduction
        self.program = program
        self.made_for = made_for
        self._kind = kind
        self._stop_flag = "stop_training" if kind == "train" else "stop_evaluating"
        self._tuner = StepsPerExecutionTuner()
        self._tuned_for: object = None  # the kind of data

    def run(
        self,
        data: Epoch,
        hooks: keras.callbacks.CallbackList,
        where: str = "",
        *,
        saved: CheckpointManager | None = None,
    ) -> tuple[Logs, int]:
        """Run one epoch.

        Args:
            where: names the epoch in messages, as "epoch 2, ".
            saved: gets the steps that are done.

        Returns:
            The logs, and the number of steps that were done.
        """
        peers = self.reduction.peers
        logs: Logs = {}
        done = 0
        with data_errors_as_raised():
            with peers.barrier(f"{where}before its first step"):
                by_batch, one_only, may_stop = self._begin(data, hooks)
            tuner, requested = self._tuner, self.model.steps_per_execution
            is_fixed = requested > 1 or by_batch
            while data.steps is None or done < data.steps:
                limits = [None if saved is None else saved.max_steps(), 1 if one_only else None]
                limits += [None if data.steps is None else data.steps - done]
                n = min(filter(None, [*limits, requested if is_fixed else tuner.steps]))
                peers.enters("callbacks")
                getattr(hooks, f"on_{self._kind}_batch_begin")(data.completed + done)
                result = self._execute(data, n, tuner, f"{where}steps after step {done}")
                if not done and not result.steps and data.epochs.begin_next_pass(data):
                    result = self._execute(data, n, tuner, f"{where}steps of the next pass")
                if result.steps == 0:
                    logs = result.logs if data.completed else logs
                    break
                done += result.steps
                logs = result.logs
                data.epochs.advance(result.steps)
                peers.enters("callbacks")
                getattr(hooks, f"on_{self._kind}_batch_end")(data.completed + done - 1, logs)
                stop = self._stopped or one_only
                if by_batch or may_stop:
                    with peers.barrier(f"{where}stop check after step {done}"):
                        stop = self.reduction.any_worker(stop)
                peers.enters("checkpoint")
                if saved is not None:  # after callbacks: a checkpoint has their state
                    saved.steps_done(result, epoch_ends=done == data.steps, stopped=stop)
                if stop:
                    setattr(self.model, self._stop_flag, True)
                if stop or result.steps < n:
                    break
            return logs, done

    def _begin(self, data: Epoch, hooks: keras.callbacks.CallbackList) -> tuple[bool, bool, bool]:
        """Prepares an epoch; every worker must call.

        Returns:
            Whether callbacks run after each batch; whether the epoch stops after one batch, because
            a callback has stopped it before; and whether one may stop it after an execution.
        """
        uses_batches = uses_batch_hooks(hooks.callbacks, self._kind)
        spec = getattr(data.iterator, "element_spec", None)
        batches = data.batches
        data_kind = spec, batches.batch_size, batches.known_length, batches.needs_row_count
        # If a callback stops before the first batch, Keras still runs that batch.
        is_new = data_kind != self._tuned_for
        stops = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in hooks.callbacks)
        flags = np.array([uses_batches, self._stopped, stops, is_new], np.int32)
        on_any = (self.reduction.sum_over_workers(flags) > 0).tolist()
        by_batch, one_only, may_stop, is_new = on_any
        self.program.reset(resume=data.completed > 0)
        if is_new:  # on any worker: all workers choose the same numbers of steps
            self._tuner, self._tuned_for = StepsPerExecutionTuner(), data_kind
        return by_batch, one_only, may_stop

    def _execute(self, data: Epoch, n: int, tuner: StepsPerExecutionTuner, where: str) -> Execution:
        self.made_for.check_variables()
        peers = self.reduction.peers
        peers.enters("steps")
        started = time.perf_counter()
        with peers.barrier(where):
            result = self.program.run(data, n, tuner.seconds, stop_requested=peers.stop_requested)
        tuner.seconds = time.perf_counter() - started
        tuner.record(result.steps, result.chief_seconds)
        return result

    @property
    def _stopped(self) -> bool:
        return bool(getattr(self.model, self._stop_flag, False))


def uses_batch_hooks(callbacks: Callbacks, kind: str) -> bool:
    """Whether a callback wants to be called for each batch of `kind`: train, test or predict."""
    hooks = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    if kind == "train":
        hooks += ["on_batch_begin", "on_batch_end"]
    flat = keras.tree.flatten(callbacks or [])
    return not all(_does_nothing(callback, hook) for callback in flat for hook in hooks)


def _does_nothing(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether a batch hook does nothing, as Keras's own with some settings."""
    method = getattr(callback, hook)
    function = getattr(method, "__func__", method)
    if function is getattr(keras.callbacks.Callback, hook):
        return True
    if not str(getattr(function, "__module__", "")).startswith("keras."):
        return False
    match callback:
        case keras.callbacks.ProgbarLogger() | keras.callbacks.History():
            return True
        case keras.callbacks.TerminateOnNaN():  # a mean that is NaN stays NaN
            return True
        case keras.callbacks.ModelCheckpoint() | _Orbax():
            return callback.save_freq == "epoch"
        case keras.callbacks.TensorBoard():
            return callback.update_freq == "epoch" and not traces_batches(callback)
    return False


_TARGET = 0.8  # seconds of an execution: short enough to show progress
_GROWTH = 4  # times the longest execution before


class StepsPerExecutionTuner:
    """Grows the steps of an execution until one takes about 0.8 seconds.

    Only the chief's times count, so every task of a cluster chooses the same number.

    Attributes:
        steps: for the next execution.
        seconds: that the last execution took on this task.
    """

    def __init__(self) -> None:
        self.steps = 1
        self.seconds = 0.0
        self._largest = 0
        self._before = 0  # steps of the last execution; 0 if it was shorter than planned
        self._compiled = False

    def record(self, steps: int, seconds_before: float) -> None:
        """Learn from an execution.

        Args:
            steps: of this execution.
            seconds_before: how long the execution before this one took. A time travels to the
                other tasks with the next execution. The first time does not count, because that
                execution also compiled the steps.
        """
        before, self._before = self._before, steps if steps == self.steps else 0
        self._largest = max(self._largest, steps)
        if self._compiled and before:
            fitting = int(_TARGET * before / seconds_before)
            self.steps = max(1, min(fitting, _GROWTH * self._largest))
        self._compiled = self._compiled or seconds_before > 0


def predict(
    model: keras.Model,
    reduction: Reduction,
    predictor: Predictor | ParameterServerPredictor,
    epochs: Epochs,
    hooks: keras.callbacks.CallbackList,
) -> Structure:
    """Returns the outputs for one pass over the data, as NumPy arrays, in input order."""
    model.stop_predicting = stop = False
    peers = reduction.peers
    peers.enters("callbacks")
    hooks.on_predict_begin()
    # A callback may stop a single worker, so the workers must agree.
    may_stop = uses_batch_hooks(hooks.callbacks, "predict") or model.stop_predicting
    may_stop = reduction.any_worker(may_stop)
    collected: list[Structure] = []
    done = 0  # global batches
    with data_errors_as_raised(), epochs.next() as data:
        outputs_of_batches = predictor.outputs(data)
        while not stop and (data.steps is None or done < data.steps):
            peers.enters("callbacks")
            hooks.on_predict_batch_begin(done)
            peers.enters("steps")
            try:
                with peers.barrier(f"batch {done}"):
                    outputs = next(outputs_of_batches)
            except StopIteration:
                break
            done += 1
            epochs.advance(1)
            if outputs is not None:
                collected.append(outputs)
            peers.enters("callbacks")
            hooks.on_predict_batch_end(done - 1, {"outputs": outputs})
            if may_stop:
                with peers.barrier(f"stop check after batch {done - 1}"):
                    stop = reduction.any_worker(bool(model.stop_predicting))
    if not collected:
        raise TrainingError(EMPTY)
    epochs.end_epoch(data, done, stopped=stop)
    hooks.on_predict_end()
    return keras.tree.map_structure(in_one_array, *collected)
