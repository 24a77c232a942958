"""Many steps of a model in one execution: the loop over an iterator of parts, in the graph.

An execution runs `n` global batches without coming back to Python. The metrics' states travel
through the loop, one set for each local replica, and are reduced over all replicas once, at its
end; so logs are the same on every worker. Predictions come back batch by batch: every row once,
in input order.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.cluster.liveness.reports import FIRST_AFTER, LONGEST_PAUSE, say
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.inputs import Part, Parts
from tfdist_ext.training.programs import StepProgram
from tfdist_ext.training.protocols import (
    BatchIterator,
    Epoch,
    Execution,
    StepFunction,
    Structure,
)
from tfdist_ext.training.steps import exact
from tfdist_ext.training.steps.context import StepContext, running_step
from tfdist_ext.training.steps.logs import (
    metrics_of,
    names_of_updated,
    observed_metrics,
    results,
    results_of,
)
from tfdist_ext.training.steps.random_numbers import Seeds
from tfdist_ext.training.steps.replaced import (
    check_activity_regularizers,
    check_called,
    functions_in_place,
    has_own_apply,
    step_targets,
    uses_keras_step,
)
from tfdist_ext.training.steps.scope import (
    LocalVariables,
    ReplicaScope,
    assign_each,
    assign_written,
    metrics_and_others,
    rows_of_shared,
)
from tfdist_ext.training.steps.step_timer import NullStepTimer
from tfdist_ext.training.synchronous.reduction import (
    ReplicaSteps,
    StackedStates,
    States,
    SynchronousReduction,
)
from tfdist_ext.training.variables import copies_of_model, default_strategy_scope

__all__ = ["Predictor", "SynchronousProgram", "reporting_progress"]


# What an execution returns: logs, the replicas' metric states, steps done, and the sum of what the
# tasks report: the chief its seconds, each whether it was told to end.
Finished: TypeAlias = tuple[dict[str, tf.Tensor], States, tf.Tensor, tf.Tensor]


# What a step leaves for the logs, by name; a loop in the graph carries it.
Outputs: TypeAlias = dict[str, tf.Tensor]


# What a step gives to the next one.
Carried: TypeAlias = tuple[States, Outputs]


# Whether there was a batch for a step, and what it gives to the next one.
Turn: TypeAlias = tuple[tf.Tensor, Carried]


# A step on the next batch, with what the step before gave.
NextStep: TypeAlias = Callable[[BatchIterator, Carried], Turn]


class SynchronousProgram(StepProgram):
    """The compiled executions of one step of a model, on all replicas of a strategy.

    Args:
        timer: is told when steps begin, and when they are done.
        seeds: what the step draws from where it gives no seed.

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
        seeds: Seeds,
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
        self._weight_shapes = frozenset(tuple(variable.shape) for variable in self._others)
        self._seeds = seeds
        self._copies = functools.partial(_copies, reduction, model, self._own, seeds)
        self._batch_size: int | None = None  # of the data that is read
        self._read: tf.Variable | None = None  # batches, for the others where this worker is late
        if reduction.multi_worker:
            with default_strategy_scope(), tf.device("CPU:0"):
                self._read = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._forget_traces()
        self._stacked = StackedStates(self._metrics)
        self._states: States = []  # stacked
        self._passed = False  # the check of what a step has called

    def _forget_traces(self) -> None:
        replica = self._one_replica
        # XLA knows no time of day.
        in_a_function = not self._model.run_eagerly and not self.timer.records
        jit_compile = self._model.jit_compile and in_a_function
        # A function is traced once, although the loop needs to know first what a step returns.
        if self.reduction.replicas == 1 and in_a_function and (jit_compile or self._own_outputs):
            replica = tf.function(replica, jit_compile=jit_compile or None, autograph=False)
        self._replicas = ReplicaSteps(
            self.reduction, replica, self._copies, jit_compile=jit_compile
        )
        # By how they come to a batch.
        self._executions: dict[str, tf.types.experimental.PolymorphicFunction] = {}
        self._compiles = True  # the next execution does

    @property
    def traces(self) -> str:
        return self._replicas.traces

    def reset(self, *, resume: bool = False) -> None:
        """Reset the metrics, as at the beginning of an epoch, or continue from their values."""
        if not resume:
            self._model.reset_metrics()
        states = self.reduction.split_states(self._metrics)
        self._states = [self._stacked.stack(of_replica) for of_replica in states]

    def run(self, data: Epoch, n: int, seconds: float, *, told: bool = False) -> Execution:
        """Run `n` steps of an epoch, or fewer where its data may end and does."""
        self._batch_size = data.batch_size
        if self._read is not None:
            self.reduction.peers.reads_batches(self._read.numpy)
        report = [seconds if self.reduction.is_chief else 0.0, float(told)]
        if self._model.run_eagerly:
            with _drawing(self._seeds, eager=True):
                result = self._run_eagerly(data, n, report)
        else:
            step = self._next_counted if data.known_length else self._next_if_any
            step = self._next_agreed if data.needs_row_count else step
            result = self._execute(step, data.iterator, n, report)
        logs, self._states, steps, of_all = result
        chief_seconds, told_tasks = of_all.numpy().tolist()
        logs = {  # by name, as Keras sorts them
            name: float(value) if value.shape.rank == 0 else value.numpy()
            for name, value in sorted(logs.items())
        }
        return Execution(logs, int(steps), chief_seconds, told=told_tasks > 0)

    def _execute(
        self, step: NextStep, iterator: BatchIterator, n: int, report: list[float]
    ) -> Finished:
        if step.__name__ not in self._executions:
            self._executions[step.__name__] = self._in_graph(step)
        run = self._executions[step.__name__]
        first, self._compiles = self._compiles, False
        args = iterator, tf.constant(n), tf.constant(report), self._states

        def again() -> None:
            self._in_graph(step)(iterator, tf.constant(1), *args[2:])

        with (
            self._compilation() if first else contextlib.nullcontext(),
            self._replicas.telling_errors(again),
        ):
            if first:
                run.get_concrete_function(*args)  # tells whether one trace serves all replicas
            with _drawing(self._seeds), self._replicas.optimization():
                return run(*args)

    @contextlib.contextmanager
    def _compilation(self) -> Iterator[None]:
        """Scope of the first execution, which may take minutes: the chief says so."""
        what = f"compiling the first step ({self.reduction.replicas} replicas)"
        report = reporting_progress(what) if self.reduction.is_chief else contextlib.nullcontext()
        collects = gc.isenabled()
        gc.disable()  # a trace makes very many objects, and hardly any garbage
        try:
            with report:
                yield
        finally:
            if collects:
                gc.enable()

    def logs_of_this_task(self) -> dict[str, float]:
        """The metrics over this task's own rows of the epoch so far. Nobody is waited for."""
        states = [self._stacked.unstack(of_replica) for of_replica in self._states]
        values = [
            tf.add_n(list(of_replicas)) if variable.aggregation == "sum" else of_replicas[0]
            for variable, *of_replicas in zip(self._metrics, *states, strict=True)
        ]
        with ReplicaScope(zip(self._metrics, values, strict=True)):
            logs = results(self._model, {}, {}, set())
            if self._own_outputs:
                updated = names_of_updated(self._model, self._updated)
                logs = {name: value for name, value in logs.items() if name in updated}
                logs |= results_of(self._metric_logs)
        return {name: float(value) for name, value in logs.items() if value.shape.rank == 0}

    def _in_graph(self, next_step: NextStep) -> tf.types.experimental.PolymorphicFunction:
        """An execution: a loop of `next_step(batches, what the step before gave)`."""

        def run(
            iterator: BatchIterator, n: tf.Tensor, report: tf.Tensor, states: States
        ) -> Finished:
            self.reduction.peers.enters("compiling")
            batches = self._counted(self.timer.timed_iterator(iterator))

            def body(
                i: tf.Tensor, _: tf.Tensor, before: Carried
            ) -> tuple[tf.Tensor, tf.Tensor, Carried]:
                more, after = next_step(batches, before)
                return i + tf.cast(more, tf.int32), more, after

            last = states, self._empty_outputs(iterator, states)
            start = (tf.constant(0), tf.constant(True), last)
            done, _, last = tf.while_loop(lambda i, more, _: (i < n) & more, body, start)
            return self._finish(last, done, report)

        return tf.function(run, autograph=False, reduce_retracing=True)

    def _counted(self, batches: BatchIterator) -> BatchIterator:
        return batches if self._read is None else _Counted(batches, self._read)

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

    def _run_eagerly(self, data: Epoch, n: int, report: list[float]) -> Finished:
        done, states = 0, self._states
        outputs: Outputs = {}
        batches = self._counted(self.timer.timed_iterator(data.iterator))
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
                states, outputs = self._one_step(batch, states, rows)
        return self._finish((states, outputs), tf.constant(done), tf.constant(report))

    def _one_step(self, batch: Parts, states: States, rows: tf.Tensor | None = None) -> Carried:
        """One global batch, in cross-replica context."""
        with (
            functions_in_place(self._replaced),
            observed_metrics(self._metric_objects),
        ):
            each = self._replicas(batch, states, rows)
        assign_written(self._strategy, self._others, each[0][1])
        if self.timer.records:
            self.timer.step_is_done([notes for *_, notes in each])
        outputs = {name: _sum([of_one[name] for _, _, of_one, _ in each]) for name in each[0][2]}
        return [new for new, *_ in each], outputs

    def _one_replica(
        self, part: Part, states: list[tf.Tensor], rows_of_all: tf.Tensor | None = None
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor], Outputs, tuple[tf.Tensor, ...]]:
        """One replica's part of a global batch, in that replica's context.

        Args:
            states: of the metrics on this replica, stacked.
            rows_of_all: of the global batch, where the part itself does not know.
        """
        before = self._stacked.unstack(states)
        here = None
        timer = self.timer.replica_timer()
        if tf.distribute.has_strategy() or timer is not None:
            on = self.reduction
            here = _context(
                on,
                part,
                rows_of_all,
                self._rows,
                self._seeds,
                self._weight_shapes,
                keras_step=self._keras_step,
                between_workers=on.between_workers,
                timer=timer,
                batch_size=self._batch_size,
            )
        with (
            tf.name_scope(""),  # a summary's tag would begin with "while/"
            running_step(here),
            ReplicaScope(zip(self._metrics, before, strict=True), self._others, self._own) as scope,
        ):
            returned = self._step(part[-1] if here is None else here.batch)
            warns = self.reduction.replicas > 1
            outputs = self._other_outputs(returned, scope, before, warns=warns)
            if here is not None:
                outputs = {name: here.contribution(value) for name, value in outputs.items()}
        if here is not None and not (self._passed and tf.executing_eagerly()):
            check_called(self._model, self._kind, here.called, scope.state_mapping)
            if here.replicas > 1 and self._kind != "predict":
                check_activity_regularizers(self._model)
            self._passed = True
        scope.forget_losses(self._model)
        self._updated |= scope.updated
        new = self._stacked.after_step(scope, here, states)
        written = scope.written(here)
        notes = () if timer is None else timer.notes(new)
        return new, written, outputs, notes

    def _logs(self, values: Sequence[tf.Tensor], last: Outputs) -> dict[str, tf.Tensor]:
        """The logs.

        Args:
            values: the metrics' states, over all replicas.
            last: the values that the last step carried, over all replicas.
        """
        with ReplicaScope(zip(self._metrics, values, strict=True)):
            return results(self._model, last, self._metric_logs, self._updated)

    def _empty_outputs(self, iterator: BatchIterator, states: States) -> Outputs:
        """Zeros of the structure that an overridden step returns, so that a loop can carry it."""
        if not self._own_outputs:
            return {}

        def outputs(iterator: BatchIterator) -> Outputs:
            return self._one_step(next(self.timer.timed_iterator(iterator)), states)[1]

        trace = tf.function(outputs, autograph=False)  # never runs
        spec_of = trace.get_concrete_function(iterator).structured_outputs
        return {
            name: tf.zeros([n or 0 for n in spec.shape], spec.dtype)
            for name, spec in spec_of.items()
        }

    def _finish(self, last: Carried, steps: tf.Tensor, report: tf.Tensor) -> Finished:
        states = [self._stacked.unstack(of_replica) for of_replica in last[0]]
        values, outputs, report = self.reduction.over_all(self._metrics, states, last[1], report)
        self.timer.execution_is_done(steps)
        assign_each(self._strategy, self._metrics, values)
        return self._logs(values, outputs), last[0], steps, report


