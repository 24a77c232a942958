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
from tfdist_ext.strategies.waiting import FIRST_AFTER, LONGEST_PAUSE
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


# What a step gives to the next one.
Carried: TypeAlias = tuple[States, Outputs]


# Whether there was a batch for a step, and what it gives to the next one.
Turn: TypeAlias = tuple[tf.Tensor, Carried]


class SynchronousProgram(ProgramBase):
    """The compiled executions of one step of a model, on all replicas of a strategy.

    Args:
        step: draws random numbers for the replica that runs it.
        timer: is told when steps begin, and when they are done.

    Attributes:
        reduction: over the replicas that run it.
        timer: as given.
    """

    def __init__(
        self,
        model: keras.Model,
        reduction: SynchronousReduction,
        kind: str,
        step: StepFunction,
        timer: NullStepTimer,
    ):
        super().__init__(model, kind, step)
        self._strategy = reduction.strategy
        self.reduction = reduction
        self.timer = timer
        # An apply of the object alone gets its gradients summed.
        self._keras_step = uses_keras_step(model, kind) and not has_own_apply(model.optimizer)
        self._replaced = [*step_targets(), *exact.own_applies(model)]
        self._metric_objects = metrics_of(model)
        self._own = LocalVariables(reduction.strategy, reduction.local_replicas)
        self._rows = rows_of_shared(reduction.strategy, reduction.local_replicas)
        self._replica = self._one_replica
        # XLA knows no time of day.
        if model.jit_compile and not model.run_eagerly and not timer.records:
            self._replica = tf.function(self._one_replica, jit_compile=True, autograph=False)
        self._counted = self._in_graph(self._next_counted)
        self._open_ended = self._in_graph(self._next_if_any)
        self._agreed = self._in_graph(self._next_agreed)
        self._of_metrics: set[str] = set()  # names of logs, of eager steps
        self._states: States = []
        self._turn: tf.Tensor | None = None  # of the loop in the graph
        self._passed = False  # the check of what a step has called
        self._compiles = True  # the next execution does

    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""
        if not resume:
            self._model.reset_metrics()
        self._states = self.reduction.split_states(self._metrics)

    def run(self, data: Epoch, n: int, seconds: float) -> Execution:
        """Run `n` steps of an epoch, or fewer where its data may end and does."""
        if self._model.run_eagerly:
            result = self._run_eagerly(data, n, seconds)
        else:
            run = self._counted if data.known_length else self._open_ended
            run = self._agreed if data.needs_row_count else run
            with self._reporting_compilation():
                result = run(data.iterator, tf.constant(n), tf.constant(seconds), self._states)
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
        if not first or not self.reduction.is_chief:
            return contextlib.nullcontext()
        return reporting_progress(f"compiling the first step ({self.reduction.replicas} replicas)")

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

    def _in_graph(
        self, next_step: Callable[[BatchIterator, Carried], Turn]
    ) -> Callable[..., Finished]:
        """An execution: a loop of `next_step(batches, what the step before gave)`."""

        def run(
            iterator: BatchIterator, n: tf.Tensor, seconds: tf.Tensor, states: States
        ) -> Finished:
            batches = self.timer.timed_iterator(iterator)

            def body(
                i: tf.Tensor, _: tf.Tensor, before: Carried
            ) -> tuple[tf.Tensor, tf.Tensor, Carried]:
                self._turn = i
                more, after = next_step(batches, before)
                return i + tf.cast(more, tf.int32), more, after

            last = states, self._empty_outputs(iterator, states)
            start = (tf.constant(0), tf.constant(True), last)
            done, _, last = tf.while_loop(lambda i, more, _: (i < n) & more, body, start)
            return self._finish(last, done, seconds)

        return tf.function(run, autograph=False, reduce_retracing=True)

    def _next_counted(self, batches: BatchIterator, before: Carried) -> Turn:
        return tf.constant(True), self._one_step(next(batches), before[0])

    def _next_if_any(self, batches: BatchIterator, before: Carried) -> Turn:
        batch = batches.get_next_as_optional()
        more = self.timer.synchronize(self.reduction.on_all_workers, batch.has_value())
        step = functools.partial(self._one_step, states=before[0])
        return more, tf.cond(more, lambda: step(batch.get_value()), lambda: before)

    def _next_agreed(self, batches: BatchIterator, before: Carried) -> Turn:
        batch = next(batches)
        rows, real = self.timer.synchronize(self.reduction.rows_of_all, batch)
        step = functools.partial(self._one_step, batch, before[0], rows)
        return real > 0, tf.cond(rows > 0, step, lambda: before)

    def _run_eagerly(self, data: Epoch, n: int, seconds: float) -> Finished:
        done, states = 0, self._states
        outputs: Outputs = {}
        batches = self.timer.timed_iterator(data.iterator)
        count = functools.partial(self.timer.synchronize, self.reduction.rows_of_all)
        while done < n:
            try:
                batch = next(batches)
            except StopIteration:
                break
            rows, real = count(batch) if data.needs_row_count else (None, 1)
            if real == 0:
                break
            done += 1
            if rows is None or rows > 0:
                with recorded_operations():
                    states, outputs = self._one_step(batch, states, rows)
        return self._finish((states, outputs), tf.constant(done), tf.constant(seconds))

    def _one_step(self, batch: Parts, states: States, rows: tf.Tensor | None = None) -> Carried:
        """One global batch, in cross-replica context."""
        eager = bool(self._own_outputs and self._model.run_eagerly)
        with (
            functions_in_place(self._replaced),
            metric_methods(self._metric_objects, eager=eager),
        ):
            new, written, outputs, notes = self.reduction.run(self._replica, batch, states, rows)
        local = self._strategy.experimental_local_results
        assign_written(self._strategy, self._others, written)
        if self.timer.records:
            self.timer.step_is_done(list(zip(*(local(note) for note in notes), strict=True)))
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
        mine = self.reduction.of_this_replica(states)
        here = None
        timer = self.timer.replica_timer()
        if tf.distribute.has_strategy() or timer is not None:
            on = self.reduction
            # Keys are those of collectives between workers.
            turn = self._turn if on.multi_worker else None
            here = _context(on, part, rows_of_all, self._rows, self._keras_step, turn, timer)
        recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if here and self._model.run_eagerly:
            recording = here.dependence.recording()
        with (
            running_step(here),
            recording,
            ReplicaScope(zip(self._metrics, mine, strict=True), self._others, self._own) as scope,
        ):
            returned = self._step(part[-1])
            outputs = self._carried(returned, scope, here) if self._own_outputs else {}
        if here is not None and not (self._passed and tf.executing_eagerly()):
            record = scope.record(here.called)
            check_passed(self._model, self._kind, record)
            check_lookups(self._model, record)
            if here.replicas > 1 and self._kind != "predict":
                check_activity_regularizers(self._model)
            self._passed = True
        scope.forget_losses(self._model)
        self._updated |= scope.updated
        new, written = scope.outcome(here)
        notes = () if timer is None else timer.notes(new)
        return new, written, outputs, notes

    def _carried(self, returned: Any, scope: ReplicaScope, here: StepContext | None) -> Outputs:
        """A replica's contribution to the values from which the logs are computed in the end."""

        def has_mean(value: tf.Tensor) -> bool:
            if not is_carried(value):
                return False
            return here is None or here.replicas == 1 or not here.has_rows(value)

        logs = own_outputs(self._model, returned)
        values = {name: (value, None) for name, value in logs.items()}
        if tf.executing_eagerly():
            results = {id(value) for value in scope.results}
            self._of_metrics = {n for n, value in flat(returned).items() if id(value) in results}
        else:
            states = enumerate(self._metrics)
            final = {scope.get_current_value(variable).name: i for i, variable in states}
            warns = self.reduction.replicas > 1
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
        # This step never runs, so its start is not recorded.
        timer, self.timer, self._turn = self.timer, NullStepTimer(), None
        try:
            spec_of = trace.get_concrete_function(iterator).structured_outputs
        finally:
            self.timer = timer
        return {
            name: tf.zeros([n or 0 for n in spec.shape], spec.dtype)
            for name, spec in spec_of.items()
        }

    def _finish(self, last: Carried, steps: tf.Tensor, seconds: tf.Tensor) -> Finished:
        values, outputs, chief_seconds = self.reduction.over_all(self._metrics, *last, seconds)
        self.timer.execution_is_done(steps)
        return self._logs(values, outputs), values, last[0], steps, chief_seconds


