"""The loop of `fit`, `evaluate` and `predict`: executions, steps per execution, Ctrl-C.

Every execution is a collective, so all tasks of a cluster must run the same executions. The tasks
agree where one may decide differently: only the chief runs callbacks that write, and a callback
may stop the training on one task.

Long executions are fast, because nothing waits for Python between their steps. Short executions
show progress, and let Ctrl-C and callbacks in. So an execution aims at a fixed time
(`StepsPerExecutionTuner`). A KeyboardInterrupt that is raised in a finalizer is lost.
`preserve_sigint` raises it again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import keras

from tfdist_ext.data.pipelines import data_errors_as_raised
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.callbacks.in_cluster import uses_batch_hooks
from tfdist_ext.training.checkpoints.manager import CheckpointManager
from tfdist_ext.training.epochs import Epochs
from tfdist_ext.training.programs import Engine, StepProgram, StepsPerExecutionTuner
from tfdist_ext.training.protocols import Epoch, Logs, Structure

__all__ = ["Loop", "predict", "preserve_sigint", "validates"]


class Loop:
    """Runs the epochs of one `fit` or `evaluate`."""

    def __init__(
        self,
        model: keras.Model,
        engine: Engine,
        hooks: keras.callbacks.CallbackList,
        kind: str,
        saved: CheckpointManager | None = None,
        end: Callable[[], NoReturn] | None = None,
    ):
        """
        Args:
            kind: "train" or "test".
            saved: gets the steps that are done.
            end: called at a signal to end, unless the epoch is done.
        """
        self._saved = saved
        self._end_job = end
        self._model = model
        self._reduction = engine.reduction
        self._begin = getattr(hooks, f"on_{kind}_batch_begin")
        self._end = getattr(hooks, f"on_{kind}_batch_end")
        self._stop_flag = "stop_training" if kind == "train" else "stop_evaluating"
        self._by_batch = self._reduction.any_worker(uses_batch_hooks(hooks.callbacks, kind))
        requested = model.steps_per_execution
        fixed = requested if requested > 1 else 1 if self._by_batch else None
        self._tuner = StepsPerExecutionTuner(fixed=fixed)
        self._seconds = 0.0  # of this task's last execution

    @property
    def _stopped(self) -> bool:
        return bool(getattr(self._model, self._stop_flag))

    def run(self, program: StepProgram, data: Epoch, where: str = "") -> tuple[Logs, int]:
        """(logs, steps done) of one epoch; `where` names it in messages, as "epoch 2, "."""
        with preserve_sigint() as raise_if_interrupted, data_errors_as_raised():
            peers = self._reduction.peers
            logs: Logs = {}
            done = 0
            with peers.barrier(f"{where}before its first step"):
                # If a callback stops before the first batch, Keras still runs that batch.
                one_only = self._reduction.any_worker(self._stopped)
                program.reset(resume=data.completed > 0)
            while data.steps is None or done < data.steps:
                left = None if data.steps is None else data.steps - done
                if self._saved is not None and (most := self._saved.max_steps()) is not None:
                    left = most if left is None else min(left, most)
                n = self._tuner.next(1 if one_only else left)
                peers.enters("callbacks")
                self._begin(data.completed + done)
                peers.enters("steps")
                started = time.perf_counter()
                with peers.barrier(f"{where}steps after {done}"):
                    result = program.run(
                        data, n, self._seconds, stop_requested=peers.stop_requested
                    )
                self._seconds = time.perf_counter() - started
                raise_if_interrupted()
                self._tuner.record(result.steps, result.chief_seconds)
                if result.steps == 0:
                    logs = result.logs if data.completed else logs
                    break
                done += result.steps
                logs = result.logs
                data.advance(result.steps)
                peers.enters("callbacks")
                self._end(data.completed + done - 1, logs)
                stop = self._stopped or one_only
                if self._by_batch:
                    with peers.barrier(f"{where}stop after {done}?"):
                        stop = self._reduction.any_worker(stop)
                peers.enters("checkpoint")
                epoch_ends = done == data.steps
                if self._saved is not None:  # after callbacks: a checkpoint has their state
                    self._saved.steps_done(
                        result.steps,
                        logs,
                        epoch_ends=epoch_ends,
                        stopped=stop,
                        stop_requested=result.stop_requested,
                    )
                if (
                    self._end_job is not None
                    and result.stop_requested
                    and not epoch_ends
                    and not stop
                ):
                    self._end_job()
                if stop:
                    setattr(self._model, self._stop_flag, True)
                    break
                if result.steps < n:
                    break
            return logs, done


def validates(epoch: int, frequency: int | list[int]) -> bool:
    """Whether an epoch, counted from 0, is followed by validation."""
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    if isinstance(frequency, list | tuple | set):
        return epoch + 1 in frequency
    raise TrainingError(
        "validation_freq must be a number of epochs, or a list of epochs counted from 1, got"
        f" {frequency!r}."
    )


def predict(
    model: keras.Model,
    engine: Engine,
    epochs: Epochs,
    hooks: keras.callbacks.CallbackList,
) -> Structure:
    """The outputs for one pass over the data, as NumPy arrays of all rows, in input order."""
    model.stop_predicting = False
    hooks.on_predict_begin()
    collected: list[Structure] = []
    done = 0  # global batches
    with preserve_sigint() as raise_if_interrupted, data_errors_as_raised(), epochs.next() as data:
        each = engine.predictor(model).outputs(data)
        while data.steps is None or done < data.steps:
            hooks.on_predict_batch_begin(done)
            engine.reduction.peers.enters("steps")
            try:
                with engine.reduction.peers.barrier(f"batch {done}"):
                    outputs = next(each)
            except StopIteration:
                break
            raise_if_interrupted()
            done += 1
            if outputs is not None:
                collected.append(outputs)
            hooks.on_predict_batch_end(done - 1, {"outputs": outputs})
            if model.stop_predicting:
                break
    if not collected:
        epochs.ended_after(0)
    epochs.is_done(data, done, stopped=bool(model.stop_predicting))
    hooks.on_predict_end()
    return keras.tree.map_structure(kp.in_one_array, *collected)


@contextlib.contextmanager
def preserve_sigint() -> Iterator[Callable[[], None]]:
    """Scope with a function that raises a lost KeyboardInterrupt again.

    The scope has no effect outside of the main thread, or if the user has a handler for Ctrl-C.
    """
    pressed = threading.Event()

    def raise_interrupt(*_: object) -> None:
        pressed.set()
        raise KeyboardInterrupt

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    replaces = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaces:
        signal.signal(signal.SIGINT, raise_interrupt)
    try:
        yield check
    finally:
        if replaces:
            signal.signal(signal.SIGINT, signal.default_int_handler)
