"""Values of single replicas, made one for all replicas of all workers."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import StrategyError, TrainingError
from tfdist_ext.strategies._tf_private import lightly_optimized
from tfdist_ext.strategies.explanation import computing_tasks
from tfdist_ext.strategies.reductions import METRIC, OTHER, all_reduce, tells_what_it_reduces
from tfdist_ext.strategies.shared_step import SharedStep, kind_of
from tfdist_ext.strategies.traced_replica import NotSharedError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.barriers import SAME_CALLS, PeerMonitor, peers_of
from tfdist_ext.training.agreement.equality import check_equal_across_workers
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.inputs import Part, Parts
from tfdist_ext.training.steps.context import StepContext
from tfdist_ext.training.steps.scope import ReplicaScope, _addable, contribution
from tfdist_ext.user_frames import warn

__all__ = ["ReplicaSteps", "StackedStates", "States", "SynchronousReduction", "trace_for_each"]


# Elements of a state that is copied sooner than it is passed on by itself.
_SMALL = 4096


# For each local replica, the value of each metric variable.
States: TypeAlias = list[list[tf.Tensor]]


class SynchronousReduction(Reduction):
    """Reductions over the replicas of a strategy, a few tensors at a time."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy, peers_of(strategy))
        self.replicas = strategy.num_replicas_in_sync
        # The concrete function: calls of the other kind are counted, and warned of, as retracing.
        ids = tf.function(lambda: strategy.run(_replica_id), autograph=False)
        ids = ids.get_concrete_function()()
        local = strategy.experimental_local_results(ids)
        self.local_replicas = len(local)
        self.first_replica = int(local[0])  # of this worker, in the order of all
        self.multi_worker = self.replicas > self.local_replicas
        by_tensorflow = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.between_workers = self.multi_worker and by_tensorflow  # its collectives
        self.workers = self.replicas // self.local_replicas
        self.worker = self.first_replica // self.local_replicas  # which of them this task is
        self.devices = _devices(strategy)  # of this worker's replicas
        # CPU replicas are fed from a plain iterator on the host.
        on_cpus = all("CPU" in name.upper() for name in self.devices)
        self.feeds_on_host = bool(self.devices) and on_cpus
        # TensorFlow's own word for "this task is the one that writes".
        self.is_chief = bool(strategy.extended.should_checkpoint)
        self._sums: dict[tf.TensorSpec, tf.types.experimental.ConcreteFunction] = {}

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Scope of a public call; all workers wait until each has made it.

        Raises:
            TrainingError: on every worker, where they make different calls.
            PeerError: a worker is gone, or is somewhere else.
        """
        with self.peers.call(name):
            if isinstance(self.peers, PeerMonitor):
                # A type of its own: two collectives of one type would be taken for one.
                number = float(zlib.crc32(name.encode()) % 2**20)
                with self.peers.barrier("its beginning"):
                    sums = self.sum_over_workers(np.array([1.0, number, number**2], np.float64))
                # Equal numbers, and no others, have a variance of 0.
                if sums[1] != sums[0] * number or sums[2] != sums[0] * number**2:
                    check_equal_across_workers(self, {"the call": name}, SAME_CALLS)
            yield

    def task_names(self) -> list[str]:
        """The tasks that compute, in the order of their replicas, as "worker 1"."""
        return computing_tasks(self.strategy, self.workers)

    def run(
        self, step: Callable[..., Any], batch: Parts, before: Sequence[Any], *rest: Any
    ) -> list[Any]:
        """Run `step(part, mine, *rest)` on each replica; the results of the local ones.

        Args:
            batch: from an iterator over parts of global batches.
            before: an entry for each local replica.
        """

        def in_replica(part: Any, before: Sequence[Any], *rest: Any) -> Any:
            part = self.of_this_replica(part) if self.feeds_on_host else part
            return step(part, self.of_this_replica(before), *rest)

        return self.of_each(self.strategy.run(in_replica, args=(batch, before, *rest)))

    def of_each(self, values: Any) -> list[Any]:
        """A structure of values of all replicas, as a structure for each local replica."""
        local = self.strategy.experimental_local_results
        leaves = [
            [None] * self.local_replicas if leaf is None else local(leaf)
            for leaf in tf.nest.flatten(values)
        ]
        return [
            tf.nest.pack_sequence_as(values, [leaf[number] for leaf in leaves])
            for number in range(self.local_replicas)
        ]

    def per_replica(self, values: Sequence[tf.Tensor]) -> tf.distribute.DistributedValues:
        """The values of local replicas as a strategy's methods take them."""
        return self.strategy.run(
            lambda of_all: tf.nest.map_structure(
                tf.identity, self.of_this_replica(of_all), expand_composites=True
            ),
            args=(list(values),),
        )

    def parts(self, batch: Parts) -> list[Part]:
        """The parts of the local replicas."""
        return list(batch) if self.feeds_on_host else self.of_each(batch)

    def of_this_replica(self, per_replica: Sequence[Any]) -> Any:
        """The entry of the replica that runs, in its context."""
        if self.local_replicas == 1:
            return per_replica[0]
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        fixed = tf.get_static_value(number)
        if fixed is not None:
            return per_replica[int(fixed) % self.local_replicas]
        # Where the number is known only at run time (TPU).
        which = number % self.local_replicas
        return [tf.stack(values)[which] for values in zip(*per_replica, strict=True)]

    def split_states(self, variables: Sequence[keras.Variable]) -> States:
        """For each local replica, the metric states from which its steps start.

        What is summed over replicas starts from its value on the first replica, and from zero on
        all others, so that `over_all` counts the value once.
        """
        values = [tf.convert_to_tensor(kp.raw_value(variable)) for variable in variables]
        zeros = [
            tf.zeros_like(value) if variable.aggregation == "sum" else value
            for variable, value in zip(variables, values, strict=True)
        ]
        others = [list(zeros) for _ in range(self.local_replicas)]
        return [values, *others[1:]] if self.is_chief else others

    def over_all(
        self,
        variables: Sequence[keras.Variable],
        states: States,
        outputs: dict[str, tf.Tensor],
        report: tf.Tensor,
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor], tf.Tensor]:
        """(metric states, outputs, report), each one value for the whole cluster.

        Args:
            variables: Keras variables that say by `aggregation` how their states combine.
            states: for each local replica, the value of each variable.
            outputs: contributions of the local replicas, summed.
            report: numbers of this task, summed over the tasks.
        """
        if self.replicas == 1:
            return states[0], outputs, report

        # What is one value a worker already goes in with its first replica only.
        names = [name for name, value in outputs.items() if value.dtype != tf.string]
        shared = [
            value if value.dtype.is_floating or self.is_chief else tf.zeros_like(value)
            for value in (_addable(outputs[name]) for name in names)
        ]
        shared.append(report)
        nothing = [tf.zeros_like(value) for value in shared]
        mine: list[list[tf.Tensor]] = []
        for replica, state in enumerate(states):
            first = self.is_chief and replica == 0
            values = [
                contribution(variable, value, self.replicas, first)
                for variable, value in zip(variables, state, strict=True)
            ]
            mine.append(values + (nothing if replica else shared))
        reduced = self._sum_of_replicas(mine)
        values = [
            tf.cast(value, state.dtype) for value, state in zip(reduced, states[0], strict=False)
        ]
        *of_outputs, report = reduced[len(values) :]
        summed = {
            name: tf.cast(value, outputs[name].dtype)
            for name, value in zip(names, of_outputs, strict=True)
        }
        return values, {**outputs, **summed}, report

    def sum_over_workers(self, value: Any) -> np.ndarray:
        """The sum over workers of each worker's number or array; every worker must call."""
        value = np.asarray(value)
        if not self.multi_worker:
            return value
        value = tf.constant(value)
        # One function for each kind: TensorFlow warns of one that is traced for many.
        kind = tf.TensorSpec([None] * value.shape.rank, value.dtype)
        if kind not in self._sums:
            function = tf.function(self._sum_of_local, autograph=False)
            self._sums[kind] = function.get_concrete_function(kind)
        with self.peers.barrier():
            return self._sums[kind](value).numpy()

    def on_all_workers(self, flag: tf.Tensor) -> tf.Tensor:
        """Whether a boolean tensor is true on every worker: in the graph, in all of them."""
        if not self.multi_worker:
            return flag
        here = [[tf.cast(flag, tf.int32)] for _ in range(self.local_replicas)]
        return self._sum_of_replicas(here)[0] == self.replicas

    def rows_of_all(self, batch: Parts) -> tuple[tf.Tensor, tf.Tensor]:
        """In a step: (rows of all parts, sum of what the parts say of the global batch's size)."""

        def counted(part: Part, _: None) -> tf.Tensor:
            counts = tf.stack([tf.cast(part[0], tf.int64), tf.cast(part[1], tf.int64)])
            return all_reduce(tf.distribute.ReduceOp.SUM, [counts], [OTHER])[0]

        summed = self.run(counted, batch, [None] * self.local_replicas)[0]
        return summed[0], summed[1]

    def _sum_of_local(self, value: tf.Tensor) -> tf.Tensor:
        others = [[tf.zeros_like(value)] for _ in range(self.local_replicas - 1)]
        return self._sum_of_replicas([[value], *others])[0]

    def _sum_of_replicas(self, per_replica: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Sum lists of tensors over all replicas; over workers, one collective for each dtype."""
        if not self.multi_worker and not tells_what_it_reduces(self.strategy):
            return [tf.add_n(list(of_all)) for of_all in zip(*per_replica, strict=True)]
        dtypes = [value.dtype for value in per_replica[0]]

        def in_replica(per_replica: list[list[tf.Tensor]]) -> list[tf.Tensor]:
            mine = self.of_this_replica(per_replica)
            result: list[tf.Tensor] = [None] * len(mine)
            for dtype in dict.fromkeys(dtypes):
                places = [i for i, other in enumerate(dtypes) if other == dtype]
                # identity: a tensor from outside has no device, and the reduction goes by it.
                values = [tf.identity(mine[i]) for i in places]
                what = [METRIC] * len(values)
                reduced = all_reduce(tf.distribute.ReduceOp.SUM, values, what)
                for place, value in zip(places, reduced, strict=True):
                    result[place] = value
            return result

        summed = self.strategy.run(in_replica, args=(per_replica,))
        return [self.strategy.experimental_local_results(value)[0] for value in summed]


class StackedStates:
    """The states of metrics as few tensors: those of one shape, dtype and aggregation in one.

    A loop in the graph passes each tensor on by itself, and sends it from device to device.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        by_kind: dict[Any, list[int]] = {}
        for place, variable in enumerate(variables):
            shape = tuple(variable.shape)
            small = None not in shape and math.prod(shape) <= _SMALL
            kind = (shape, variable.dtype, variable.aggregation) if small else place
            by_kind.setdefault(kind, []).append(place)
        self._kinds = list(by_kind.values())
        self._is_sum = [variables[places[0]].aggregation == "sum" for places in self._kinds]

    def after_step(
        self, scope: ReplicaScope, here: StepContext | None, begun: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Stack the states with which a replica's step ends.

        Of a sum they are what it began with where the replica has no rows: the one that it computes
        with then is another's, and must not be added twice.

        Args:
            begun: the states with which the step began, stacked.
        """
        before, after = list(scope.without_rows.values()), scope.states()
        if here is None:
            return self.stack(after)
        if scope.has_reset:
            begun = self.stack(before)
            added: list[tf.Tensor | None] = [None] * len(after)
        else:
            added = [_added(*states) for states in zip(before, after, strict=True)]
        stacked = []
        for places, old, is_sum in zip(self._kinds, begun, self._is_sum, strict=True):
            new = [value for place in places if (value := added[place]) is not None]
            if len(new) == len(places):
                value = old + _stack(new)  # one addition for all of them
            else:
                value = _stack([after[place] for place in places])
            stacked.append(here.where_nonempty(value, old) if is_sum else value)
        return stacked

    def stack(self, states: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The state of each variable, as few tensors."""
        return [_stack([states[place] for place in places]) for places in self._kinds]

    def unstack(self, stacked: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The state of each variable."""
        states: dict[int, tf.Tensor] = {}
        for places, tensor in zip(self._kinds, stacked, strict=True):
            of_each = tf.unstack(tensor, len(places)) if places[1:] else [tensor]
            states.update(zip(places, of_each, strict=True))
        return [states[place] for place in range(len(states))]


class ReplicaSteps:
    """A step that the replicas of this worker run: one trace for all, or one for each.

    Args:
        step: called with a replica's part of a global batch, what the step before gave it, and
            what all replicas get alike.
        copies: the variables that it may use: of each, the copies of all local replicas.
        jit_compile: XLA compiles what a replica does between the sums, where one trace serves all.

    Attributes:
        not_shared: why each replica has a trace of its own; None where one serves all.
    """

    def __init__(
        self,
        on: SynchronousReduction,
        step: Callable[..., Any],
        copies: Callable[[], Iterable[Sequence[tf.Variable]]],
        *,
        jit_compile: bool = False,
    ):
        self._on = on
        self._step = step
        self._copies = copies
        self._jit_compile = jit_compile
        self._shared: dict[Any, SharedStep] = {}
        self._eager = False
        self.not_shared = trace_for_each(on, jit_compile=jit_compile)

    def __call__(self, batch: Parts, before: Sequence[Any], *rest: Any) -> list[Any]:
        """The results of each local replica, in cross-replica context.

        Args:
            batch: from an iterator over parts of global batches.
            before: an entry for each local replica.
        """
        on = self._on
        self._eager = tf.executing_eagerly()
        if self.not_shared is None and not self._eager:
            parts = zip(on.parts(batch), before, strict=True)
            args = [(part, mine, *rest) for part, mine in parts]
            try:
                return self._step_for(args)(args)
            except (NotSharedError, StrategyError) as why:
                self.not_shared = str(why)
                self._warn_of_xla(str(why))
        return on.run(self._step, batch, before, *rest)

    def _step_for(self, args: Sequence[Sequence[Any]]) -> SharedStep:
        kind = kind_of(args)
        if kind not in self._shared:
            on = self._on
            step = SharedStep(
                on.strategy,
                on.devices,
                on.first_replica,
                self._step,
                args,
                self._copies,
                jit_compile=self._jit_compile,
            )
            self._shared[kind] = step
            if not step.compiled and step.not_compiled:
                self._warn_of_xla(f"{step.not_compiled[0]}.")
        return self._shared[kind]

    def _warn_of_xla(self, why: str) -> None:
        if self._jit_compile:
            self._jit_compile = False
            warn(f"jit_compile=True is off: {why}")

    @property
    def traces(self) -> str:
        """How the step is traced, in words."""
        if self._eager:
            return "none: run_eagerly=True"
        by_xla = ", compiled by XLA" if self._jit_compile else ""
        for step in self._shared.values() if self._jit_compile else ():
            if step.not_compiled:
                by_xla = f", compiled by XLA but for a part: {step.not_compiled[0]}"
        if self._on.local_replicas == 1:
            return f"a trace for the one replica of this task{by_xla}"
        if self.not_shared is None:
            return f"one trace for the {self._on.local_replicas} replicas of this task{by_xla}"
        return f"a trace for each of {self._on.local_replicas} replicas: {self.not_shared}"

    def optimization(self) -> contextlib.AbstractContextManager[None]:
        """Scope of calls of what has been traced.

        The graph around functions that are optimized has little to gain by all that TensorFlow
        does to it.
        """
        return lightly_optimized() if self.not_shared is None else contextlib.nullcontext()

    @contextlib.contextmanager
    def telling_errors(self, again: Callable[[], object]) -> Iterator[None]:
        """Scope that reports the error itself where a step fails.

        Where replicas call functions, TensorFlow reports the error of one as a cancellation of what
        waits for it. So a step runs again with a trace for each replica, which tells the error.

        Args:
            again: traces the step again, and runs it on the next batch.

        Raises:
            TrainingError: that batch does not have the error.
        """
        try:
            yield
        except tf.errors.CancelledError as error:
            if self.not_shared is not None:
                raise
            self.not_shared = "it has failed"
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                again()
            raise TrainingError(
                "a step must end on each replica, got an error on one, which TensorFlow reports to"
                " the others as a cancellation. TensorFlow's log has it, in the line"
                ' "Local rendezvous is aborting with status"; compile(run_eagerly=True) tells'
                " where it comes from."
            ) from error


def trace_for_each(on: SynchronousReduction, *, jit_compile: bool) -> str | None:
    """Why each replica of a task has a trace of its own; None where the step decides it."""
    if isinstance(on.strategy, tf.distribute.TPUStrategy):
        return "a TPU compiles the step"
    if on.multi_worker and on.local_replicas > 1:  # several GPUs on each: untested
        return "other workers have replicas, too"
    # XLA cannot compile what replicas of several tasks do together, but what is between that.
    if on.local_replicas == 1 and not (on.multi_worker and jit_compile):
        return "there is one replica"
    return None


def _stack(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.stack(values) if values[1:] else values[0]


def _added(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor | None:
    """What was added to a tensor in a graph, if nothing else was done to it."""
    if tf.executing_eagerly():
        return None
    operation = _behind_identities(after).op
    if operation.type != "AddV2":
        return None
    first, value = operation.inputs
    same = _behind_identities(first) is _behind_identities(before)
    return value if same and value.shape == before.shape else None


def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _replica_id() -> tf.Tensor:
    # identity: some strategies give a number, and one that is no tensor is not per replica.
    return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)


def _devices(strategy: tf.distribute.Strategy) -> list[str]:
    try:
        return list(strategy.extended.worker_devices)
    except RuntimeError:  # the default strategy has none
        return []
