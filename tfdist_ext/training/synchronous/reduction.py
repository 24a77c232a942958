"""Reduces the values of single replicas to one value for all replicas of all workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.data.batches import Parts
from tfdist_ext.data.pipelines import Part
from tfdist_ext.strategies._tf_private import of_replica, per_replica
from tfdist_ext.strategies.explanation import computing_tasks, devices_listed
from tfdist_ext.strategies.reductions import (
    METRIC,
    OTHER,
    Reduced,
    all_reduce,
    tells_what_it_reduces,
)
from tfdist_ext.training._keras_private import raw_value
from tfdist_ext.training.agreement.barriers import SAME_CALLS, peers_of
from tfdist_ext.training.agreement.equality import check_equal_across_workers
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.steps.scope import assign_each

# For each local replica, the states of its metrics, stacked.
States: TypeAlias = list[list[tf.Tensor]]


class SynchronousReduction(Reduction):
    """Reductions over the replicas of a strategy, a few tensors at a time."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy, peers_of(strategy))
        self.replicas = strategy.num_replicas_in_sync

        def number() -> tf.Tensor:  # identity: some strategies give a number of Python
            return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)

        # Concrete: avoids warnings of retracing.
        ids = tf.function(lambda: strategy.run(number), autograph=False).get_concrete_function()()
        local = strategy.experimental_local_results(ids)
        self.local_replicas = len(local)
        self.first_replica = int(local[0])  # of this worker, in the order of all
        self.multi_worker = self.replicas > self.local_replicas
        by_tensorflow = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.between_workers = self.multi_worker and by_tensorflow  # its collectives
        self.workers = self.replicas // self.local_replicas
        self.worker = self.first_replica // self.local_replicas  # which of them this task is
        self.devices = devices_listed(strategy, "worker_devices")  # of this worker's replicas
        # Such as "GPU", each once.
        self.device_types = sorted(
            {tf.DeviceSpec.from_string(name).device_type for name in self.devices}
        )
        # CPU replicas are fed from a plain iterator on the host.
        self.feeds_on_host = self.device_types == ["CPU"]
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
            with self.peers.barrier("start"):
                if self.multi_worker:
                    check_equal_across_workers(self, {"the call": name}, SAME_CALLS)
            yield

    def task_names(self) -> list[str]:
        """The tasks that compute, in the order of their replicas, as "worker 1"."""
        return computing_tasks(self.strategy, self.workers)

    def run(
        self, step: Callable[..., Any], batch: Parts, before: Sequence[Any], *rest: Any
    ) -> list[Any]:
        """Runs `step(part, before, *rest)` on each replica; returns the local replicas' results.

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
        return [of_replica(number, values) for number in range(self.local_replicas)]

    def parts(self, batch: Parts) -> list[Part]:
        """The parts of the local replicas."""
        return list(batch) if self.feeds_on_host else self.of_each(batch)

    def totals(
        self, kinds: Sequence[str | None], values: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns each value over all replicas, from the values of each local replica.

        Args:
            kinds: how each value combines: "sum" or "mean"; else the first replica's value counts.
        """
        vectors = []
        for replica, states in enumerate(values):
            first = self.is_chief and replica == 0
            parts = [
                _contribution(value, kind, self.replicas, first=first)
                for value, kind in zip(states, kinds, strict=True)
            ]
            vectors.append(tf.concat([tf.zeros([0], tf.float64), *parts], 0))
        pieces = tf.split(self._sum_of_replicas(vectors), [*map(tf.size, values[0]), 0])
        return [
            tf.cast(tf.reshape(piece, tf.shape(value)), value.dtype)
            for piece, value in zip(pieces, values[0], strict=False)
        ]

    def sum_over_workers(self, value: Any) -> np.ndarray:
        """The sum over workers of each worker's number or array; every worker must call."""
        value = np.asarray(value)
        if not self.multi_worker:
            return value
        value = tf.constant(value)
        # One function for each kind avoids warnings of retracing.
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
        """In a step of data that tasks read: (rows of all parts, how many parts have data)."""
        counts = [
            tf.stack([tf.cast(rows, tf.int64), tf.cast(parts, tf.int64)])
            for rows, parts, _ in self.parts(batch)
        ]
        summed = self._sum_of_replicas(counts, OTHER)
        return summed[0], summed[1]

    def _sum_of_tasks(self, value: tf.Tensor) -> tf.Tensor:
        """The sum over tasks of a value that each task has once, in the graph."""
        zeros = [tf.zeros_like(value) for _ in range(self.local_replicas - 1)]
        return self._sum_of_replicas([value, *zeros])

    def _sum_of_replicas(self, values: Sequence[tf.Tensor], what: Reduced = METRIC) -> tf.Tensor:
        """The sum over all replicas, of the tensors of the local replicas."""
        if not self.multi_worker and not tells_what_it_reduces(self.strategy):
            return tf.add_n(list(values))

        def in_replica(local: tf.Tensor) -> tf.Tensor:
            # A tensor from outside has no device, and the reduction needs its device.
            return all_reduce([tf.identity(local)], [what])[0]

        results = self.strategy.run(in_replica, args=(per_replica(values),))
        return self.strategy.experimental_local_results(results)[0]


