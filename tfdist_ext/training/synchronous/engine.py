"""The engine of synchronous strategies: all replicas run each step together.

An execution runs `n` global batches in a loop in the graph, without returning to Python. The
metrics' states travel through the loop, one set for each local replica. At the end of the execution
they are reduced over all replicas, so the logs are the same on every worker. Predictions come back
batch by batch, each row once, in input order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.data.batches import BatchIterator, Parts, Readers
from tfdist_ext.data.epochs import Epoch
from tfdist_ext.data.pipelines import PartsOf, Structure, distributed
from tfdist_ext.data.shards import Shard
from tfdist_ext.strategies._tf_private import per_replica
from tfdist_ext.training._keras_private import raw_value
from tfdist_ext.training.agreement.equality import from_each_worker
from tfdist_ext.training.steps.scope import Execution, as_logs, zeros_of
from tfdist_ext.training.steps.step_timer import StepTimer
from tfdist_ext.training.synchronous.model_step import ModelStep, OneTrace, Seeds
from tfdist_ext.training.synchronous.reduction import States, SynchronousReduction
from tfdist_ext.training.variables import (
    default_strategy_scope,
    sharded_optimizer_of,
    with_inner_optimizers,
)
from tfdist_ext.user_frames import warn

# What one step passes to the next: the metrics' states, and what an overridden step returned, by
# name, summed over the local replicas.
Carried: TypeAlias = tuple[States, dict[str, tf.Tensor]]


class SynchronousProgram:
    """The compiled executions of a "train" or "test" step, on all replicas of a strategy.

    Attributes:
        timer: records the times of steps; None where nobody asks for them.
    """

    def __init__(self, step: ModelStep):
        self.timer = step.timer
        self._step = step
        self._model = step.model
        self._reduction = step.reduction
        self._batches_read: tf.Variable | None = None
        if step.reduction.multi_worker:
            with default_strategy_scope(), tf.device("CPU:0"):
                self._batches_read = tf.Variable(0, trainable=False, dtype=tf.int64)
        # By the kind of data: (known_length, needs_row_count) of Batches.
        self._executions: dict[tuple[bool, bool], Callable[..., Any]] = {}
        self._states: States = []
        self._totals: list[bytes] = []  # of the metrics, after the last execution

    @property
    def traces(self) -> str:
        return self._step.traces

    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""
        if not resume:
            self._model.reset_metrics()
        self._states, self._totals = self._step.states.at_start(), self._metric_values()

    def _metric_values(self) -> list[bytes]:
        return [raw_value(variable).numpy().tobytes() for variable in self._step.states.variables]

    def run(
        self, data: Epoch, n: int, seconds: float, *, stop_requested: bool = False
    ) -> Execution:
        """Run `n` steps of an epoch, or fewer where its data may end and does.

        Args:
            n: global batches to use.
            seconds: how long this task's last execution took. Every task gets the chief's time
                back, so that all choose the same next `n`.
            stop_requested: this task has received SIGTERM. The result says on every task whether
                any task has.
        """
        if self._metric_values() != self._totals:  # a callback has changed a metric
            self.reset(resume=True)
        self._step.batch_size = data.batches.batch_size
        if self._batches_read is not None:
            self._reduction.peers.reads_batches(self._batches_read.numpy)
        report = tf.constant([seconds if self._reduction.is_chief else 0.0, float(stop_requested)])
        kind = data.batches.known_length, data.batches.needs_row_count
        if kind not in self._executions:
            self._executions[kind] = self._step.in_graph(functools.partial(self._run, *kind))
        args = data.iterator, tf.constant(n), report, self._states
        finished = self._step.call(self._executions[kind], *args)
        logs, self._states, steps, report = finished
        self._totals = self._metric_values()
        chief_seconds, stop_requests = report.numpy().tolist()
        return Execution(as_logs(logs), int(steps), chief_seconds, stop_requested=stop_requests > 0)

    def _run(
        self,
        known_length: bool,
        needs_row_count: bool,
        batches: BatchIterator,
        n: tf.Tensor,
        report: tf.Tensor,
        states: States,
    ) -> tuple[dict[str, tf.Tensor], States, tf.Tensor, tf.Tensor]:
        """An execution: traced as one graph, or run eagerly.

        Args:
            report: of this task, summed over tasks: the chief's seconds, and whether it has
                received SIGTERM.

        Returns:
            (logs, the metrics' states, the number of steps, the summed report).
        """

        def body(
            done: tf.Tensor, _: tf.Tensor, before: Carried
        ) -> tuple[tf.Tensor, tf.Tensor, Carried]:
            if needs_row_count:
                more, after = self._next_agreed(batches, before)
            elif known_length:
                more, after = tf.constant(True), self._one_step(self._next_batch(batches), before)
            else:
                more, after = self._next_if_any(batches, before)
            return done + tf.cast(more, tf.int32), more, after

        steps, more = tf.constant(0), tf.constant(True)
        last: Carried = (states, {})
        if tf.executing_eagerly():
            while more and steps < n:
                steps, more, last = body(steps, more, last)
        else:
            self._reduction.peers.enters("compiling")
            last = states, self._empty_outputs(batches, last)
            start = steps, more, last
            steps, _, last = tf.while_loop(
                lambda done, more, before: (done < n) & more, body, start
            )
        metrics = self._step.states
        values, outputs, report = metrics.over_all(*last, report)
        if self.timer is not None:
            self.timer.execution_is_done(steps)
        with keras.StatelessScope(zip(metrics.variables, values, strict=True)):
            logs = self._step.outputs.results(outputs)
        return logs, last[0], steps, report

    def _next_if_any(self, batches: BatchIterator, before: Carried) -> tuple[tf.Tensor, Carried]:
        """The next step of data that may end, if every worker has a batch."""
        batch = self._next_batch(batches, if_any=True)
        more = self._synchronize(self._reduction.on_all_workers, batch.has_value())
        return more, tf.cond(
            more, lambda: self._one_step(batch.get_value(), before), lambda: before
        )

    def _next_agreed(self, batches: BatchIterator, before: Carried) -> tuple[tf.Tensor, Carried]:
        """The next step of data of which workers have different numbers of rows."""
        batch = self._next_batch(batches)
        rows, parts_with_data = self._synchronize(self._step.rows_of_all, batch)
        return parts_with_data > 0, tf.cond(
            rows > 0, lambda: self._one_step(batch, before, rows), lambda: before
        )

    def _next_batch(self, batches: BatchIterator, *, if_any: bool = False) -> Any:
        """The next batch, or an Optional of it: the beginning of a step.

        Batches are counted: the other workers find out which worker reads slowly.
        """
        with contextlib.nullcontext() if self.timer is None else self.timer.step():
            batch = batches.get_next_as_optional() if if_any else next(batches)
        if self._batches_read is not None:
            read = batch.has_value() if if_any else batch
            tensors = tf.nest.flatten(read, expand_composites=True)
            with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
                self._batches_read.assign_add(1, read_value=False)
        return batch

    def _synchronize(self, function: Callable[[Any], Any], value: Any) -> Any:
        """`function(value)`, which waits for all workers before the step of a batch."""
        if self.timer is None:
            return function(value)
        return self.timer.waits.synchronize(function, value)

    def _one_step(self, batch: Parts, before: Carried, rows: tf.Tensor | None = None) -> Carried:
        """One global batch, in cross-replica context."""
        states, outputs = self._step(batch, before[0], rows)
        of_replicas = {name: [replica[name] for replica in outputs] for name in outputs[0]}
        return states, {
            name: tf.add_n(values) if values[0].dtype.is_floating else values[0]
            for name, values in of_replicas.items()
        }

    def _empty_outputs(self, batches: BatchIterator, before: Carried) -> dict[str, tf.Tensor]:
        """Zeros of the structure that an overridden step returns, so that a loop can carry it."""
        if not self._step.outputs.has_own_values:
            return {}
        trace = tf.function(  # never runs
            lambda batches: self._one_step(self._next_batch(batches), before)[1], autograph=False
        )
        return zeros_of(trace.get_concrete_function(batches).structured_outputs)


class Predictor:
    """The compiled predict_step of a model.

    A global batch is cut into contiguous parts in replica order. The outputs of the parts, one
    after another, are in the order of the rows.
    """

    def __init__(self, step: ModelStep):
        self._reduction = step.reduction
        self._step = step
        self._of_batch = step.in_graph(self._outputs_of_batch)
        self._of_next = step.in_graph(lambda data, *args: self._outputs_of_batch(next(data), *args))

    @property
    def traces(self) -> str:
        return self._step.traces

    def outputs(self, data: Epoch) -> Iterator[Structure]:
        """The outputs for each global batch, in order."""
        while True:
            try:
                yield self._next_outputs(data)
            except (StopIteration, tf.errors.OutOfRangeError):
                return

    def _next_outputs(self, data: Epoch) -> Structure:
        call = self._step.call
        if data.steps is not None or not self._reduction.multi_worker:
            return call(self._of_next, data.iterator, data.batches.needs_row_count)
        # gather is a collective: no worker may continue alone.
        batch = data.iterator.get_next_as_optional()
        if self._reduction.any_worker(not bool(batch.has_value())):
            raise StopIteration
        return call(self._of_batch, batch.get_value(), data.batches.needs_row_count)

    def _outputs_of_batch(self, batch: Parts, needs_row_count: bool) -> Structure:
        step = self._step
        if not tf.executing_eagerly():
            self._reduction.peers.enters("compiling")
        rows_of_all = step.rows_of_all(batch)[0] if needs_row_count else None
        before = step.states.at_start()
        states, outputs = step(batch, before, rows_of_all)
        # Layers may update metrics in their call.
        if any(new is not old for new, old in zip(states[0], before[0], strict=True)):
            step.states.over_all(states, {}, tf.constant(0.0))
        return keras.tree.map_structure(self._rows_of_all, *outputs)

    def _rows_of_all(self, *parts: tf.Tensor) -> tf.Tensor:
        """The rows of all replicas of all workers, from those of this worker's replicas."""
        if self._reduction.multi_worker and not tf.executing_eagerly():
            return self._reduction.strategy.gather(per_replica(parts, always=True), axis=0)
        if len(parts) == 1:
            return parts[0]
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(axis=0, sp_inputs=list(parts))
        return tf.concat(parts, axis=0)


class SynchronousEngine:
    """Steps on all replicas of a synchronous strategy, each task running its own part.

    Args:
        one_trace, lazy_updates: as `distribute` takes them.

    Attributes:
        reduction: over the workers that have to agree.
        readers: the workers.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        one_trace: OneTrace = "auto",
        *,
        lazy_updates: bool = False,
    ):
        self._strategy = strategy
        self.reduction = reduction = SynchronousReduction(strategy)
        shard = Shard(reduction.worker, reduction.workers)
        from_each = functools.partial(from_each_worker, reduction)
        self.readers = Readers(reduction.replicas, shard, from_each)
        self._one_trace: OneTrace = one_trace
        self._lazy_updates = lazy_updates
        # On a TPU steps cannot write what was made outside; they run in the calling thread. So does
        # the one replica of the default strategy, which has no devices.
        devices = [] if isinstance(strategy, tf.distribute.TPUStrategy) else reduction.devices
        self._seeds = Seeds(devices, reduction.from_chief)

    def feed(self, parts_of: PartsOf, *, eagerly: bool) -> Iterable[Parts]:
        """The input that the programs iterate over: the parts of this task's replicas.

        Replicas on CPUs get a plain dataset, because TensorFlow's distributed iterator costs more
        than a small step.

        Args:
            eagerly: steps run once on each task, on the whole global batch.
        """
        reduction = self.reduction
        if not eagerly and not reduction.feeds_on_host:
            return distributed(parts_of, self._strategy)
        local = reduction.first_replica, reduction.local_replicas
        replicas = (0, 1, 1) if eagerly else (*local, reduction.replicas)
        return parts_of(*replicas).prefetch(tf.data.AUTOTUNE)

    def finalize(self, model: keras.Model) -> None:
        """End a training: averaged weights replace the last ones."""
        optimizer, strategy = model.optimizer, self._strategy
        with self.reduction.peers.barrier("averaged weights"), strategy.scope():
            if (sharded := sharded_optimizer_of(optimizer)) is None:
                optimizer.finalize_variable_values(model.trainable_weights)
            elif any(getattr(opt, "use_ema", False) for opt in with_inner_optimizers(optimizer)):
                tf.function(lambda: strategy.run(sharded.finalize), autograph=False)()

    def make_program(
        self, model: keras.Model, kind: str, *, timed: bool = False
    ) -> SynchronousProgram:
        """The compiled "train" or "test" steps; with a timer if `timed`."""
        if timed and model.jit_compile and not model.run_eagerly:
            warn("jit_compile=True is off: XLA cannot record the times for WorkerTensorBoard.")
        return SynchronousProgram(self._step(model, kind, StepTimer() if timed else None))

    def make_predictor(self, model: keras.Model) -> Predictor:
        return Predictor(self._step(model, "predict"))

    def _step(self, model: keras.Model, kind: str, timer: StepTimer | None = None) -> ModelStep:
        shared = self._seeds, timer, self._one_trace
        return ModelStep(model, self.reduction, kind, *shared, lazy_updates=self._lazy_updates)
