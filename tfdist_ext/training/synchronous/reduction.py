"""Reduces the values of single replicas to one value for all replicas of all workers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.strategies._tf_private import per_replica
from tfdist_ext.strategies.explanation import computing_tasks
from tfdist_ext.strategies.reductions import METRIC, OTHER, all_reduce, tells_what_it_reduces
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.agreement.barriers import SAME_CALLS, peers_of
from tfdist_ext.training.agreement.equality import check_equal_across_workers
from tfdist_ext.training.agreement.single_task import Reduction
from tfdist_ext.training.inputs import Part, Parts

__all__ = ["StackedStates", "States", "SynchronousReduction"]


# Elements of a state that is faster to copy than to pass on by itself.
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
            with self.peers.barrier("its beginning"):
                check_equal_across_workers(self, {"the call": name}, SAME_CALLS)
            yield

    def task_names(self) -> list[str]:
        """The tasks that compute, in the order of their replicas, as "worker 1"."""
        return computing_tasks(self.strategy, self.workers)

    def run(
        self, step: Callable[..., Any], batch: Parts, before: Sequence[Any], *rest: Any
    ) -> list[Any]:
        """Run `step(part, mine, *rest)` on each replica; returns the local replicas' results.

        Args:
            batch: from an iterator over parts of global batches.
            before: a structure for each local replica.
        """

        def in_replica(*args: Any) -> Any:
            return step(*args)  # TensorFlow would clone a tf.function

        parts = per_replica(batch) if self.feeds_on_host else batch
        args = parts, per_replica(before), *rest
        return self.of_each(self.strategy.run(in_replica, args=args))

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

    def parts(self, batch: Parts) -> list[Part]:
        """The parts of the local replicas."""
        return list(batch) if self.feeds_on_host else self.of_each(batch)

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
        numbers = {name: value for name, value in outputs.items() if value.dtype != tf.string}
        # Of a value that is not a mean, the chief's counts.
        of_task = [
            value if value.dtype.is_floating or self.is_chief else tf.zeros_like(value)
            for value in map(_addable, numbers.values())
        ]
        of_task.append(report)
        of_replicas = []
        for replica, state in enumerate(states):
            first = self.is_chief and replica == 0
            of_metrics = [
                _contribution(variable, value, self.replicas, first)
                for variable, value in zip(variables, state, strict=True)
            ]
            others = of_task if replica == 0 else list(map(tf.zeros_like, of_task))
            of_replicas.append(of_metrics + others)
        reduced = self._sum_of_replicas(of_replicas)
        values = [
            tf.cast(value, state.dtype) for value, state in zip(reduced, states[0], strict=False)
        ]
        *summed, report = reduced[len(values) :]
        summed_outputs = {
            name: tf.cast(value, numbers[name].dtype)
            for name, value in zip(numbers, summed, strict=True)
        }
        return values, {**outputs, **summed_outputs}, report

    def sum_over_workers(self, value: Any) -> np.ndarray:
        """The sum over workers of each worker's number or array; every worker must call."""
        value = np.asarray(value)
        if not self.multi_worker:
            return value
        value = tf.constant(value)
        # One function for each kind: TensorFlow warns of one that is traced for many.
        kind = tf.TensorSpec([None] * value.shape.rank, value.dtype)
        if kind not in self._sums:
            function = tf.function(self._sum_of_tasks, autograph=False)
            self._sums[kind] = function.get_concrete_function(kind)
        with self.peers.barrier():
            return self._sums[kind](value).numpy()

    def on_all_workers(self, flag: tf.Tensor) -> tf.Tensor:
        """Whether a boolean tensor is true on every worker, in the graph of each worker."""
        if not self.multi_worker:
            return flag
        return self._sum_of_tasks(tf.cast(flag, tf.int32)) == self.workers

    def rows_of_all(self, batch: Parts) -> tuple[tf.Tensor, tf.Tensor]:
        """In a step: (rows of all parts, sum of the parts' sizes of the global batch)."""

        def counted(part: Part, _: None) -> tf.Tensor:
            counts = tf.stack([tf.cast(part[0], tf.int64), tf.cast(part[1], tf.int64)])
            return all_reduce(tf.distribute.ReduceOp.SUM, [counts], [OTHER])[0]

        summed = self.run(counted, batch, [None] * self.local_replicas)[0]
        return summed[0], summed[1]

    def _sum_of_tasks(self, value: tf.Tensor) -> tf.Tensor:
        """The sum over tasks of a value that each task has once, in the graph."""
        others = [[tf.zeros_like(value)] for _ in range(self.local_replicas - 1)]
        return self._sum_of_replicas([[value], *others])[0]

    def _sum_of_replicas(self, of_replicas: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Sum lists of tensors over all replicas; over workers, one collective for each dtype."""
        if not self.multi_worker and not tells_what_it_reduces(self.strategy):
            return [tf.add_n(list(of_all)) for of_all in zip(*of_replicas, strict=True)]
        dtypes = [value.dtype for value in of_replicas[0]]

        def in_replica(mine: list[tf.Tensor]) -> list[tf.Tensor]:
            summed: dict[int, tf.Tensor] = {}
            for dtype in dict.fromkeys(dtypes):
                places = [i for i, other in enumerate(dtypes) if other == dtype]
                # A tensor from outside has no device, and the reduction needs its device.
                values = [tf.identity(mine[i]) for i in places]
                what = [METRIC] * len(values)
                reduced = all_reduce(tf.distribute.ReduceOp.SUM, values, what)
                summed.update(zip(places, reduced, strict=True))
            return [summed[i] for i in range(len(dtypes))]

        results = self.strategy.run(in_replica, args=(per_replica(of_replicas),))
        return [self.strategy.experimental_local_results(value)[0] for value in results]


def _contribution(
    variable: keras.Variable, value: tf.Tensor, replicas: int, first: tf.Tensor | bool
) -> tf.Tensor:
    """Returns what one replica's metric state adds to the state over all replicas.

    Args:
        variable: its `aggregation` says how states are combined.
        first: whether it is the first of all replicas.
    """
    value = _addable(value)
    if variable.aggregation == "sum":
        return value
    if variable.aggregation == "mean":
        return tf.cast(value / replicas, value.dtype)
    return tf.where(first, value, tf.zeros_like(value))  # the first replica speaks for all


def _addable(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype == tf.bool else value


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


def _stack(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.stack(values) if values[1:] else values[0]


def _replica_id() -> tf.Tensor:
    # identity: some strategies give a number, and one that is no tensor is not per replica.
    return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)


def _devices(strategy: tf.distribute.Strategy) -> list[str]:
    try:
        return list(strategy.extended.worker_devices)
    except RuntimeError:  # the default strategy has none
        return []