def _contribution(
    value: tf.Tensor, aggregation: str | None, replicas: int, *, first: bool
) -> tf.Tensor:
    """What one replica adds to a value over all replicas, as a float64 vector.

    float64 holds every count below 2**53; float32 loses counts above 16 million.

    Args:
        aggregation: "sum" and "mean" as of Keras variables; else the first replica's value counts.
        first: whether it is the first of all replicas.
    """
    value = tf.cast(tf.reshape(value, [-1]), tf.float64)
    if aggregation == "mean":
        return value / replicas
    return value if first or aggregation == "sum" else tf.zeros_like(value)


class MetricStates:
    """The states of a model's metrics, which the steps of an execution pass on.

    The states of one shape, dtype and aggregation are one tensor: a loop in the graph passes each
    tensor on by itself, and sends it from device to device.

    Args:
        eagerly: each task computes the whole global batch once, so there is one state on each task.

    Attributes:
        variables: the variables of the metrics.
    """

    def __init__(
        self, reduction: SynchronousReduction, variables: Sequence[keras.Variable], *, eagerly: bool
    ):
        self.variables = variables
        self._reduction = reduction
        self._eagerly = eagerly
        kinds: dict[Any, list[int]] = {}
        for place, variable in enumerate(variables):
            kind = variable.aggregation, tuple(variable.shape), variable.dtype
            kinds.setdefault(kind, []).append(place)
        self._places = list(kinds.values())
        self._aggregations = [aggregation for aggregation, *_ in kinds]

    def at_start(self) -> States:
        """For each local replica, the states from which its steps start.

        What is summed over replicas starts from its value on the first replica, and from zero on
        all others, so that `over_all` counts the value once.
        """
        values = self.stacked([raw_value(variable) for variable in self.variables])
        if self._eagerly:
            return [values]
        zeros = [
            tf.zeros_like(value) if aggregation == "sum" else value
            for value, aggregation in zip(values, self._aggregations, strict=True)
        ]
        replicas = [list(zeros) for _ in range(self._reduction.local_replicas)]
        return [values, *replicas[1:]] if self._reduction.is_chief else replicas

    def stacked(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The value of each variable, as few tensors."""
        return [tf.stack([values[place] for place in places]) for places in self._places]

    def of_variables(self, stacked: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The value of each variable."""
        values: dict[int, tf.Tensor] = {}
        for places, tensor in zip(self._places, stacked, strict=True):
            values.update(zip(places, tf.unstack(tensor, len(places)), strict=True))
        return [values[place] for place in range(len(values))]

    def over_all(
        self, states: States, outputs: dict[str, tf.Tensor], report: tf.Tensor
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor], tf.Tensor]:
        """Assign the states over all replicas to the variables.

        Args:
            outputs: contributions of the local replicas, summed.
            report: numbers of this task, summed over the tasks.

        Returns:
            (the values of the variables, outputs, report), the same on every worker.
        """
        reduction, stacked = self._reduction, states[0]
        if self._eagerly:
            report = tf.constant(reduction.sum_over_workers(report))
        elif reduction.replicas > 1:
            of_task = [*outputs.values(), report]
            # An output that is not a mean has the chief's value.
            kinds = ["sum" if value.dtype.is_floating else None for value in of_task]
            zeros = list(map(tf.zeros_like, of_task))
            values = [[*state, *zeros] for state in states]
            values[0] = [*states[0], *of_task]
            totals = reduction.totals([*self._aggregations, *kinds], values)
            stacked, of_task = totals[: len(stacked)], totals[len(stacked) :]
            outputs, report = dict(zip(outputs, of_task, strict=False)), of_task[-1]
        values = self.of_variables(stacked)
        assign_each(reduction.strategy, self.variables, values)
        return values, outputs, report
