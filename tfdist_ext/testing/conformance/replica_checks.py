"""What replicas see: scope, run, collectives, reduce, gather, their rows of a dataset.

The strategy under test, and comparisons of values of replicas, are here for all checks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist_ext.errors import StrategyError
from tfdist_ext.strategies.one_machine import seen_devices

RUN_MODES = ("eager", "tf.function around", "tf.function within")


def run(strategy: tf.distribute.Strategy, step: Callable[..., Any], mode: str, *args: Any) -> Any:
    """Calls `strategy.run` eagerly, inside a tf.function, or with a tf.function."""
    if mode == "eager":
        return strategy.run(step, args=args)
    if mode == "tf.function around":
        return tf.function(lambda: strategy.run(step, args=args))()
    return strategy.run(tf.function(step), args=args)


def local_values(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """The value of each replica, or of each copy of a variable, as Python numbers or lists.

    Large values are given as [minimum, maximum].
    """
    arrays = [np.asarray(part) for part in strategy.experimental_local_results(value)]
    return [
        array.tolist() if array.size < 100 else [float(array.min()), float(array.max())]
        for array in arrays
    ]


def replica_number() -> tf.Tensor:
    """1.0 on the first replica, 2.0 on the second, and so on."""
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32) + 1


def _reduction_probe() -> dict[str, tf.Tensor]:
    """Values of this replica that a faulty reduction changes: 64 bits, and several axes."""
    own = replica_number()
    return {
        "int64": tf.cast(own, tf.int64) + 2**24,  # float32 cannot hold it
        "float64": tf.cast(own, tf.float64) + 2.0**-40,
        "rank 3": tf.fill([2, 1, 3], own),
    }


def _probe_sums(count: int) -> dict[str, Any]:
    """The sums of `_reduction_probe()` over this many replicas, as Python numbers and lists."""
    total = count * (count + 1) // 2
    return {
        "int64": total + count * 2**24,
        "float64": total + count * 2.0**-40,
        "rank 3": [[[float(total)] * 3]] * 2,
    }


def expect_equal(what: str, got: Any, wanted: Any) -> None:
    """Raise AssertionError, which names `what`, unless `got` equals `wanted`."""
    __tracebackhide__ = True
    if got != wanted:
        raise AssertionError(f"{what}: must be {wanted!r}, got {got!r}.")


class StrategyCase:
    """The base of all checks: the strategy under test, and comparisons.

    Attributes:
        tolerance: the largest difference of trained weights, losses and metrics from those of one
            device, relative to the largest number of each variable or log.
    """

    tolerance: float = 1e-6
    _made: ClassVar[tf.distribute.Strategy]

    def strategy(self) -> tf.distribute.Strategy:
        """Return the strategy to be tested, with two replicas or more."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method `strategy`: define one that returns the strategy"
            " to be tested."
        )

    def under_test(self) -> tf.distribute.Strategy:
        """The strategy of `strategy()`, the same one in all checks of a class."""
        # vars(): the strategy of a base class is not this class's.
        if "_made" not in vars(type(self)):
            type(self)._made = self._checked_strategy()
        return type(self)._made

    def replicas(self) -> int:
        """Number of replicas in sync."""
        return int(self.under_test().num_replicas_in_sync)

    def variable(self, value: Any, aggregation: str = "NONE", **options: Any) -> tf.Variable:
        """A variable made in the strategy's scope."""
        with self.under_test().scope():
            return tf.Variable(value, aggregation=tf.VariableAggregation[aggregation], **options)

    def numbers(self) -> list[float]:
        """The `replica_number` of each replica: 1.0 to N."""
        return [float(number) for number in range(1, self.replicas() + 1)]

    def expect_values(self, what: str, value: Any, wanted: list[Any]) -> None:
        """Raise AssertionError unless the replicas, or the copies, have these values."""
        expect_equal(what, local_values(self.under_test(), value), wanted)

    def expect_run(
        self, what: str, step: Callable[..., Any], wanted: list[Any], *args: Any
    ) -> None:
        """Raise AssertionError unless `step` gives the replicas these values, in each mode."""
        for mode in RUN_MODES:
            self.expect_values(f"{what}, {mode}", run(self.under_test(), step, mode, *args), wanted)

    def _checked_strategy(self) -> tf.distribute.Strategy:
        name = f"{type(self).__name__}.strategy"
        strategy = self.strategy()
        if not isinstance(strategy, tf.distribute.Strategy):
            raise StrategyError(
                f"{name} returned {strategy!r}, which is not a tf.distribute.Strategy."
            )
        # TensorFlow's own strategies silently use the first CPU for devices that do not exist.
        seen, devices = seen_devices(), strategy.extended.worker_devices
        missing = [
            name for device in devices if (name := device.rpartition("device:")[2]) not in seen
        ]
        if missing:
            cpus = [int(device[4:]) + 1 for device in missing if device.startswith("CPU:")]
            raise StrategyError(
                f"the strategy of {name} uses {', '.join(missing)}, but this process has only"
                f" {', '.join(seen)}."
                + (f" Call tfdist_ext.testing.logical_cpus({max(cpus)}) first." if cpus else "")
            )
        return strategy


