"""One step of a model on all replicas of this task, from a global batch to outputs.

`ModelStep` runs the model's own step on each replica, in a scope in which it computes what one
device would. The step is traced once for all replicas if that is possible, else once for each.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import keras
import tensorflow as tf

from tfdist_ext.cluster.liveness import FIRST_AFTER, log_line
from tfdist_ext.data.batches import Parts
from tfdist_ext.data.pipelines import Part, Structure, batch_size_of, rows_between
from tfdist_ext.errors import StrategyError, TfDistError, TrainingError
from tfdist_ext.strategies._tf_private import lightly_optimized
from tfdist_ext.strategies.owned_sums import sums_of
from tfdist_ext.strategies.shared_step import SharedStep, kind_of
from tfdist_ext.strategies.traced_replica import NotSharedError, replica_id, replica_number
from tfdist_ext.training._keras_private import (
    drawing_from,
    global_seed_generator,
    raw_value,
    step_of,
    substitutes,
    uses_keras_step,
)
from tfdist_ext.training.state import broadcast_state
from tfdist_ext.training.steps import exact
from tfdist_ext.training.steps.context import ReplicaSums, StepContext, running_step
from tfdist_ext.training.steps.scope import (
    OwnCopies,
    ReplicaScope,
    StepOutputs,
    assign_each,
    metrics_and_others,
    recording_results,
)
from tfdist_ext.training.steps.step_timer import StepTimer, Waits
from tfdist_ext.training.synchronous.reduction import (
    MetricStates,
    States,
    SynchronousReduction,
)
from tfdist_ext.training.variables import copies_of_model, outside_of_scopes
from tfdist_ext.user_frames import warn

# Whether the replicas of a task share one trace of a step, as `distribute` takes it.
OneTrace: TypeAlias = Literal["auto", True, False]


# The result of a step on one replica: the metrics' states after it, stacked; by number, means to be
# assigned to other variables; its outputs; and when it was ready, if there is a timer. Outputs are
# contributions to means over all rows, by name, or predictions.
ReplicaResult: TypeAlias = tuple[list[tf.Tensor], dict[str, tf.Tensor], Any, tf.Tensor | None]


class ModelStep:
    """A "train", "test" or "predict" step of a model, run by all replicas of this task.

    Args:
        seeds: the random generators of the replicas.
        one_trace, lazy_updates: as `distribute` takes them.

    Attributes:
        timer: records the times of steps; None where nobody asks for them.
        states: the states of the model's metrics.
        outputs: what an overridden step returns.
        batch_size: rows of a whole global batch; None if not known. To be set before a trace.
    """

    def __init__(
        self,
        model: keras.Model,
        reduction: SynchronousReduction,
        kind: str,
        seeds: Seeds,
        timer: StepTimer | None,
        one_trace: OneTrace,
        *,
        lazy_updates: bool,
    ):
        self.model = model
        self.reduction = reduction
        self.timer = timer
        variables, self._others = metrics_and_others(model)
        self._eagerly = bool(model.run_eagerly)
        self.states = MetricStates(reduction, variables, eagerly=self._eagerly)
        self.outputs = StepOutputs(model, kind)
        self.batch_size: int | None = None
        self._kind = kind
        self._step = step_of(model, kind)
        self._seeds = seeds
        self._one_trace = one_trace
        self._lazy_updates = lazy_updates
        self._replicas = 1 if self._eagerly else reduction.replicas
        self._local_replicas = 1 if self._eagerly else reduction.local_replicas
        self._local = OwnCopies(reduction.strategy, self._local_replicas)
        self._sums_in_apply = sums_of(reduction.strategy).owned is not None and uses_keras_step(
            model, "train"
        )
        # XLA knows no time of day.
        compiles = kind != "predict" and not self._eagerly and timer is None
        self._jit_compile = compiles and model.jit_compile
        self._run_once = self._run_replica
        # A tf.function, so that `_empty_outputs` and the loop share one trace.
        is_traced_alone = self._jit_compile or self.outputs.has_own_values
        if compiles and reduction.replicas == 1 and is_traced_alone:
            self._run_once = tf.function(
                self._run_replica, jit_compile=self._jit_compile or None, autograph=False
            )
        # Why each replica has its own trace of the step; None if they share one.
        self._why_trace_each: str | None = None
        if why := trace_for_each(reduction, one_trace, jit_compile=self._jit_compile):
            self._trace_for_each(why)
        self._shared: dict[Any, SharedStep] = {}  # by the kind of arguments
        self._draws: dict[Any, bool] = {}  # of functions: whether they draw from `_seeds`

    @property
    def traces(self) -> str:
        """How the step is traced, in words."""
        replicas = self.reduction.local_replicas
        if self._eagerly:
            return "none: run_eagerly=True runs each step once, on the whole global batch"
        if self._why_trace_each is not None and replicas > 1:
            return f"a trace for each of {replicas} replicas: {self._why_trace_each}"
        by_xla = ", compiled by XLA" if self._jit_compile else ""
        if replicas == 1:
            return f"a trace for the one replica of this task{by_xla}"
        return f"one trace for the {replicas} replicas of this task{by_xla}"

    def in_graph(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, which calls this step, as a tf.function; as it is under `run_eagerly`."""
        if self._eagerly:
            return run
        return tf.function(run, autograph=False, reduce_retracing=True)

    def call(self, function: Any, *args: Any) -> Any:
        """Call a function that `in_graph` made. Errors say that a replica has fewer rows."""
        try:
            return self._call(function, *args)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            is_ours = isinstance(error, TfDistError) and error.__cause__ is None
            if self._replicas > 1 and self.batch_size and not is_ours:
                error.add_note(
                    f"tfdist_ext: each of {self._replicas} replicas gets a part of the"
                    f" {self.batch_size} rows of a batch, and x.shape[0] is None in the step. If"
                    " the error comes from a fixed number of rows, write keras.ops.shape(x)[0]."
                )
            raise

    def _call(self, function: Any, *args: Any) -> Any:
        in_graph = not self._eagerly
        if in_graph and function not in self._draws:
            with self._reporting_compilation():
                trace = function.get_concrete_function(*args)
            self._draws[function] = self._seeds.are_used_by(trace)
        is_shared = in_graph and self._why_trace_each is None
        if draws := not in_graph or self._draws[function]:
            self._seeds.begin()
        # A shared step is optimized already, and the graph around it has little to gain.
        optimization = lightly_optimized() if is_shared else contextlib.nullcontext()
        try:
            with optimization:
                result = function(*args)
        except tf.errors.CancelledError as error:  # of a stage of `call_in_graph`
            if not is_shared or self.reduction.local_replicas == 1:
                raise
            raise TrainingError(
                "A step failed on one replica, and TensorFlow reports only that the others were"
                ' cancelled. The error is in its log, after "Local rendezvous is aborting"'
                " (TF_CPP_MIN_LOG_LEVEL=1). distribute(..., one_trace=False) raises it."
            ) from error
        if draws:
            self._seeds.end()
        if self._eagerly:  # random numbers of TensorFlow differ between workers
            broadcast_state(self.reduction, self.model)
        return result

    def __call__(
        self, batch: Parts, states: States, rows: tf.Tensor | None = None
    ) -> tuple[States, list[Any]]:
        """Run the step on one global batch, in cross-replica context.

        Args:
            batch: the parts of the local replicas; of an eager step, one part with all rows.
            states: the metrics' states of the local replicas, or of the eager step.
            rows: of the global batch, where a part itself does not know.

        Returns:
            For each local replica, or for the eager step, the new states and its outputs.
        """
        results = self._results(batch, states, rows)
        states, written, outputs, ready = map(list, zip(*results, strict=True))
        variables = [self._others[int(number)] for number in written[0]]
        # The value is equal on all replicas, so any of them will do.
        assign_each(self.reduction.strategy, variables, written[0].values())
        if self.timer is not None:
            self.timer.step_is_done(ready)
        return states, outputs

    def _results(self, batch: Parts, states: States, rows: tf.Tensor | None) -> list[ReplicaResult]:
        """The results of the local replicas: one trace for all replicas, or one for each."""
        reduction = self.reduction
        if self._eagerly:
            return [self._run_eagerly(batch[0], states[0])]
        if self._why_trace_each is None:
            args = [
                (part, state, rows)
                for part, state in zip(reduction.parts(batch), states, strict=True)
            ]
            try:
                return self._shared_step(args)(args)
            except (NotSharedError, StrategyError) as why:
                self._trace_for_each(str(why))
        return reduction.run(self._run_once, batch, states, rows)

    def _run_eagerly(self, batch: Part, states: list[tf.Tensor]) -> ReplicaResult:
        """Run a step once, as plain Keras does, and copy what it wrote to the other replicas."""
        strategy, first = self.reduction.strategy, self.reduction.first_replica
        device = next(iter(self.reduction.devices), None)
        with strategy.scope(), tf.distribute.ReplicaContext(strategy, first), tf.device(device):
            result = self._run_replica(batch, states, None)
        for copies in self._copies():
            for copy in copies[1:]:
                if copy is not copies[0]:
                    copy.assign(copies[0])
        return result

    def rows_of_all(self, batch: Parts) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (rows of the global batch, how many parts have data), over all tasks."""
        if self._eagerly:
            return batch[0][0], batch[0][1]
        return self.reduction.rows_of_all(batch)

    def _shared_step(self, args: Sequence[Sequence[Any]]) -> SharedStep:
        reduction, kind = self.reduction, kind_of(args)
        if kind not in self._shared:
            self._shared[kind] = step = SharedStep(
                reduction.strategy,
                reduction.devices,
                reduction.first_replica,
                self._run_once,
                args,
                self._copies,
                jit_compile=self._jit_compile,
            )
            self._jit_compile = step.jit_compile
        return self._shared[kind]

    def _trace_for_each(self, why: str) -> None:
        """Trace the step for each replica; warn where something else was asked for."""
        self._why_trace_each = why
        if self._one_trace is True and self.reduction.local_replicas > 1:
            warn(f"one_trace=True is off: {why}.")
        if self._jit_compile and self.reduction.replicas > 1:
            self._jit_compile = False
            warn(f"jit_compile=True is off: {why}.")

    def _run_replica(
        self, part: Part, states: list[tf.Tensor], rows_of_all: tf.Tensor | None
    ) -> ReplicaResult:
        """Run the step on one replica's part of a global batch, in that replica's context."""
        before = self.states.of_variables(states)
        waits = None if self.timer is None else Waits()
        context = self._context(part, rows_of_all, waits)
        metrics = zip(self.states.variables, before, strict=True)
        with (
            tf.name_scope(""),  # a summary's tag would begin with "while/"
            running_step(context),
            substitutes(recording_results(self.model)),
            ReplicaScope(metrics, self._others, self._local) as scope,
            self._seeds.of_replica(),
        ):
            returned = self._step(context.batch)
            if self._kind == "predict":
                outputs: Any = _own_rows(returned, context)
            else:
                outputs = self.outputs.own_values(returned, scope, before, warns=self._replicas > 1)
                outputs = {name: context.weighted(value) for name, value in outputs.items()}
        if self._kind != "predict" and not self._eagerly:
            losses = set(map(id, scope.losses))
            exact.check_called(self.model, self._kind, context.called, scope.updated, losses)
            if context.replicas > 1:
                exact.check_activity_regularizers(self.model)
        scope.forget_losses(self.model)
        is_updated = not scope.updated.isdisjoint(map(id, self.states.variables))
        new = self.states.stacked(scope.states()) if is_updated else states
        ready = None if waits is None else waits.ready(new)
        return new, scope.written(context), outputs, ready

    def _context(
        self, part: Part, rows_of_all: tf.Tensor | None, waits: Waits | None
    ) -> StepContext:
        """The context of the running replica."""
        reduction = self.reduction
        rows, rows_of_part, batch = part
        context = StepContext(
            rows,
            rows_of_part if rows_of_all is None else rows_of_all,
            ReplicaSums(self._replicas, between_workers=reduction.between_workers, waits=waits),
            self._local_replicas,
            batch,
            cut_evenly=rows_of_all is None,
            batch_size=self.batch_size,
            sums_in_apply=self._sums_in_apply,
            lazy_updates=self._lazy_updates,
        )
        context.substitutes = exact.substitutes_of(context)
        return context

    def _copies(self) -> Iterator[Sequence[tf.Variable]]:
        """The variables that a step may use: of each, the copies of all local replicas."""
        reduction = self.reduction
        yield from copies_of_model(self.model, reduction.strategy, reduction.local_replicas)
        yield from self._local.all_copies()
        yield [raw_value(generator.state) for generator in self._seeds.generators]

    @contextlib.contextmanager
    def _reporting_compilation(self) -> Iterator[None]:
        """Scope of a trace; after 10 s the chief prints that it is compiling."""
        replicas = self.reduction.replicas
        line = f"compiling the first step ({replicas} replicas) ..."
        # A thread reports: the trace stays in the main thread, where Ctrl-C reaches it.
        report = threading.Timer(FIRST_AFTER, log_line, [line])
        report.daemon = True
        if self.reduction.is_chief:
            report.start()
        collects = gc.isenabled()
        gc.disable()  # a trace makes very many objects, and hardly any garbage
        try:
            yield
        finally:
            if collects:
                gc.enable()
            report.cancel()


class Seeds:
    """The generators from which a worker's replicas draw without a seed.

    Without a seed, Keras draws from one generator of the calling thread, and would make another one
    in the thread of each replica. So the thread of each replica gets a generator that begins where
    that of the calling thread is, and leaves it where one device would have.

    Args:
        devices: of the replicas; none where Keras's own generator serves.
        from_chief: returns the chief's number on every worker.

    Attributes:
        generators: one for each replica.
    """

    def __init__(self, devices: Sequence[str], from_chief: Callable[[Any], Any]):
        self._from_chief = from_chief
        self.generators = outside_of_scopes(_generators_on, devices)

    def of_replica(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which this thread draws from the generator of the running replica."""
        if not self.generators:
            return contextlib.nullcontext()
        return drawing_from(self.generators[replica_id() % len(self.generators)])

    def are_used_by(self, trace: tf.types.experimental.ConcreteFunction) -> bool:
        """Whether a traced function draws from the generators."""
        handles = {id(raw_value(generator.state).handle) for generator in self.generators}
        return any(id(captured) in handles for captured in trace.captured_inputs)

    def begin(self) -> None:
        """Begin where the chief's calling thread is; every worker must call."""
        if self.generators:
            state = self._from_chief(global_seed_generator().state.numpy())
            for generator in self.generators:
                generator.state.assign(state)

    def end(self) -> None:
        """Leave the calling thread's generator where the replicas' generators are."""
        if self.generators:
            global_seed_generator().state.assign(self.generators[0].state.numpy())