def _sum(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(list(values)) if values[0].dtype.is_floating else values[0]


class _Counted:
    """An iterator that counts the batches which are there, in the graph."""

    def __init__(self, iterator: BatchIterator, count: tf.Variable):
        self._iterator = iterator
        self._count = count

    def __next__(self) -> Structure:
        batch = next(self._iterator)
        self._one_more(tf.nest.flatten(batch, expand_composites=True))
        return batch

    def get_next_as_optional(self) -> tf.experimental.Optional:
        batch = self._iterator.get_next_as_optional()
        self._one_more([batch.has_value()])
        return batch

    def _one_more(self, there: Sequence[tf.Tensor | None]) -> None:
        with tf.control_dependencies([part for part in there if part is not None]):
            self._count.assign_add(1, read_value=False)


class Predictor:
    """The compiled predict_step of a model.

    A global batch is cut into contiguous parts in replica order, so the parts' outputs, put one
    after another, are in the order of the rows.

    Args:
        seeds: what the step draws from where it gives no seed.
    """

    def __init__(
        self,
        model: keras.Model,
        reduction: SynchronousReduction,
        step: StepFunction,
        seeds: Seeds,
    ):
        self._model = model
        self._strategy = reduction.strategy
        self._reduction = reduction
        self._rows = rows_of_shared(reduction.strategy, reduction.local_replicas)
        # Layers may write while they predict: masked kernels, counters, metrics of their own.
        self._metrics, self._watched = metrics_and_others(model)
        self._stacked = StackedStates(self._metrics)
        self._weight_shapes = frozenset(tuple(variable.shape) for variable in self._watched)
        self._own = LocalVariables(reduction.strategy, reduction.local_replicas)
        self._updated: set[int] = set()  # ids of metric variables that the step writes
        self._step = step
        self._seeds = seeds
        copies = functools.partial(_copies, reduction, model, self._own, seeds)
        self._replicas = ReplicaSteps(reduction, self._of_one_part, copies)
        self._of_batch = self._in_graph(self._outputs_of_batch)
        self._of_next = self._in_graph(self._outputs_of_next)
        self._traced: list[Callable[..., Structure]] = []

    def _in_graph(self, outputs: Callable[..., Structure]) -> Callable[..., Structure]:
        if self._model.run_eagerly:
            return outputs
        return tf.function(outputs, autograph=False, reduce_retracing=True)

    @property
    def traces(self) -> str:
        return self._replicas.traces

    def outputs(self, data: Epoch) -> Iterator[Structure]:
        """The outputs for each global batch, in order."""

        def again() -> None:
            self._in_graph(self._outputs_of_next)(data.iterator, data.needs_row_count)

        while True:
            try:
                with self._replicas.telling_errors(again):
                    outputs = self._next_outputs(data)
                yield outputs
            except (StopIteration, tf.errors.OutOfRangeError):
                return

    def _next_outputs(self, data: Epoch) -> Structure:
        if data.steps is not None or not self._reduction.multi_worker:
            return self._run(self._of_next, data.iterator, data.needs_row_count)
        # gather is a collective: no worker may continue alone.
        batch = data.iterator.get_next_as_optional()
        if self._reduction.any_worker(not bool(batch.has_value())):
            raise StopIteration
        return self._run(self._of_batch, batch.get_value(), data.needs_row_count)

    def _run(self, outputs: Any, *args: Any) -> Structure:
        if self._model.run_eagerly:
            with _drawing(self._seeds, eager=True):
                return outputs(*args)
        if outputs not in self._traced:
            outputs.get_concrete_function(*args)  # tells whether it draws without a seed
            self._traced.append(outputs)
        with _drawing(self._seeds):
            return outputs(*args)

    def _outputs_of_next(self, iterator: BatchIterator, needs_row_count: bool) -> Structure:
        return self._outputs_of_batch(next(iterator), needs_row_count)

    def _outputs_of_batch(self, batch: Parts, needs_row_count: bool) -> Structure:
        on = self._reduction
        rows_of_all = on.rows_of_all(batch)[0] if needs_row_count else None
        states = [self._stacked.stack(each) for each in on.split_states(self._metrics)]
        with functions_in_place(step_targets()):
            each = self._replicas(batch, states, rows_of_all)
        assign_written(self._strategy, self._watched, each[0][2])
        self._assign_metrics([self._stacked.unstack(new) for _, new, _ in each])
        return keras.tree.map_structure(self._whole, *(outputs for outputs, *_ in each))

    def _assign_metrics(self, states: States) -> None:
        """Give the metrics that layers update in their call the states of all replicas."""
        places = [i for i, v in enumerate(self._metrics) if id(v) in self._updated]
        if not places:
            return
        variables = [self._metrics[i] for i in places]
        states = [[of_replica[i] for i in places] for of_replica in states]
        values, _, _ = self._reduction.over_all(variables, states, {}, tf.constant(0.0))
        assign_each(self._strategy, variables, values)

    def _of_one_part(
        self, part: Part, states: list[tf.Tensor], rows_of_all: tf.Tensor | None = None
    ) -> tuple[Structure, list[tf.Tensor], dict[str, tf.Tensor]]:
        """(outputs, metrics' states, values written) of one replica, in its context.

        Args:
            states: of the metrics on this replica, stacked.
        """
        before = self._stacked.unstack(states)
        here = None
        if tf.distribute.has_strategy():
            here = _context(
                self._reduction, part, rows_of_all, self._rows, self._seeds, self._weight_shapes
            )
        with (
            running_step(here),
            ReplicaScope(
                zip(self._metrics, before, strict=True), self._watched, self._own
            ) as scope,
        ):
            outputs = self._step(part[-1] if here is None else here.batch)
        scope.forget_losses(self._model)
        self._updated |= scope.updated
        outputs = keras.tree.map_structure(lambda value: _if_any(part[0], value), outputs)
        return outputs, self._stacked.after_step(scope, here, states), scope.written(here)

    def _whole(self, *parts: tf.Tensor) -> tf.Tensor:
        """The rows of all replicas, from those of this worker's."""
        if self._reduction.multi_worker:
            return self._strategy.gather(self._reduction.per_replica(parts), axis=0)
        if len(parts) == 1:
            return parts[0]
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(axis=0, sp_inputs=list(parts))
        return tf.concat(parts, axis=0)


@contextlib.contextmanager
def _drawing(seeds: Seeds, *, eager: bool = False) -> Iterator[None]:
    """Scope of steps, which may draw without a seed; only a trace tells before whether they do."""
    draws = eager or bool(seeds.generators)
    if draws:
        seeds.begin()
    yield
    if draws:
        seeds.end()


def _copies(
    on: SynchronousReduction,
    model: keras.Model,
    own: LocalVariables,
    seeds: Seeds,
) -> Iterator[Sequence[tf.Variable]]:
    """The variables that a step may use: of each, the copies of all local replicas."""
    yield from copies_of_model(model, on.strategy, on.local_replicas)
    yield from own.copies()
    if seeds.generators:
        yield [kp.raw_value(generator.state) for generator in seeds.generators]


def _context(
    on: SynchronousReduction,
    part: Part,
    rows_of_all: tf.Tensor | None,
    take: Callable[..., tf.Tensor],
    seeds: Seeds,
    weight_shapes: Set[tuple[int | None, ...]],
    **more: Any,
) -> StepContext:
    """The context of the running replica; `more` are further arguments of StepContext.

    Args:
        rows_of_all: of the global batch, where the part itself does not know.
    """
    rows, of, batch = part
    cut_evenly = rows_of_all is None
    here = StepContext(
        rows,
        of if cut_evenly else rows_of_all,
        on.replicas,
        on.local_replicas,
        batch,
        cut_evenly=cut_evenly,
        weight_shapes=weight_shapes,
        **more,
    )
    here.substitutes = {
        **exact.substitutes_of(here, take),
        "seed_generator": seeds.of_replica,
    }
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