class ReplicaChecks(StrategyCase):
    """Checks in which replica r of N computes with the number r, from 1 to N.

    Each row of a dataset is a number of its own, so that a lost or doubled row is seen.
    """

    def test_scope(self) -> None:
        """`scope()` returns the strategy, enters cross-replica context, and can be left."""
        strategy = self.under_test()
        with strategy.scope() as entered:
            expect_equal("the value of scope()", entered, strategy)
            expect_equal("get_strategy() in scope()", tf.distribute.get_strategy(), strategy)
            expect_equal(
                "in_cross_replica_context()", tf.distribute.in_cross_replica_context(), True
            )
            with strategy.scope() as again:
                expect_equal("the value of a nested scope()", again, strategy)
            expect_equal(
                "get_strategy() after a nested scope()", tf.distribute.get_strategy(), strategy
            )
        expect_equal("has_strategy() after scope()", tf.distribute.has_strategy(), False)

    def test_run(self) -> None:
        """`run` calls the step on each replica, with its arguments and the replica's values."""
        strategy, numbers = self.under_test(), self.numbers()

        def step(x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return {"x": x * replica_number(), "count": context.num_replicas_in_sync}

        for mode in RUN_MODES:
            result = run(strategy, step, mode, tf.constant(2.0))
            self.expect_values(f"run, {mode}", result["x"], [2 * r for r in numbers])
            counts = set(local_values(strategy, result["count"]))
            expect_equal(f"replicas, {mode}", counts, {len(numbers)})
            again = run(strategy, lambda x: x + replica_number(), mode, result["x"])
            self.expect_values(f"run on its own result, {mode}", again, [3 * r for r in numbers])
        result = strategy.run(lambda *, x: x * replica_number(), kwargs={"x": 3.0})
        self.expect_values("run with kwargs", result, [3 * r for r in numbers])

    def test_all_reduce(self) -> None:
        """`all_reduce` gives every replica the SUM or MEAN, also of structures."""
        count = self.replicas()
        right = {"mean": (count + 1) / 2, **_probe_sums(count)}

        def step() -> Any:
            means = _all_reduce(tf.distribute.ReduceOp.MEAN, {"mean": replica_number()})
            return {**means, **_all_reduce("SUM", _reduction_probe())}

        for mode in RUN_MODES:
            for kind, value in run(self.under_test(), step, mode).items():
                self.expect_values(f"all_reduce of {kind}, {mode}", value, [right[kind]] * count)

    def test_all_reduce_of_slices(self) -> None:
        """Slices of a table are added by their rows, as gradients of embeddings are."""
        count, numbers = self.replicas(), self.numbers()

        def step() -> Any:
            rows = tf.stack([0, tf.cast(replica_number(), tf.int64)])
            slices = tf.IndexedSlices(tf.fill([2, 1], replica_number()), rows, (count + 1, 1))
            return tf.convert_to_tensor(_all_reduce("SUM", slices))

        table = [[sum(numbers)], *([r] for r in numbers)]
        summed = run(self.under_test(), step, "tf.function around")
        self.expect_values("the sum of slices", summed, [table] * count)

    def test_all_reduce_of_a_captured_tensor(self) -> None:
        """A tensor from outside of the step counts once for each replica."""
        count, two = self.replicas(), tf.constant(2.0)
        result = self.under_test().run(lambda: _all_reduce("SUM", two))
        self.expect_values("the sum of 2 on each replica", result, [2 * count] * count)

    def test_all_gather(self) -> None:
        """`all_gather` gives every replica the rows of all, also of unequal lengths."""

        def step() -> Any:
            return tf.distribute.get_replica_context().all_gather(_uneven_rows(), axis=0)

        right = [r for r in self.numbers() for _ in range(int(r))]
        self.expect_run("all_gather", step, [right] * self.replicas())

    def test_merge_call(self) -> None:
        """`merge_call` gets the values of all replicas, and returns a result to each."""

        def largest(strategy: Any, value: Any, times: float) -> Any:
            if not tf.distribute.in_cross_replica_context():
                raise AssertionError(
                    "merge_call: its function must be in cross-replica context, got replica"
                    " context."
                )
            return times * tf.reduce_max(tf.stack(strategy.experimental_local_results(value)))

        def step() -> Any:
            context = tf.distribute.get_replica_context()
            most = context.merge_call(largest, args=(replica_number(),), kwargs={"times": 10.0})
            return most + replica_number()

        self.expect_run("merge_call", step, [10 * self.replicas() + r for r in self.numbers()])

    def test_reduce(self) -> None:
        """`reduce` of a result of `run`, in Python and in a tf.function."""
        strategy, count = self.under_test(), self.replicas()
        right = {"mean": (count + 1) / 2, **_probe_sums(count)}

        def reduced() -> Any:
            # One at a time: not every strategy takes a structure.
            values = strategy.run(_reduction_probe)
            sums = {
                kind: strategy.reduce("SUM", value, axis=None) for kind, value in values.items()
            }
            mean = strategy.reduce("MEAN", strategy.run(replica_number), axis=None)
            return {"mean": mean, **sums}

        for where, call in {"": reduced, ", in a tf.function": tf.function(reduced)}.items():
            for kind, value in call().items():
                expect_equal(f"reduce of {kind}{where}", value.numpy().tolist(), right[kind])

    def test_reduce_along_an_axis(self) -> None:
        """Along an axis, every row has the same weight on every replica."""
        strategy = self.under_test()
        total, squares = sum(self.numbers()), sum(r * r for r in self.numbers())

        def reduced() -> Any:
            rows = strategy.run(_uneven_rows)
            return [strategy.reduce(operation, rows, axis=0) for operation in ("SUM", "MEAN")]

        for where, call in {"": reduced, ", in a tf.function": tf.function(reduced)}.items():
            summed, mean = map(float, call())
            expect_equal(f"the SUM of r rows of each replica{where}", summed, squares)
            is_right = abs(mean - squares / total) < 1e-5
            expect_equal(f"the MEAN of r rows is right{where}", is_right, True)

    def test_gather(self) -> None:
        """`gather` joins the values of all replicas along an axis, in their order."""
        strategy, numbers = self.under_test(), self.numbers()
        even = strategy.run(lambda: tf.fill([2, 2], replica_number()))
        joined = strategy.gather(even, axis=1).numpy().tolist()
        expect_equal("gather, axis 1", joined, [[r for r in numbers for _ in range(2)]] * 2)
        joined = strategy.gather(strategy.run(_uneven_rows), axis=0).numpy().tolist()
        expect_equal("gather, axis 0", joined, [r for r in numbers for _ in range(int(r))])

    def test_values_from_a_function(self) -> None:
        """`experimental_distribute_values_from_function`: a value for each replica, for `run`."""
        strategy, count = self.under_test(), self.replicas()
        values = strategy.experimental_distribute_values_from_function(
            lambda own: tf.constant(10.0 * own.replica_id_in_sync_group + own.num_replicas_in_sync)
        )
        right = [11.0 * number + count + 1 for number in range(count)]
        self.expect_run("values passed to run", lambda x: x + replica_number(), right, values)

    def test_distribute_dataset(self) -> None:
        """The parts of the replicas join to the global batch, also to a smaller last one."""
        strategy, size = self.under_test(), 2 * self.replicas()
        rows = tf.data.Dataset.range(2 * size - 1).batch(size)
        distributed = strategy.experimental_distribute_dataset(rows)
        parts = [local_values(strategy, batch) for batch in distributed]
        joined = [list(chain(*batch)) for batch in parts]
        expect_equal("rows of each batch", joined, [[*range(size)], [*range(size, 2 * size - 1)]])
        expect_equal(
            "number of rows per replica", [len(p) for p in parts[0]], [2] * self.replicas()
        )

    def test_datasets_from_a_function(self) -> None:
        """With `distribute_datasets_from_function`, each row is read once."""
        strategy, count = self.under_test(), self.replicas()

        def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
            rows = tf.data.Dataset.range(4 * count)
            shard = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return shard.batch(context.get_per_replica_batch_size(2 * count))

        distributed = strategy.distribute_datasets_from_function(pipeline)
        parts = [local_values(strategy, batch) for batch in distributed]
        lengths = [[len(part) for part in batch] for batch in parts]
        expect_equal("rows of each replica in each step", lengths, [[2] * count] * 2)
        rows = sorted(row for batch in parts for part in batch for row in part)
        expect_equal("all rows", rows, list(range(4 * count)))


def _all_reduce(operation: Any, value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce(operation, value)


def _uneven_rows() -> Any:
    """On replica r, r rows of the number r."""
    return tf.repeat(replica_number(), tf.cast(replica_number(), tf.int32))