def _generators_on(devices: Sequence[str]) -> list[keras.random.SeedGenerator]:
    generators = []
    for device in devices:
        with tf.device(device):
            generators.append(keras.random.SeedGenerator(0))
    return generators


def trace_for_each(
    reduction: SynchronousReduction, one_trace: OneTrace, *, jit_compile: bool
) -> str | None:
    """Why each replica of a task has its own trace; None if the step can share one.

    On devices other than CPUs, "auto" leaves the traces to TensorFlow, because one trace has never
    run there.
    """
    kinds = reduction.device_types
    if "TPU" in kinds:
        return "a TPU compiles the step"
    if sums_of(reduction.strategy).owned is not None:
        return "workers share the optimizer (shard_optimizer=True)"
    if sums_of(reduction.strategy).narrow is not None:
        return "gradients travel in another type (gradient_dtype)"
    if reduction.multi_worker and reduction.local_replicas > 1:  # several GPUs on each: untested
        return "other workers have replicas, too"
    # XLA cannot compile the sums over tasks. A shared step is compiled between the sums.
    if reduction.local_replicas == 1 and not (reduction.multi_worker and jit_compile):
        return "there is one replica"
    if one_trace == "auto" and kinds != ["CPU"]:
        return f"one_trace='auto' shares a trace on CPUs only, and devices are {', '.join(kinds)}"
    return None if one_trace else "one_trace=False"