def _sum(values: tuple[tf.Tensor, ...]) -> tf.Tensor:
    return tf.add_n(values) if values[0].dtype.is_floating else values[0]


class Predictor:
    """The compiled predict_step of a model.

    A global batch is cut into contiguous parts in replica order, so the parts' outputs, put one
    after another, are in the order of the rows.

    Args:
        step: draws random numbers for the replica that runs it.
    """

    def __init__(self, model: keras.Model, reduction: SynchronousReduction, step: StepFunction):
        self._model = model
        self._strategy = reduction.strategy
        self._reduction = reduction
        self._rows = rows_of_shared(reduction.strategy, reduction.local_replicas)
        # Layers may write while they predict: masked kernels, counters, metrics of their own.
        self._metrics, self._watched = metrics_and_others(model)
        self._own = LocalVariables(reduction.strategy, reduction.local_replicas)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._step = step
        self._of_batch: Callable[..., Structure] = self._outputs_of_batch
        self._of_next: Callable[..., Structure] = lambda iterator, needs_row_count: (
            self._outputs_of_batch(next(iterator), needs_row_count)
        )
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
        # gather is a collective: no worker may continue alone.
        batch = data.iterator.get_next_as_optional()
        if self._reduction.any_worker(not bool(batch.has_value())):
            raise StopIteration
        return self._of_batch(batch.get_value(), data.needs_row_count)

    def _outputs_of_batch(self, batch: Parts, needs_row_count: bool) -> Structure:
        on = self._reduction
        rows_of_all = on.rows_of_all(batch)[0] if needs_row_count else None
        states = on.split_states(self._metrics)
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
        here = None
        if tf.distribute.has_strategy():
            here = _context(self._reduction, part, rows_of_all, self._rows)
        with (
            running_step(here),
            ReplicaScope(zip(self._metrics, mine, strict=True), self._watched, self._own) as scope,
        ):
            outputs = self._step(part[-1])
        if here is not None:
            check_lookups(self._model, scope.record(here.called))
        scope.forget_losses(self._model)
        self._updated |= scope.updated
        outputs = keras.tree.map_structure(lambda value: _if_any(part[0], value), outputs)
        return outputs, *scope.outcome(here)

    def _whole(self, value: tf.Tensor) -> tf.Tensor:
        if self._reduction.multi_worker:
            return self._strategy.gather(value, axis=0)
        parts = self._strategy.experimental_local_results(value)
        if len(parts) == 1:
            return parts[0]
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(axis=0, sp_inputs=list(parts))
        return tf.concat(parts, axis=0)


def _context(
    on: SynchronousReduction,
    part: Part,
    rows_of_all: tf.Tensor | None,
    take: Callable[..., tf.Tensor],
    *more: Any,
) -> StepContext:
    """The context of the running replica; `more` are further arguments of StepContext.

    Args:
        rows_of_all: of the global batch, where the part itself does not know.
    """
    rows, of, batch = part
    of = of if rows_of_all is None else rows_of_all
    here = StepContext(rows, of, on.replicas, on.local_replicas, batch, *more)
    here.substitutes = exact.substitutes_of(here, take)
    return here


def _if_any(rows: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The outputs, or none where the replica only ran on a row that is another's."""
    if isinstance(value, tf.SparseTensor) or value.shape.rank == 0:
        return value
    length = value.nrows() if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]
    return value[: tf.where(rows > 0, length, tf.zeros_like(length))]


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
