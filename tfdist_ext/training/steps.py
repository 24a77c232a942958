"""Many steps of a model in one execution: the loop over an iterator of parts, in the graph.

An execution runs `n` global batches without coming back to Python. The metrics' states travel
through the loop, one set for each local replica, and are reduced over all replicas once, at its
end; so logs are the same on every worker.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training import exact
from tfdist_ext.training._tf_private import recorded_operations
from tfdist_ext.training.logs import has_own_outputs, own_outputs, results
from tfdist_ext.training.lookups import rows_of_shared
from tfdist_ext.training.optimizers import check_built
from tfdist_ext.training.own_copies import OwnCopies
from tfdist_ext.training.part import Part, set_part
from tfdist_ext.training.reduction import Reduction
from tfdist_ext.training.replica_scope import ReplicaScope
from tfdist_ext.training.step_watch import StepWatch, Unwatched
from tfdist_ext.training.weighted_loss import WeightedLoss, hands_gradients_on

__all__ = ["Execution", "StepProgram"]

exact.install()

States = list[list[tf.Tensor]]  # for each local replica, the value of each metric variable


class Execution(NamedTuple):
    """What comes back: logs over the epoch so far, steps done, and the chief's last time."""

    logs: dict[str, Any]
    steps: int
    chief_seconds: float


