"""Many steps of a model in one execution: the loop over an iterator of parts, in the graph.

An execution runs `n` global batches without coming back to Python. The metrics' states travel
through the loop, one set for each local replica, and are reduced over all replicas once, at its
end; so logs are the same on every worker.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training import exact
from tfdist_ext.training._tf_private import recorded_operations
from tfdist_ext.training.derived_logs import is_carried
from tfdist_ext.training.logs import (
    flat,
    metrics_of,
    names_of_updated,
    own_outputs,
    results,
)
from tfdist_ext.training.lookups import rows_of_shared
from tfdist_ext.training.metric_methods import contribution_of_part, metric_methods
from tfdist_ext.training.own_copies import OwnCopies
from tfdist_ext.training.part import Part, set_part
from tfdist_ext.training.passed import check_lookups, check_passed, has_own_apply, uses_keras_step
from tfdist_ext.training.program import ProgramBase
from tfdist_ext.training.progress import reporting_progress
from tfdist_ext.training.protocols import Execution, StepFunction
from tfdist_ext.training.reduction import SynchronousReduction
from tfdist_ext.training.replaced import functions_in_place, step_targets
from tfdist_ext.training.replica_scope import ReplicaScope, assign_written
from tfdist_ext.training.step_timer import NullStepTimer

__all__ = ["SynchronousProgram"]

States = list[list[tf.Tensor]]  # for each local replica, the value of each metric variable


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
        self._own = OwnCopies(strategy, reduction.local_replicas)
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
        self._turn: Any = None
        self._passed = False  # the check of what a step has called
        self._compiles = True  # the next execution does

    def reset(self, *, resume: bool = False) -> None:
        """Start the metrics anew, as at the beginning of an epoch, or go on from what they are."""
        if not resume:
            self._model.reset_metrics()
        start = [tf.convert_to_tensor(kp.raw_value(variable)) for variable in self._metrics]
        self._states = self._reduction.split_states(self._metrics, start)

    def run(
        self, iterator: Any, n: int, *, seconds: float, known_length: bool, agreed: bool
    ) -> Execution:
        """Run `n` steps, or fewer where the data may end and does.

        Args:
            iterator: over this task's parts of global batches.
            n: global batches to use.
            seconds: how long this task's last execution took; the chief's figure comes back on
                every task, so that all choose the same next `n`.
            known_length: there are `n` more batches for sure.
            agreed: the rows of each global batch are to be counted; see `GlobalBatches`.
        """
        run = self._counted if known_length else self._open_ended
        run = self._agreed if agreed else run
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

    def _reporting_compilation(self) -> Any:
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

    def _run_counted(self, iterator: Any, n: Any, seconds: Any, states: States) -> Any:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states)
        batches = self._timer.reading(iterator)

        def body(i: Any, states: States, outputs: Any) -> Any:
            states, outputs = self._one_step(next(batches), states, turn=i)
            return i + 1, states, outputs

        start = (tf.constant(0), states, self._empty_outputs(iterator, states))
        done, states, outputs = tf.while_loop(lambda i, *_: i < n, body, start)
        return self._finish(states, outputs, done, seconds)

    def _run_open_ended(self, iterator: Any, n: Any, seconds: Any, states: States) -> Any:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states)
        batches = self._timer.reading(iterator)

        def body(i: Any, more: Any, states: States, outputs: Any) -> Any:
            batch = batches.get_next_as_optional()
            more = self._timer.agreeing(self._reduction.on_all_workers, batch.has_value())
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

    def _run_agreed(self, iterator: Any, n: Any, seconds: Any, states: States) -> Any:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states, agreed=True)
        batches = self._timer.reading(iterator)

        def body(i: Any, more: Any, states: States, outputs: Any) -> Any:
            batch = next(batches)
            rows, real = self._timer.agreeing(self._reduction.rows_of_all, batch)
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
        self, iterator: Any, n: Any, seconds: Any, states: States, *, agreed: bool = False
    ) -> Any:
        done = 0
        outputs: dict[str, Any] = {}
        batches = self._timer.reading(iterator)
        count = functools.partial(self._timer.agreeing, self._reduction.rows_of_all)
        while done < int(n):
            try:
                batch = next(batches)
            except StopIteration:
                break
            rows, real = count(batch) if agreed else (None, 1)
            if real == 0:
                break
            done += 1
            if rows is None or rows > 0:
                with recorded_operations():
                    states, outputs = self._one_step(batch, states, rows)
        return self._finish(states, outputs, tf.constant(done), seconds)

    def _one_step(
        self, batch: Any, states: States, rows: Any = None, turn: Any = None
    ) -> tuple[States, dict[str, Any]]:
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

    def _one_replica(self, part: Any, states: States, rows_of_all: Any = None) -> Any:
        """One replica's part of a global batch, in that replica's context.

        Args:
            rows_of_all: of the global batch, where the part itself does not know.
        """
        mine = self._reduction.of_this_replica(states)
        rows, of, batch = part
        of = of if rows_of_all is None else rows_of_all
        here = None
        timer = self._timer.of_replica()
        if tf.distribute.has_strategy() or timer is not None:
            on = self._reduction
            # Keys are those of collectives between workers.
            turn = self._turn if on.replicas > on.local_replicas else None
            size = on.replicas, on.local_replicas
            here = Part(rows, of, *size, batch, self._keras_step, turn, timer)
            here.substitutes = exact.of_part(here, self._rows)
        recording: Any = contextlib.nullcontext()
        if here and self._model.run_eagerly:
            recording = here.dependence.recording()
        with (
            set_part(here),
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

    def _check_passed(self, here: Part | None, scope: ReplicaScope) -> None:
        if here is not None and not (self._passed and tf.executing_eagerly()):
            check_passed(self._model, self._kind, scope.record(here.called))
            check_lookups(self._model, scope.record(here.called))
            self._passed = True
        scope.forget_losses(self._model)

    def _carried(
        self, logs: dict[str, Any], returned: Any, scope: ReplicaScope, here: Part | None
    ) -> dict[str, Any]:
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

    def _logs(self, values: Sequence[Any], last: dict[str, Any]) -> dict[str, tf.Tensor]:
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

    def _empty_outputs(self, iterator: Any, states: States) -> dict[str, Any]:
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

    def _finish(self, states: States, outputs: Any, steps: Any, seconds: Any) -> Any:
        values, last, chief_seconds = self._reduction.over_all(
            self._metrics, states, outputs, seconds
        )
        self._timer.execution_is_done(steps)
        return self._logs(values, last), values, states, steps, chief_seconds


def _has_mean(here: Part | None) -> Callable[[Any], bool]:
    """Whether values of a tensor, one of each replica, have a mean."""

    def has_mean(value: Any) -> bool:
        if not is_carried(value):
            return False
        return here is None or here.replicas == 1 or not here.has_rows(value)

    return has_mean


def _sum(values: tuple[Any, ...]) -> Any:
    return tf.add_n(values) if values[0].dtype.is_floating else values[0]