def _own_rows(outputs: Structure, context: StepContext) -> Structure:
    """The predictions of one replica; none where it has no rows and ran on another replica's row.

    Raises:
        TrainingError: they are not one row for each row of the batch, in order.
    """
    several = context.replicas > 1 and not context.on_tpu
    if several:
        exact.warn_of_mixed_rows(context, outputs)

    def own_rows(value: tf.Tensor) -> tf.Tensor:
        if value.shape.rank == 0:
            return value
        counts = context.rows > 0
        if several and isinstance(value, tf.Tensor):
            rows = context.rows_of(value)
            if rows is None and context.equal.has(value):
                counts = tf.equal(replica_number(), 0)  # one device has it once
            elif value.shape.rank and (value.shape[0] is not None or (rows and rows.blocks > 1)):
                raise TrainingError(
                    f"predict_step returns a tensor of shape {value.shape} that does not have one"
                    " row for each row of the batch, in their order, so the results of"
                    f" {context.replicas} replicas cannot be put together. Return one row for each"
                    " example: stack several predictions of a row along axis 1."
                )
        length = batch_size_of(value)
        nothing = tf.zeros_like(length)
        return rows_between(value, nothing, tf.where(counts, length, nothing))

    return keras.tree.map_structure(own_rows, outputs)
