"""The loop of `fit`, `evaluate` and `predict`: epochs, executions, steps per execution, Ctrl-C.

All tasks of a cluster take the same turns. Every execution is a collective, and so is every
question below that is put to all workers. What decides how many there are must therefore be the
same on each task, and is agreed on where it may not be: the chief alone runs callbacks that
write, and a user's callback may stop one task.

Epochs begin and end in the data by Keras's rules (`Epochs`). A seeded `shuffle` draws a new order
each time an iterator over it is made: by training, by validation, by anything that looks at the
data. So iterators are made exactly when Keras's EpochIterator makes them (`DatasetPasses`).

Long executions are fast, because nothing waits for Python between their steps. Short ones show
progress, and let Ctrl-C and callbacks in. So an execution aims at a fixed time
(`StepsPerExecutionTuner`). Python raises KeyboardInterrupt wherever the main thread is, in
finalizers too, which drop it: `preserve_sigint` keeps it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.pipelines import data_errors_as_raised, without_autotune
from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.callbacks.in_cluster import uses_batch_hooks
from tfdist_ext.training.inputs import (
    GlobalBatches,
    explaining_shape_errors,
    parts_of_dataset,
)
from tfdist_ext.training.protocols import (
    BatchIterator,
    BatchSource,
    Engine,
    Epoch,
    Logs,
    StepListener,
    StepProgram,
    Structure,
)
from tfdist_ext.user_frames import warn

__all__ = [
    "DatasetPasses",
    "Epochs",
    "Loop",
    "StepsPerExecutionTuner",
    "predict",
    "preserve_sigint",
    "steps_of_epoch",
    "validates",
]


class Loop:
    """The turns of one `fit` or `evaluate`, its pace kept from epoch to epoch."""

    def __init__(
        self,
        model: keras.Model,
        engine: Engine,
        hooks: keras.callbacks.CallbackList,
        kind: str,
        listener: StepListener | None = None,
    ):
        """
        Args:
            kind: "train" or "test".
            listener: is told of finished steps.
        """
        self._listener = listener
        self._model = model
        self._reduction = engine.reduction
        self._begin = getattr(hooks, f"on_{kind}_batch_begin")
        self._end = getattr(hooks, f"on_{kind}_batch_end")
        self._stop_flag = "stop_training" if kind == "train" else "stop_evaluating"
        self._by_batch = self._reduction.any_worker(uses_batch_hooks(hooks.callbacks, kind))
        requested = model.steps_per_execution
        fixed = requested if requested > 1 else 1 if self._by_batch else None
        self._is_fixed = fixed is not None
        self._pace = StepsPerExecutionTuner(fixed=fixed, target=engine.seconds_per_execution)

    @property
    def _stopped(self) -> bool:
        return bool(getattr(self._model, self._stop_flag))

    def run(self, program: StepProgram, data: Epoch, where: str = "") -> tuple[Logs, int]:
        """(logs, steps done) of one epoch; `where` names it in messages, as "epoch 2, "."""
        with preserve_sigint() as raise_if_interrupted, data_errors_as_raised():
            peers = self._reduction.peers
            pace = self._pace
            if not self._is_fixed and data.batch_size is not None:
                pace = program.paces.setdefault(data.batch_size, pace)
            logs: Logs = {}
            done, seconds = 0, 0.0
            with peers.barrier(f"{where}before its first step"):
                # Told to stop before the first batch, Keras still runs that one.
                one_only = self._reduction.any_worker(self._stopped)
                program.reset(resume=data.completed > 0)
            while data.steps is None or done < data.steps:
                left = None if data.steps is None else data.steps - done
                if self._listener is not None and (most := self._listener.max_steps()) is not None:
                    left = most if left is None else min(left, most)
                n = pace.next(1 if one_only else left)
                peers.enters("callbacks")
                self._begin(data.completed + done)
                peers.enters("steps")
                started = time.perf_counter()
                with (
                    explaining_shape_errors(data.element_spec, self._reduction.replicas),
                    peers.barrier(f"{where}steps after {done}"),
                ):
                    result = program.run(data, n, seconds, told=peers.told_to_end)
                seconds = time.perf_counter() - started
                raise_if_interrupted()
                pace.record(result.chief_seconds)
                if result.steps == 0:
                    logs = result.logs if data.completed else logs
                    break
                done += result.steps
                peers.reached(f"{where}step {done}")
                logs = result.logs
                data.advance(result.steps)
                peers.enters("callbacks")
                self._end(data.completed + done - 1, logs)
                stop = self._stopped or one_only
                if self._by_batch:
                    with peers.barrier(f"{where}stop after {done}?"):
                        stop = self._reduction.any_worker(stop)
                peers.enters("checkpoint")
                if self._listener is not None:  # after callbacks, whose state it may write
                    self._listener.steps_done(
                        result.steps,
                        logs,
                        epoch_ends=done == data.steps,
                        stopped=stop,
                        told=result.told,
                    )
                if stop:
                    setattr(self._model, self._stop_flag, True)
                    break
                if result.steps < n:
                    break
            return logs, done


_EMPTY = "the data must hold a batch, got none."


def steps_of_epoch(position: int, in_pass: int, requested: int | None) -> tuple[int, int]:
    """(steps of the next epoch, position in the pass after it).

    An epoch of `requested` steps continues where the last one ended; the epoch in which a pass ends
    is short, and the one after it starts a new pass.
    """
    left = in_pass - position
    steps = left if requested is None else min(requested, left)
    return steps, (position + steps) % in_pass


class Epochs:
    """The epochs of one `fit`, `evaluate` or `predict`."""

    def __init__(
        self,
        batches: BatchSource,
        feed: Callable[[Any], Any],
        requested: int | None,
        inspect: Callable[[Structure], None] | None = None,
    ) -> None:
        """
        Args:
            feed: makes of global batches what the steps iterate over.
            requested: steps of an epoch, where the caller gave a number.
            inspect: see `DatasetPasses`; called only where each task reads whole global batches.
        """
        requested = requested or None  # as Keras: 0 is all there is
        if batches.steps is None and batches.is_infinite and requested is None:
            raise TrainingError(
                "steps_per_epoch (in evaluate and predict: steps) must be given for infinite data,"
                " got None: such data has no end of an epoch."
            )
        if batches.steps == 0:
            raise TrainingError(_EMPTY)
        self._batches = batches
        self._requested = requested
        self._feed = feed
        self._passes = None
        if batches.dataset is not None:
            in_steps = requested is not None
            self._passes = DatasetPasses(batches.dataset, in_steps=in_steps, inspect=inspect)
        self._dataset: Any = None if self._passes else feed(batches)
        self._fed_from: tf.data.Dataset | None = None
        self._iterator: BatchIterator | None = None
        self._position = batches.begin
        self._seen: int | None = None
        self._fresh = True
        self._completed = 0  # steps of the next epoch that are done

    @property
    def steps(self) -> int | None:
        """Global batches in an epoch; None until a first one has told."""
        return self._requested or self._batches.steps or self._seen

    @property
    def batch_size(self) -> int | None:
        """Examples in a global batch; None where only reading tells."""
        return self._batches.batch_size

    def reset(self) -> None:
        """Call the data's `on_epoch_end`, as Keras does before `fit` and before each `evaluate`."""
        self._batches.on_epoch_end()

    @contextlib.contextmanager
    def next(self) -> Iterator[Epoch]:
        """The next epoch, begun with the data's own hook; `is_done` calls the one of its end."""
        in_pass = self._batches.steps
        known = in_pass is not None or self._batches.is_infinite
        completed, self._completed = self._completed, 0
        requested = steps = None if self._requested is None else max(self._requested - completed, 0)
        if in_pass is not None:
            steps, after = steps_of_epoch(self._position, in_pass, requested)
            if requested is not None and steps < requested:
                self._warn_of_end(steps)
        batches = self._batches
        batches.on_epoch_begin()
        try:
            self._begin(steps, known)
            counts_rows = batches.needs_row_count
            in_memory = None if batches.arrays is None else batches.batch_size
            yield Epoch(
                self._iterator,
                steps,
                known,
                counts_rows,
                completed,
                batches.advance,
                lambda: batches.element_spec,
                in_memory,
            )
        except BaseException:
            batches.on_epoch_end()  # stops workers that read ahead
            raise
        finally:
            if in_pass is not None:
                self._position = after

    def _begin(self, steps: int | None, known_length: bool) -> None:
        """Make the iterator of an epoch, or keep the one of the epoch before."""
        if self._passes is not None:
            self._fresh = self._passes.begins_a_pass()
            dataset = self._passes.epoch(steps, known_length=known_length)
            self._iterator = iter(self._fed(dataset))
            return
        begins_a_pass = self._position == 0 and (
            self._requested is None or self._batches.steps is not None
        )
        self._fresh = self._iterator is None or (begins_a_pass and not self._batches.is_infinite)
        if self._fresh:
            self._iterator = iter(self._dataset)

    def _fed(self, dataset: tf.data.Dataset) -> Any:
        if dataset is not self._fed_from:
            self._fed_from = dataset
            assert isinstance(self._batches, GlobalBatches)
            parts_of = parts_of_dataset(dataset)
            batches = replace(
                self._batches, parts_of=lambda *which: without_autotune(parts_of(*which))
            )
            self._dataset = self._feed(batches)
        return self._dataset

    @property
    def can_begin_anywhere(self) -> bool:
        """Whether `begin_after` reads nothing of what it passes over."""
        batches = self._batches
        from_step = isinstance(batches, GlobalBatches) and batches.from_step is not None
        return from_step and batches.steps is not None

    def begin_after(self, epochs: int, *, completed: int = 0) -> bool:
        """Pass over epochs, without reading; False, and nothing done, where that cannot be.

        Args:
            completed: steps of the epoch after them, which are passed over, too.
        """
        batches, in_pass = self._batches, self._batches.steps
        if not self.can_begin_anywhere:
            return False
        assert isinstance(batches, GlobalBatches)
        assert batches.from_step is not None
        assert in_pass is not None
        passed = completed
        for _ in range(epochs):
            steps, self._position = steps_of_epoch(self._position, in_pass, self._requested)
            passed += steps
        self._position = (self._position + completed) % in_pass
        self._completed = completed
        self._dataset = self._feed(replace(batches, parts_of=batches.from_step(passed)))
        return True

    def begin_at_position(self, *, completed: int) -> None:
        """Begin where the data's own position is, `completed` steps of an epoch being done."""
        assert isinstance(self._batches, GlobalBatches)
        assert self._batches.at_position is not None
        batches = self._batches.at_position()
        self._position = batches.begin
        self._batches = replace(self._batches, begin=batches.begin)
        self._completed = completed
        self._dataset = self._feed(batches)

    def rewind(self) -> None:
        """Begin the next epoch at the start of the data: each validation sees the same steps."""
        self.reset()
        if self._passes is not None:
            self._position = 0
            self._passes.restart()
        elif self._position != 0 or (self._requested is not None and self._batches.steps is None):
            self._position = 0
            self._iterator = None

    def is_done(self, epoch: Epoch, steps: int, *, stopped: bool) -> bool:
        """Take note of an epoch's end; whether it was done to its end, or to that of the data.

        Args:
            steps: that were done.
            stopped: somebody told the training to stop while it ran. Then the data's
                `on_epoch_end` is not called, as in Keras.
        """
        if not stopped:
            self._batches.on_epoch_end()
        if epoch.steps is None or steps < epoch.steps:
            if not stopped:
                self.ended_after(steps)
            return not stopped
        if self._batches.steps is not None and self._position == 0:
            self._batches.ended()
            if self._passes is not None and not stopped:
                self._passes.pass_is_done()
        return True

    def ended_after(self, steps: int) -> None:
        """Say that the data ended after this many steps of an epoch of unknown length."""
        if steps == 0 and self._seen is None and self._fresh and self._batches.begin == 0:
            raise TrainingError(_EMPTY)
        if self._requested is not None and steps < self._requested:
            self._warn_of_end(steps)
        self._seen = steps
        self._iterator = None
        if self._passes is not None:
            self._passes.restart()
        self._batches.ended()

    def _warn_of_end(self, steps: int) -> None:
        warn(
            f"the data ended after {steps} of the {self._requested} steps requested in this epoch."
            " Request fewer steps, or repeat the data with .repeat()."
        )


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