class StepProgram:
    """The compiled executions of one step method of a model (its train_step or test_step)."""

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        kind: str,
        *,
        watched: bool = False,
    ):
        self._model = model
        self._strategy = strategy
        step = getattr(model, f"{kind}_step")
        # A tf.function of the user's would be a graph of its own, where replicas cannot meet.
        self._step = getattr(step, "python_function", step)
        self._own_outputs = has_own_outputs(model, kind)
        self._weighs_loss = hands_gradients_on(self._step, model)
        check_built(model)
        exact.install_for(model)
        self._reduction = reduction
        self.watch = StepWatch() if watched else Unwatched()
        metrics = [variable for metric in model.metrics for variable in metric.variables]
        self._metrics = list({id(variable): variable for variable in metrics}.values())
        known = {id(variable) for variable in self._metrics}
        self._watched = [v for v in model.variables if id(v) not in known]
        self._own = OwnCopies(strategy, reduction.local_replicas)
        self._rows = rows_of_shared(strategy, reduction.local_replicas)
        self._replica = self._one_replica
        # XLA knows no time of day.
        if model.jit_compile and not model.run_eagerly and not watched:
            self._replica = tf.function(self._one_replica, jit_compile=True, autograph=False)
        compiled: Callable[[Any], Any] = lambda function: function  # noqa: E731
        if not model.run_eagerly:
            compiled = tf.function(autograph=False, reduce_retracing=True)
        self._counted = compiled(self._run_counted)
        self._open_ended = compiled(self._run_open_ended)
        self._agreed = compiled(self._run_agreed)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._states: States = []
        self._turn: Any = None

    def reset(self, *, going_on: bool = False) -> None:
        """Start the metrics anew, as at the beginning of an epoch, or go on from what they are."""
        if not going_on:
            self._model.reset_metrics()
        start = [tf.convert_to_tensor(kp.raw_value(variable)) for variable in self._metrics]
        # What is summed over replicas begins where it begins once, and at zero elsewhere.
        rest = [
            tf.zeros_like(value) if variable.aggregation == "sum" else value
            for variable, value in zip(self._metrics, start, strict=True)
        ]
        others = [list(rest) for _ in range(self._reduction.local_replicas)]
        self._states = [start, *others[1:]] if self._reduction.is_chief else others

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
        result = run(iterator, tf.constant(n), tf.constant(seconds), self._states)
        logs, values, self._states, steps, chief_seconds = result
        for variable, value in zip(self._metrics, values, strict=True):
            kp.raw_value(variable).assign(value)
        logs = {  # by name, as Keras sorts them
            name: float(value) if value.shape.rank == 0 else value.numpy()
            for name, value in sorted(logs.items())
        }
        return Execution(logs, int(steps), float(chief_seconds))

    def logs_of_this_task(self) -> dict[str, float]:
        """The metrics over this task's own rows of the epoch so far. Nobody is waited for."""
        values = [
            tf.add_n(list(of_replicas)) if variable.aggregation == "sum" else of_replicas[0]
            for variable, *of_replicas in zip(self._metrics, *self._states, strict=True)
        ]
        with ReplicaScope(zip(self._metrics, values, strict=True)):
            return {name: float(value) for name, value in results(self._model, {}, set()).items()}

    def _run_counted(self, iterator: Any, n: Any, seconds: Any, states: States) -> Any:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states)
        batches = self.watch.reading(iterator)

        def body(i: Any, states: States, outputs: Any) -> Any:
            states, outputs = self._one_step(next(batches), states, turn=i)
            return i + 1, states, outputs

        start = (tf.constant(0), states, self._empty_outputs(iterator, states))
        done, states, outputs = tf.while_loop(lambda i, *_: i < n, body, start)
        return self._finish(states, outputs, done, seconds)

    def _run_open_ended(self, iterator: Any, n: Any, seconds: Any, states: States) -> Any:
        if self._model.run_eagerly:
            return self._run_eagerly(iterator, n, seconds, states)
        batches = self.watch.reading(iterator)

        def body(i: Any, more: Any, states: States, outputs: Any) -> Any:
            batch = batches.get_next_as_optional()
            more = self.watch.agreeing(self._reduction.on_all_workers, batch.has_value())
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
        batches = self.watch.reading(iterator)

        def body(i: Any, more: Any, states: States, outputs: Any) -> Any:
            batch = next(batches)
            rows, real = self.watch.agreeing(self._reduction.rows_of_all, batch)
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
        batches = self.watch.reading(iterator)
        count = functools.partial(self.watch.agreeing, self._reduction.rows_of_all)
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
        with kp.rows_taken_by(self._rows):
            new, written, outputs, notes = self._reduction.run(self._replica, batch, states, rows)
        local = self._strategy.experimental_local_results
        for number, value in written.items():
            # The value is equal on all replicas, so any of them will do.
            self._strategy.extended.update(
                kp.raw_value(self._watched[int(number)]),
                lambda variable, value: variable.assign(value),
                args=(local(value)[0],),
                group=False,
            )
        if self.watch.watching:
            self.watch.step_is_done(list(zip(*(local(note) for note in notes), strict=True)))
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
        watch = self.watch.of_replica()
        if tf.distribute.has_strategy() or watch is not None:
            on = self._reduction
            loss = WeightedLoss(self._model.optimizer) if self._weighs_loss else None
            # Keys are those of collectives between workers.
            turn = self._turn if on.replicas > on.local_replicas else None
            here = Part(rows, of, on.replicas, on.local_replicas, batch, loss, turn, watch)
        recording: Any = contextlib.nullcontext()
        if here and self._model.run_eagerly:
            recording = here.dependence.recording()
        with (
            set_part(here),
            recording,
            ReplicaScope(zip(self._metrics, mine, strict=True), self._watched, self._own) as scope,
        ):
            returned = self._step(batch)
            outputs = own_outputs(self._model, returned) if self._own_outputs else {}
        self._updated |= scope.updated
        new = [scope.get_current_value(variable) for variable in self._metrics]
        written = scope.written
        if here:
            # A row that is another's must not be added twice.
            new = [
                tf.where(rows > 0, after, before) if variable.aggregation == "sum" else after
                for variable, after, before in zip(self._metrics, new, mine, strict=True)
            ]
            written = here.mean(written)
        if here:
            outputs = {name: here.contribution(value) for name, value in outputs.items()}
        notes = () if watch is None else watch.notes(new)
        return new, {str(number): value for number, value in written.items()}, outputs, notes

    def _empty_outputs(self, iterator: Any, states: States) -> dict[str, Any]:
        """Zeros of the structure that an overridden step returns, so that a loop can carry it."""
        if not self._own_outputs:
            return {}
        trace = tf.function(lambda it: self._one_step(next(it), states)[1], autograph=False)
        # This step is never run: nobody notes when it began.
        watch, self.watch = self.watch, Unwatched()
        try:
            spec_of = trace.get_concrete_function(iterator).structured_outputs
        finally:
            self.watch = watch
        return {
            name: tf.zeros([n or 0 for n in spec.shape], spec.dtype)
            for name, spec in spec_of.items()
        }

    def _finish(self, states: States, outputs: Any, steps: Any, seconds: Any) -> Any:
        values, last, chief_seconds = self._reduction.over_all(
            self._metrics, states, outputs, seconds
        )
        self.watch.execution_is_done(steps)
        with ReplicaScope(zip(self._metrics, values, strict=True)):
            logs = results(self._model, last, self._updated)
        return logs, values, states, steps, chief_seconds


def _sum(values: tuple[Any, ...]) -> Any:
    return tf.add_n(values) if values[0].dtype.is_floating else values[0]
