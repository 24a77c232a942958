"""Many steps of a model in one execution: the loop over an iterator of parts, in the graph.

An execution runs `n` global batches without coming back to Python. The metrics' states travel
through the loop, one set for each local replica, and are reduced over all replicas once, at its
end; so logs are the same on every worker. Predictions come back batch by batch: every row once,
in input order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.strategies.liveness import say
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training._tf_private import recorded_operations
from tfdist_ext.training.inputs import Part, Parts
from tfdist_ext.training.programs import ProgramBase
from tfdist_ext.training.protocols import (
    BatchIterator,
    Epoch,
    Execution,
    NullStepTimer,
    StepFunction,
    Structure,
)
from tfdist_ext.training.steps import exact
from tfdist_ext.training.steps.context import StepContext, running_step
from tfdist_ext.training.steps.logs import (
    flat,
    is_carried,
    metrics_of,
    names_of_updated,
    own_outputs,
    results,
)
from tfdist_ext.training.steps.replaced import (
    check_activity_regularizers,
    check_lookups,
    check_passed,
    functions_in_place,
    has_own_apply,
    step_targets,
    uses_keras_step,
)
from tfdist_ext.training.steps.scope import (
    ReplicaScope,
    assign_written,
    contribution_of_part,
    metric_methods,
    metrics_and_others,
    rows_of_shared,
)
from tfdist_ext.training.synchronous.reduction import States, SynchronousReduction
from tfdist_ext.training.variables import LocalVariables

__all__ = ["Predictor", "SynchronousProgram", "reporting_progress"]


# Logs, the metrics' values, the replicas' states, steps done, and the chief's seconds: what an
# execution returns.
Finished: TypeAlias = tuple[dict[str, tf.Tensor], list[tf.Tensor], States, tf.Tensor, tf.Tensor]


# What a step leaves for the logs, by name; a loop in the graph carries it.
Outputs: TypeAlias = dict[str, tf.Tensor]


class SynchronousProgram(ProgramBase):
    """The compiled executions of one step of a model, on all replicas of a strategy.

    Args:
        step: draws random numbers for the replica that runs it.
        timer: is told when steps begin, and when they are done.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        reduction: SynchronousReduction,
        kind: str,
        step: StepFunction,
        timer: NullStepTimer,
    ):
        super().__init__(model, kind, step)
        self._strategy = strategy
        self._reduction = reduction
        self._timer = timer
        # An apply of the object alone gets its gradients summed.
        self._keras_step = uses_keras_step(model, kind) and not has_own_apply(model.optimizer)
        self._replaced = [*step_targets(), *exact.own_applies(model)]
        self._metric_objects = metrics_of(model)
        self._own = LocalVariables(strategy, reduction.local_replicas)
        self._rows = rows_of_shared(strategy, reduction.local_replicas)
        self._replica = self._one_replica
        # XLA knows no time of day.
        if model.jit_compile and not model.run_eagerly and not timer.records:
            self._replica = tf.function(self._one_replica, jit_compile=True, autograph=False)
        compiled: Callable[[Any], Any] = lambda function: function  # noqa: E731
        if not model.run_eagerly:
            compiled = tf.function(autograph=False, reduce_retracing=True)
        self._counted = compiled(self._run_counted)
        self._open_ended = compiled(self._run_open_ended)
        self._agreed = compiled(self._run_agreed)
        self._of_metrics: set[str] = set()  # names of logs, of eager steps
        self._states: States = []
        self._turn: tf.Tensor | None = None
        self._passed = False  # the check of what a step has called
        self._compiles = True  # the next execution does

    def reset(self, *, resume: bool = False) -> None:
        """Start the metrics anew, as at the beginning of an epoch, or go on from what they are."""
        if not resume:
            self._model.reset_metrics()
        start = [tf.convert_to_tensor(kp.raw_value(variable)) for variable in self._metrics]
        self._states = self._reduction.split_states(self._metrics, start)

    def run(
        self,
        iterator: BatchIterator,
        n: int,
        *,
        seconds: float,
        known_length: bool,
        needs_row_count: bool,
    ) -> Execution:
        """Run `n` steps, or fewer where the data may end and does.

        Args:
            iterator: over this task's parts of global batches.
            n: global batches to use.
            seconds: how long this task's last execution took; the chief's figure comes back on
                every task, so that all choose the same next `n`.
            known_length: there are `n` more batches for sure.
            needs_row_count: the rows of each global batch are to be counted; see `GlobalBatches`.
        """
        run = self._counted if known_length else self._open_ended
        run = self._agreed if needs_row_count else run
        with self._reporting_compilation():
            result = run(iterator, tf.constant(n), tf.constant(seconds), self._states)
        logs, values, self._states, steps, chief_seconds = result
        for variable, value in zip(self._metrics, values, strict=True):
            kp.raw_value(variable).assign(value)
        logs = {  # by name, as Keras sorts them
            name: float(value) if value.shape.rank == 0 else value.numpy()
            for name, value in sorted(logs.items())
        }
        return Execution(logs, int(steps), float(chief_seconds))

    def _reporting_compilation(self) -> contextlib.AbstractContextManager[None]:
        """Scope of an execution; the first one may take minutes, which the chief says."""
        first, self._compiles = self._compiles, False
        if not first or not self._reduction.is_chief or self._model.run_eagerly:
            return contextlib.nullcontext()
        return reporting_progress(f"compiling the first step ({self._reduction.replicas} replicas)")

    def logs_of_this_task(self) -> dict[str, float]:
        """The metrics over this task's own rows of the epoch so far. Nobody is waited for."""
        values = [
            tf.add_n(list(of_replicas)) if variable.aggregation == "sum" else of_replicas[0]
            for variable, *of_replicas in zip(self._metrics, *self._states, strict=True)
        ]
        with ReplicaScope(zip(self._metrics, values, strict=True)):
            logs = results(self._model, {}, set(), set())
            if self._own_outputs:
                updated = names_of_updated(self._model, self._updated)
                logs = {name: value for name, value in logs.items() if name in updated}
        if self._derived is not None:
            logs.update(tf.function(self._derived.of_states, autograph=False)(values))
        return {name: float(value) for name, value in logs.items() if value.shape.rank == 0}

    def _run_counted(
        self, iterator: BatchIterator, n: tf.Tensor, seconds: tf.Tensor, states: States
    ) -> Finished:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states)
        batches = self._timer.timed_iterator(iterator)

        def body(
            i: tf.Tensor, states: States, outputs: Outputs
        ) -> tuple[tf.Tensor, States, Outputs]:
            states, outputs = self._one_step(next(batches), states, turn=i)
            return i + 1, states, outputs

        start = (tf.constant(0), states, self._empty_outputs(iterator, states))
        done, states, outputs = tf.while_loop(lambda i, *_: i < n, body, start)
        return self._finish(states, outputs, done, seconds)

    def _run_open_ended(
        self, iterator: BatchIterator, n: tf.Tensor, seconds: tf.Tensor, states: States
    ) -> Finished:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states)
        batches = self._timer.timed_iterator(iterator)

        def body(
            i: tf.Tensor, more: tf.Tensor, states: States, outputs: Outputs
        ) -> tuple[tf.Tensor, tf.Tensor, States, Outputs]:
            batch = batches.get_next_as_optional()
            more = self._timer.synchronize(self._reduction.on_all_workers, batch.has_value())
            states, outputs = tf.cond(
                more,
                lambda: self._one_step(batch.get_value(), states, turn=i),
                lambda: (states, outputs),
            )
            return i + tf.cast(more, tf.int32), more, states, outputs

        empty = self._empty_outputs(iterator, states)
        start = (tf.constant(0), tf.constant(True), states, empty)
        done, _, states, outputs = tf.while_loop(
            lambda i, more, *_: tf.logical_and(i < n, more), body, start
        )
        return self._finish(states, outputs, done, seconds)

    def _run_agreed(
        self, iterator: BatchIterator, n: tf.Tensor, seconds: tf.Tensor, states: States
    ) -> Finished:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states, needs_row_count=True)
        batches = self._timer.timed_iterator(iterator)

        def body(
            i: tf.Tensor, more: tf.Tensor, states: States, outputs: Outputs
        ) -> tuple[tf.Tensor, tf.Tensor, States, Outputs]:
            batch = next(batches)
            rows, real = self._timer.synchronize(self._reduction.rows_of_all, batch)
            more = real > 0
            states, outputs = tf.cond(
                rows > 0,
                lambda: self._one_step(batch, states, rows, turn=i),
                lambda: (states, outputs),
            )
            return i + tf.cast(more, tf.int32), more, states, outputs

        start = (tf.constant(0), tf.constant(True), states, self._empty_outputs(iterator, states))
        done, _, states, outputs = tf.while_loop(
            lambda i, more, *_: tf.logical_and(i < n, more), body, start
        )
        return self._finish(states, outputs, done, seconds)

    def _run_eagerly(
        self,
        iterator: BatchIterator,
        n: tf.Tensor,
        seconds: tf.Tensor,
        states: States,
        *,
        needs_row_count: bool = False,
    ) -> Finished:
        done = 0
        outputs: Outputs = {}
        batches = self._timer.timed_iterator(iterator)
        count = functools.partial(self._timer.synchronize, self._reduction.rows_of_all)
        while done < int(n):
            try:
                batch = next(batches)
            except StopIteration:
                break
            rows, real = count(batch) if needs_row_count else (None, 1)
            if real == 0:
                break
            done += 1
            if rows is None or rows > 0:
                with recorded_operations():
                    states, outputs = self._one_step(batch, states, rows)
        return self._finish(states, outputs, tf.constant(done), seconds)

    def _one_step(
        self,
        batch: Parts,
        states: States,
        rows: tf.Tensor | None = None,
        turn: tf.Tensor | None = None,
    ) -> tuple[States, Outputs]:
        """One global batch, in cross-replica context; `turn` of the loop in the graph, if any."""
        self._turn = turn
        eager = bool(self._own_outputs and self._model.run_eagerly)
        with (
            functions_in_place(self._replaced),
            metric_methods(self._metric_objects, eager=eager),
        ):
            new, written, outputs, notes = self._reduction.run(self._replica, batch, states, rows)
        local = self._strategy.experimental_local_results
        assign_written(self._strategy, self._others, written)
        if self._timer.records:
            self._timer.step_is_done(list(zip(*(local(note) for note in notes), strict=True)))
        by_replica = zip(*(local(value) for value in new), strict=True)
        # An empty zip has lost how many replicas there were.
        states = [list(state) for state in by_replica] or states
        return states, {name: _sum(local(value)) for name, value in outputs.items()}

    def _one_replica(
        self, part: Part, states: States, rows_of_all: tf.Tensor | None = None
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor], Outputs, tuple[tf.Tensor, ...]]:
        """One replica's part of a global batch, in that replica's context.

        Args:
            rows_of_all: of the global batch, where the part itself does not know.
        """
        mine = self._reduction.of_this_replica(states)
        rows, of, batch = part
        of = of if rows_of_all is None else rows_of_all
        here = None
        timer = self._timer.replica_timer()
        if tf.distribute.has_strategy() or timer is not None:
            on = self._reduction
            # Keys are those of collectives between workers.
            turn = self._turn if on.replicas > on.local_replicas else None
            size = on.replicas, on.local_replicas
            here = StepContext(rows, of, *size, batch, self._keras_step, turn, timer)
            here.substitutes = exact.substitutes_of(here, self._rows)
        recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if here and self._model.run_eagerly:
            recording = here.dependence.recording()
        with (
            running_step(here),
            recording,
            ReplicaScope(zip(self._metrics, mine, strict=True), self._others, self._own) as scope,
        ):
            returned = self._step(batch)
            logs = own_outputs(self._model, returned) if self._own_outputs else {}
            outputs = self._carried(logs, returned, scope, here)
        self._check_passed(here, scope)
        self._updated |= scope.updated
        new, written = scope.outcome(here)
        notes = () if timer is None else timer.notes(new)
        return new, written, outputs, notes

    def _check_passed(self, here: StepContext | None, scope: ReplicaScope) -> None:
        if here is not None and not (self._passed and tf.executing_eagerly()):
            record = scope.record(here.called)
            check_passed(self._model, self._kind, record)
            check_lookups(self._model, record)
            if here.replicas > 1 and self._kind != "predict":
                check_activity_regularizers(self._model)
            self._passed = True
        scope.forget_losses(self._model)

    def _carried(
        self,
        logs: dict[str, tf.Tensor],
        returned: Any,
        scope: ReplicaScope,
        here: StepContext | None,
    ) -> Outputs:
        """What a replica adds to the values from which the logs are computed in the end."""
        if not self._own_outputs:
            return {}
        values = {name: (value, None) for name, value in logs.items()}
        if tf.executing_eagerly():
            results = {id(value) for value in scope.results}
            self._of_metrics = {n for n, value in flat(returned).items() if id(value) in results}
        else:
            states = enumerate(self._metrics)
            final = {scope.get_current_value(variable).name: i for i, variable in states}
            warns = self._reduction.replicas > 1
            has_mean = _has_mean(here)
            derived = self._derive_logs(logs, scope.versions, final, has_mean, warns=warns)
            values = {str(i): value for i, value in enumerate(derived.returned)}
        carried = {}
        for name, (value, variable) in values.items():
            if here and variable is not None:
                # Float64, as what is no float is not summed.
                without_rows = tf.cast(scope.without_rows[id(variable)], value.dtype)
                value = contribution_of_part(here, variable, value, without_rows)
                carried[name] = tf.cast(value, tf.float64)
            else:
                carried[name] = here.contribution(value) if here else value
        return carried

    def _logs(self, values: Sequence[tf.Tensor], last: Outputs) -> dict[str, tf.Tensor]:
        """The logs.

        Args:
            values: the metrics' states, over all replicas.
            last: the values that the last step carried, over all replicas.
        """
        logs, of_metrics = last, self._of_metrics
        if self._derived is not None and not tf.executing_eagerly():
            carried = [last[str(i)] for i in range(len(self._derived.returned))]
            logs, of_metrics = self._derived.compute(values, carried), self._derived.names
        with ReplicaScope(zip(self._metrics, values, strict=True)):
            return results(self._model, logs, of_metrics, self._updated)

    def _empty_outputs(self, iterator: BatchIterator, states: States) -> Outputs:
        """Zeros of the structure that an overridden step returns, so that a loop can carry it."""
        if not self._own_outputs:
            return {}
        trace = tf.function(lambda it: self._one_step(next(it), states)[1], autograph=False)
        # This step is never run: nobody notes when it began.
        timer, self._timer = self._timer, NullStepTimer()
        try:
            spec_of = trace.get_concrete_function(iterator).structured_outputs
        finally:
            self._timer = timer
        return {
            name: tf.zeros([n or 0 for n in spec.shape], spec.dtype)
            for name, spec in spec_of.items()
        }

    def _finish(
        self, states: States, outputs: Outputs, steps: tf.Tensor, seconds: tf.Tensor
    ) -> Finished:
        values, last, chief_seconds = self._reduction.over_all(
            self._metrics, states, outputs, seconds
        )
        self._timer.execution_is_done(steps)
        return self._logs(values, last), values, states, steps, chief_seconds


