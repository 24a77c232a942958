"""What a step and its replicas see: scope, run, collectives, reduce, gather, local values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.testing.conformance.strategy_case import StrategyCase
from tfdist_ext.testing.conformance.strategy_probes import (
    RUN_MODES,
    expect_equal,
    local_values,
    probe_sums,
    reduction_probe,
    replica_number,
    run,
)

__all__ = ["ReplicaChecks"]


class ReplicaChecks(StrategyCase):
    """On N replicas, the number r = 1 to N on each: sums of it tell who took part."""

    def test_scope(self) -> None:
        """`scope()` gives the strategy, in cross-replica context, and is left again."""
        strategy = self.under_test()
        with strategy.scope() as entered:
            expect_equal("what scope() gives", entered, strategy)
            expect_equal("get_strategy() in scope()", tf.distribute.get_strategy(), strategy)
            expect_equal("a cross-replica context", tf.distribute.in_cross_replica_context(), True)
            with strategy.scope() as again:
                expect_equal("what a scope() within gives", again, strategy)
            expect_equal("get_strategy() after it", tf.distribute.get_strategy(), strategy)
        expect_equal("has_strategy() after scope()", tf.distribute.has_strategy(), False)

    def test_run(self) -> None:
        """`run` calls the step on each replica, with its arguments and the replica's values."""
        strategy, count = self.under_test(), self.replicas()

        def step(x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return {"x": x * replica_number(), "count": context.num_replicas_in_sync}

        each = range(1, count + 1)
        for mode in RUN_MODES:
            result = run(strategy, step, mode, tf.constant(2.0))
            expect_equal(f"run, {mode}", local_values(strategy, result["x"]), [2 * r for r in each])
            expect_equal(f"replicas, {mode}", set(local_values(strategy, result["count"])), {count})
            again = run(strategy, lambda x: x + replica_number(), mode, result["x"])
            expect_equal(
                f"run on its own result, {mode}",
                local_values(strategy, again),
                [3 * r for r in each],
            )
        result = strategy.run(lambda *, x: x * replica_number(), kwargs={"x": 3.0})
        expect_equal("run with kwargs", local_values(strategy, result), [3 * r for r in each])

    def test_step_errors_are_raised(self) -> None:
        """What a step raises is raised by `run`."""

        class MineError(Exception):
            pass

        def fails() -> None:
            raise MineError

        try:
            self.under_test().run(fails)
        except MineError:
            return
        raise AssertionError("an exception in a step: run must raise it; it returned.")

    def test_all_reduce(self) -> None:
        """SUM and MEAN over all replicas, on each of them; of structures, too."""
        strategy, count = self.under_test(), self.replicas()
        total, mean = count * (count + 1) / 2, (count + 1) / 2

        def step() -> Any:
            reduce = tf.distribute.get_replica_context().all_reduce
            matrix = tf.fill([2, 3], replica_number())
            mean = tf.distribute.ReduceOp.MEAN
            return reduce("SUM", replica_number()), reduce(
                mean, {"a": replica_number(), "b": [matrix]}
            )

        for mode in RUN_MODES:
            sums, means = run(strategy, step, mode)
            expect_equal(f"the sum, {mode}", local_values(strategy, sums), [total] * count)
            expect_equal(f"the mean, {mode}", local_values(strategy, means["a"]), [mean] * count)
            matrices = local_values(strategy, means["b"][0])
            expect_equal(f"the mean of a matrix, {mode}", matrices, [[[mean] * 3] * 2] * count)

        def wide_step() -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", reduction_probe())

        for mode in RUN_MODES[:2]:
            summed, right = run(strategy, wide_step, mode), probe_sums(count)
            for kind, each, wanted in zip(right._fields, summed, right, strict=True):
                expect_equal(
                    f"the sum of {kind}, {mode}", local_values(strategy, each), [wanted] * count
                )

    def test_all_reduce_of_slices(self) -> None:
        """Slices of a table are added by their rows, as gradients of embeddings are."""
        strategy, count = self.under_test(), self.replicas()

        def step() -> Any:
            rows = tf.stack([0, tf.cast(replica_number(), tf.int64)])
            slices = tf.IndexedSlices(tf.fill([2, 1], replica_number()), rows, (count + 1, 1))
            summed = tf.distribute.get_replica_context().all_reduce("SUM", slices)
            return tf.convert_to_tensor(summed)

        table = [[count * (count + 1) / 2], *([r] for r in range(1, count + 1))]
        summed = run(strategy, step, "tf.function around")
        expect_equal("the sum of slices", local_values(strategy, summed), [table] * count)

    def test_all_reduce_of_an_outer_tensor(self) -> None:
        """A tensor from outside of the step counts once for each replica."""
        strategy, count = self.under_test(), self.replicas()
        two = tf.constant(2.0)
        result = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", two))
        expect_equal(
            "the sum of 2 on each replica", local_values(strategy, result), [2 * count] * count
        )

    def test_gradient_of_all_reduce(self) -> None:
        """The gradient of a sum over replicas is the sum of their gradients."""
        strategy, count = self.under_test(), self.replicas()

        def step() -> Any:
            x = replica_number()
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.distribute.get_replica_context().all_reduce("SUM", x) * replica_number()
            return tape.gradient(total, x)

        result = run(strategy, step, "tf.function around")
        expect_equal(
            "the gradient", local_values(strategy, result), [count * (count + 1) / 2] * count
        )

    def test_all_gather(self) -> None:
        """Rows of all replicas in their order, on each of them; of unequal length, too."""
        strategy, count = self.under_test(), self.replicas()

        def step() -> Any:
            rows = tf.repeat(replica_number(), tf.cast(replica_number(), tf.int32))
            return tf.distribute.get_replica_context().all_gather(rows, axis=0)

        right = [float(r) for r in range(1, count + 1) for _ in range(r)]
        for mode in RUN_MODES:
            gathered = local_values(strategy, run(strategy, step, mode))
            expect_equal(f"all_gather, {mode}", gathered, [right] * count)

    def test_merge_call(self) -> None:
        """`merge_call` sees the values of all replicas at once, and answers all of them."""
        strategy, count = self.under_test(), self.replicas()

        def largest(strategy: Any, value: Any, times: float) -> Any:
            if not tf.distribute.in_cross_replica_context():
                raise AssertionError("merge_call: its function must be in cross-replica context.")
            return times * tf.reduce_max(tf.stack(strategy.experimental_local_results(value)))

        def step() -> Any:
            context = tf.distribute.get_replica_context()
            most = context.merge_call(largest, args=(replica_number(),), kwargs={"times": 10.0})
            return most + replica_number()

        right = [10.0 * count + r for r in range(1, count + 1)]
        for mode in RUN_MODES:
            expect_equal(
                f"merge_call, {mode}", local_values(strategy, run(strategy, step, mode)), right
            )

    def test_reduce(self) -> None:
        """`reduce` of what `run` returned, in Python and in a tf.function."""
        strategy, count = self.under_test(), self.replicas()
        right = {"SUM": count * (count + 1) / 2, "MEAN": (count + 1) / 2}
        for operation, wanted in right.items():

            def reduced(operation: str = operation) -> Any:
                return strategy.reduce(operation, strategy.run(replica_number), axis=None)

            expect_equal(f"reduce {operation}", float(reduced()), wanted)
            expect_equal(
                f"reduce {operation}, in a tf.function", float(tf.function(reduced)()), wanted
            )

        def reduced_wide() -> Any:
            values = strategy.run(
                reduction_probe
            )  # one at a time: not every strategy takes a structure
            return [strategy.reduce("SUM", each, axis=None) for each in values]

        sums = probe_sums(count)
        for where, call in {
            "": reduced_wide,
            ", in a tf.function": tf.function(reduced_wide),
        }.items():
            for kind, each, wanted in zip(sums._fields, call(), sums, strict=True):
                expect_equal(f"reduce SUM of {kind}{where}", each.numpy().tolist(), wanted)

    def test_reduce_along_an_axis(self) -> None:
        """Along an axis every row counts the same, on whichever replica it is."""
        strategy, count = self.under_test(), self.replicas()
        even = strategy.run(lambda: tf.fill([2, 2], replica_number()))
        total, squares = count * (count + 1) / 2, count * (count + 1) * (2 * count + 1) / 6
        rows = strategy.reduce("SUM", even, axis=0).numpy().tolist()
        expect_equal("the sum of 2 rows of each replica", rows, [2 * total] * 2)
        rows = strategy.reduce("MEAN", even, axis=0).numpy().tolist()
        expect_equal("the mean of 2 rows of each replica", rows, [(count + 1) / 2] * 2)

        def uneven() -> Any:
            return tf.repeat(replica_number(), tf.cast(replica_number(), tf.int32))

        result = tf.function(lambda: strategy.reduce("SUM", strategy.run(uneven), axis=0))()
        expect_equal("the sum of r rows of each replica", float(result), squares)
        result = tf.function(lambda: strategy.reduce("MEAN", strategy.run(uneven), axis=0))()
        off = abs(float(result) - squares / total)
        expect_equal("the mean of r rows of each replica, right", off < 1e-5, True)

    def test_gather(self) -> None:
        """`gather` joins the values of all replicas along an axis, in their order."""
        strategy, count = self.under_test(), self.replicas()
        each = [float(r) for r in range(1, count + 1)]
        even = strategy.run(lambda: tf.fill([2, 2], replica_number()))
        joined = strategy.gather(even, axis=1).numpy().tolist()
        expect_equal("gather, axis 1", joined, [[r for r in each for _ in range(2)]] * 2)
        uneven = strategy.run(
            lambda: tf.repeat(replica_number(), tf.cast(replica_number(), tf.int32))
        )
        joined = strategy.gather(uneven, axis=0).numpy().tolist()
        expect_equal("gather, axis 0", joined, [r for r in each for _ in range(int(r))])

    def test_local_results(self) -> None:
        """A value for each replica; what is none of the strategy's stays one."""
        strategy, count = self.under_test(), self.replicas()
        parts = strategy.experimental_local_results(strategy.run(replica_number))
        expect_equal("the type of local results", type(parts), tuple)
        expect_equal("their values", [float(part) for part in parts], list(range(1, count + 1)))
        expect_equal("local results of 5", strategy.experimental_local_results(5), (5,))

    def test_values_from_a_function(self) -> None:
        """`experimental_distribute_values_from_function`: a value for each replica, for `run`."""
        strategy, count = self.under_test(), self.replicas()
        made = strategy.experimental_distribute_values_from_function(
            lambda own: tf.constant(10.0 * own.replica_id_in_sync_group + own.num_replicas_in_sync)
        )
        right = [10.0 * number + count for number in range(count)]
        expect_equal("values of the function", local_values(strategy, made), right)
        same = strategy.experimental_distribute_values_from_function(lambda own: 7)
        expect_equal("the same number for all", local_values(strategy, same), [7] * count)
        for mode in RUN_MODES:
            added = local_values(
                strategy, run(strategy, lambda x: x + replica_number(), mode, made)
            )
            wanted = [value + r for r, value in enumerate(right, 1)]
            expect_equal(f"values given to run, {mode}", added, wanted)