class DatasetPasses:
    """The passes of one `fit`, `evaluate` or `predict` over a dataset, epoch by epoch.

    Args:
        dataset: one pass of global batches, or an infinite dataset.
        in_steps: epochs have a number of steps, and may end in the middle of a pass.
        inspect: called with the first batch of all (None if there is no batch) before it is used.
            It is the batch that the first step gets: nothing else is read for this.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        in_steps: bool,
        inspect: Callable[[Structure], None] | None = None,
    ):
        # Each epoch lets go of an iterator, and would wait for its tuner; see `without_autotune`.
        self._dataset = without_autotune(dataset)
        self._in_steps = in_steps
        self._inspect = inspect
        self._iterator: Any = None  # a tf.data.Iterator
        self._rest: tf.data.Dataset | None = None
        self._rest_of: tuple[tf.data.Iterator | None, int | None] = (None, None)

    def begins_a_pass(self) -> bool:
        """Whether the next epoch makes an iterator of its own."""
        return self._iterator is None or not self._in_steps

    def epoch(self, steps: int | None, *, known_length: bool) -> tf.data.Dataset:
        """The global batches of the next epoch: each iteration is over those of one more.

        What reads ahead in it stops at its end: reading ahead into another repetition of the
        data would make iterators at unknown times.

        Args:
            steps: batches in the epoch; None: all that are left.
            known_length: there are that many for sure.
        """
        if not self._in_steps and self._inspect is None:
            return self._dataset
        if self.begins_a_pass():
            self._iterator = self._new_iterator()
        if self._inspect is None:
            if self._rest_of != (self._iterator, steps):  # else iterating again reads on
                self._rest = _rest_of(self._iterator, steps, known_length)
                self._rest_of = self._iterator, steps
            return self._rest
        inspect, self._inspect = self._inspect, None
        first = next(self._iterator, None)
        inspect(first)
        if first is None:
            return self._dataset
        left = None if steps is None else steps - 1
        rest = _rest_of(self._iterator, left, known_length)
        return tf.data.Dataset.from_tensors(first).concatenate(rest)

    def pass_is_done(self) -> None:
        """Keras's fit makes the iterator of the next pass here, and in epochs without a number of
        steps another one when the next epoch begins.
        """
        self._iterator = self._new_iterator()

    def restart(self) -> None:
        """Begin the next epoch at the start of the data."""
        self._iterator = None

    def _new_iterator(self) -> tf.data.Iterator:
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it reads ahead, too
        with tf.device("CPU:0"):
            return iter(self._dataset.with_options(options))


@tf.autograph.experimental.do_not_convert
def _rest_of(iterator: tf.data.Iterator, steps: int | None, known_length: bool) -> tf.data.Dataset:
    """The rest of an iterator, at most `steps` elements."""
    turns = tf.data.Dataset.range(2**62 if steps is None else steps)
    if known_length:
        return turns.map(lambda _: iterator.get_next())
    options = turns.map(lambda _: iterator.get_next_as_optional())
    there = options.take_while(lambda option: option.has_value())
    return there.map(lambda option: option.get_value())


def predict(
    model: keras.Model, engine: Engine, epochs: Epochs, hooks: keras.callbacks.CallbackList
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
                with (
                    explaining_shape_errors(data.element_spec, engine.reduction.replicas),
                    engine.reduction.peers.barrier(f"batch {done}"),
                ):
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

    def rows(*parts: tf.Tensor | np.ndarray) -> np.ndarray | tf.RaggedTensor:
        if len(parts) == 1 and isinstance(parts[0], np.ndarray):
            return parts[0]  # which Keras would take for a tensor
        return kp.in_one_array(list(parts))

    return keras.tree.map_structure(rows, *collected)


_GROWTH = 4  # times the longest execution before


class StepsPerExecutionTuner:
    """Grows the steps of an execution until one takes about `target` seconds.

    It is fed the chief's times only, so that every task of a cluster counts the same.
    """

    def __init__(self, *, fixed: int | None = None, target: float = 0.4):
        """`fixed` steps each time, or as many as fit into `target` seconds."""
        self._fixed = fixed
        self._target = target
        self._steps: list[int] = []  # of the last two executions
        self._largest = 0
        self._most: int | None = None  # that fit into the target, once a time has told
        self._compiled = False
        self._measured = False

    def next(self, remaining: int | None) -> int:
        """Steps for the next execution, at least 1 and at most `remaining`."""
        # The first execution compiles; a short one shows early that all is well.
        steps = self._fixed or max(1, self._largest * _GROWTH)
        if self._fixed is None and self._most is not None:
            steps = min(steps, self._most)
        steps = steps if remaining is None else min(steps, remaining)
        self._largest = max(self._largest, steps)
        self._steps = [*self._steps[-1:], steps]
        return steps

    def record(self, previous: float) -> None:
        """Learn how many seconds the execution before the last one took.

        One execution late, because a time travels to the other tasks with the next execution.
        """
        if len(self._steps) < 2:
            return
        long = previous > self._target / 8  # what is shorter is mostly the call itself
        if long:
            self._most = max(1, int(self._target * self._steps[0] / previous))
        elif not self._measured:
            self._most = None
        # The first time is the compiler's: it holds until another one is there.
        self._measured = self._compiled and (long or self._measured)
        self._compiled = True


@contextlib.contextmanager
def preserve_sigint() -> Iterator[Callable[[], None]]:
    """Scope that gives a function, which raises the KeyboardInterrupt that was lost, if any.

    Where Ctrl-C does something of the user's own, or this is not the main thread, nothing is
    changed.
    """
    pressed = False

    def raise_interrupt(*_: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    own = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if own or threading.current_thread() is not threading.main_thread():
        yield check
        return
    signal.signal(signal.SIGINT, raise_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