def _has_mean(here: StepContext | None) -> Callable[[tf.Tensor], bool]:
    """Whether values of a tensor, one of each replica, have a mean."""

    def has_mean(value: tf.Tensor) -> bool:
        if not is_carried(value):
            return False
        return here is None or here.replicas == 1 or not here.has_rows(value)

    return has_mean


def _sum(values: tuple[tf.Tensor, ...]) -> tf.Tensor:
    return tf.add_n(values) if values[0].dtype.is_floating else values[0]


class Predictor:
    """The compiled predict_step of a model.

    A global batch is cut into contiguous parts in replica order, so the parts' outputs, put one
    after another, are in the order of the rows.

    Args:
        step: draws random numbers for the replica that runs it.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        reduction: SynchronousReduction,
        step: StepFunction,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._reduction = reduction
        self._rows = rows_of_shared(strategy, reduction.local_replicas)
        # Layers may write while they predict: masked kernels, counters, metrics of their own.
        self._metrics, self._watched = metrics_and_others(model)
        self._own = LocalVariables(strategy, reduction.local_replicas)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._step = step
        self._of_batch: Callable[..., Structure] = self._outputs_of_batch
        self._of_next: Callable[..., Structure] = self._outputs_of_next
        if not model.run_eagerly:
            self._of_batch = tf.function(self._of_batch, autograph=False, reduce_retracing=True)
            self._of_next = tf.function(self._of_next, autograph=False, reduce_retracing=True)

    def outputs(self, data: Epoch) -> Iterator[Structure]:
        """The outputs for each global batch, in order."""
        while True:
            try:
                yield self._next_outputs(data)
            except (StopIteration, tf.errors.OutOfRangeError):
                return

    def _next_outputs(self, data: Epoch) -> Structure:
        if data.steps is not None or not self._reduction.multi_worker:
            return self._of_next(data.iterator, data.needs_row_count)
        # gather is a collective: no worker may go on alone.
        batch = data.iterator.get_next_as_optional()
        if self._reduction.any_worker(not bool(batch.has_value())):
            raise StopIteration
        return self._of_batch(batch.get_value(), data.needs_row_count)

    def _outputs_of_next(self, iterator: BatchIterator, needs_row_count: bool) -> Structure:
        return self._outputs_of_batch(next(iterator), needs_row_count)

    def _outputs_of_batch(self, batch: Parts, needs_row_count: bool) -> Structure:
        on = self._reduction
        rows_of_all = on.rows_of_all(batch)[0] if needs_row_count else None
        values = [tf.convert_to_tensor(kp.raw_value(variable)) for variable in self._metrics]
        states = on.split_states(self._metrics, values)
        with functions_in_place(step_targets()):
            outputs, new, written = on.run(self._of_one_part, batch, states, rows_of_all)
        assign_written(self._strategy, self._watched, written)
        self._assign_metrics(new)
        return keras.tree.map_structure(self._whole, outputs)

    def _assign_metrics(self, new: list[tf.Tensor]) -> None:
        """Give the metrics that layers update in their call the states of all replicas."""
        updated = [
            (variable, self._strategy.experimental_local_results(value))
            for variable, value in zip(self._metrics, new, strict=True)
            if id(variable) in self._updated
        ]
        if not updated:
            return
        variables, local = zip(*updated, strict=True)
        states = [list(of_replica) for of_replica in zip(*local, strict=True)]
        values, _, _ = self._reduction.over_all(variables, states, {}, tf.constant(0.0))
        for variable, value in zip(variables, values, strict=True):
            kp.raw_value(variable).assign(value)

    def _of_one_part(
        self, part: Part, states: States, rows_of_all: tf.Tensor | None = None
    ) -> tuple[Structure, list[tf.Tensor], dict[str, tf.Tensor]]:
        """(outputs, metrics' states, values written) of one replica, in its context."""
        mine = self._reduction.of_this_replica(states)
        rows, of, batch = part
        of = of if rows_of_all is None else rows_of_all
        here = None
        if tf.distribute.has_strategy():
            here = StepContext(
                rows, of, self._reduction.replicas, self._reduction.local_replicas, batch
            )
            here.substitutes = exact.substitutes_of(here, self._rows)
        with (
            running_step(here),
            ReplicaScope(zip(self._metrics, mine, strict=True), self._watched, self._own) as scope,
        ):
            outputs = self._step(batch)
        if here is not None:
            check_lookups(self._model, scope.record(here.called))
        scope.forget_losses(self._model)
        self._updated |= scope.updated
        outputs = keras.tree.map_structure(lambda value: _if_any(rows, value), outputs)
        return outputs, *scope.outcome(here)

    def _whole(self, value: tf.Tensor) -> tf.Tensor:
        if self._reduction.multi_worker:
            return self._strategy.gather(value, axis=0)
        parts = self._strategy.experimental_local_results(value)
        return parts[0] if len(parts) == 1 else _concat(parts)


def _if_any(rows: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The outputs, or none where the replica only ran on a row that is another's."""
    if isinstance(value, tf.SparseTensor) or value.shape.rank == 0:
        return value
    length = value.nrows() if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]
    return value[: tf.where(rows > 0, length, tf.zeros_like(length))]


def _concat(parts: tuple[tf.Tensor, ...]) -> tf.Tensor:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.concat(parts, axis=0)


FIRST_AFTER = 10.0  # seconds; then after ever longer ones


LONGEST_PAUSE = 120.0


@contextlib.contextmanager
def reporting_progress(what: str) -> Iterator[None]:
    """While the body runs, say what it does: after 10 s, and then ever less often.

    In a thread of its own: the body stays in the main one, where Ctrl-C reaches it.
    """
    done = threading.Event()

    def report() -> None:
        waited, pause = 0.0, FIRST_AFTER
        while not done.wait(pause):
            waited += pause
            say(f"{what}, for {waited:.0f} s ...")
            pause = min(waited, LONGEST_PAUSE)

    thread = threading.Thread(target=report, name="tfdist-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
