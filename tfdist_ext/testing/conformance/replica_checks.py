"""What a step and its replicas see: scope, run, collectives, reduce, gather, local values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.testing.conformance.strategy_case import (
    RUN_MODES,
    StrategyCase,
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
        strategy, each = self.under_test(), self.numbers()

        def step(x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return {"x": x * replica_number(), "count": context.num_replicas_in_sync}

        for mode in RUN_MODES:
            result = run(strategy, step, mode, tf.constant(2.0))
            self.expect_values(f"run, {mode}", result["x"], [2 * r for r in each])
            counts = set(local_values(strategy, result["count"]))
            expect_equal(f"replicas, {mode}", counts, {len(each)})
            again = run(strategy, lambda x: x + replica_number(), mode, result["x"])
            self.expect_values(f"run on its own result, {mode}", again, [3 * r for r in each])
        result = strategy.run(lambda *, x: x * replica_number(), kwargs={"x": 3.0})
        self.expect_values("run with kwargs", result, [3 * r for r in each])

    def test_step_errors_are_raised(self) -> None:
        """What a step raises is raised by `run`."""

        def fails() -> None:
            raise ZeroDivisionError

        try:
            self.under_test().run(fails)
        except ZeroDivisionError:
            return
        raise AssertionError("an exception in a step: run must raise it, got a return.")

    def test_all_reduce(self) -> None:
        """SUM and MEAN over all replicas, on each of them; of structures, too."""
        strategy, count = self.under_test(), self.replicas()
        mean = (count + 1) / 2

        def step() -> Any:
            values = {"a": replica_number(), "b": [tf.fill([2, 3], replica_number())]}
            mean = tf.distribute.ReduceOp.MEAN
            return _all_reduce("SUM", replica_number()), _all_reduce(mean, values)

        for mode in RUN_MODES:
            sums, means = run(strategy, step, mode)
            self.expect_values(f"the sum, {mode}", sums, [sum(self.numbers())] * count)
            self.expect_values(f"the mean, {mode}", means["a"], [mean] * count)
            matrix = [[mean] * 3] * 2
            self.expect_values(f"the mean of a matrix, {mode}", means["b"][0], [matrix] * count)
        for mode in RUN_MODES[:2]:
            summed = run(strategy, lambda: _all_reduce("SUM", reduction_probe()), mode)
            right = probe_sums(count)
            for kind, wanted in right.items():
                self.expect_values(f"the sum of {kind}, {mode}", summed[kind], [wanted] * count)

    def test_all_reduce_of_slices(self) -> None:
        """Slices of a table are added by their rows, as gradients of embeddings are."""
        count, each = self.replicas(), self.numbers()

        def step() -> Any:
            rows = tf.stack([0, tf.cast(replica_number(), tf.int64)])
            slices = tf.IndexedSlices(tf.fill([2, 1], replica_number()), rows, (count + 1, 1))
            return tf.convert_to_tensor(_all_reduce("SUM", slices))

        table = [[sum(each)], *([r] for r in each)]
        summed = run(self.under_test(), step, "tf.function around")
        self.expect_values("the sum of slices", summed, [table] * count)

    def test_all_reduce_of_an_outer_tensor(self) -> None:
        """A tensor from outside of the step counts once for each replica."""
        count, two = self.replicas(), tf.constant(2.0)
        result = self.under_test().run(lambda: _all_reduce("SUM", two))
        self.expect_values("the sum of 2 on each replica", result, [2 * count] * count)

    def test_all_gather(self) -> None:
        """Rows of all replicas in their order, on each of them; of unequal length, too."""

        def step() -> Any:
            return tf.distribute.get_replica_context().all_gather(_uneven_rows(), axis=0)

        right = [r for r in self.numbers() for _ in range(int(r))]
        self.expect_run("all_gather", step, [right] * self.replicas())

    def test_merge_call(self) -> None:
        """`merge_call` sees the values of all replicas at once, and answers all of them."""

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
        """`reduce` of what `run` returned, in Python and in a tf.function."""
        strategy, count = self.under_test(), self.replicas()

        def reduced() -> Any:
            number = strategy.run(replica_number)
            return [strategy.reduce(operation, number, axis=None) for operation in ("SUM", "MEAN")]

        def reduced_wide() -> Any:
            values = strategy.run(reduction_probe)
            # One at a time: not every strategy takes a structure.
            return {kind: strategy.reduce("SUM", each, axis=None) for kind, each in values.items()}

        sums = probe_sums(count)
        for where, call in {"": lambda f: f, ", in a tf.function": tf.function}.items():
            total, mean = call(reduced)()
            expect_equal(f"reduce SUM{where}", float(total), sum(self.numbers()))
            expect_equal(f"reduce MEAN{where}", float(mean), (count + 1) / 2)
            found = {kind: each.numpy().tolist() for kind, each in call(reduced_wide)().items()}
            for kind, wanted in sums.items():
                expect_equal(f"reduce SUM of {kind}{where}", found[kind], wanted)

    def test_reduce_along_an_axis(self) -> None:
        """Along an axis every row counts the same, on whichever replica it is."""
        strategy, count = self.under_test(), self.replicas()
        even = strategy.run(lambda: tf.fill([2, 2], replica_number()))
        total, squares = sum(self.numbers()), sum(r * r for r in self.numbers())
        rows = strategy.reduce("SUM", even, axis=0).numpy().tolist()
        expect_equal("the sum of 2 rows of each replica", rows, [2 * total] * 2)
        rows = strategy.reduce("MEAN", even, axis=0).numpy().tolist()
        expect_equal("the mean of 2 rows of each replica", rows, [(count + 1) / 2] * 2)
        result = tf.function(lambda: strategy.reduce("SUM", strategy.run(_uneven_rows), axis=0))()
        expect_equal("the sum of r rows of each replica", float(result), squares)
        result = tf.function(lambda: strategy.reduce("MEAN", strategy.run(_uneven_rows), axis=0))()
        off = abs(float(result) - squares / total)
        expect_equal("the mean of r rows of each replica, right", off < 1e-5, True)

    def test_gather(self) -> None:
        """`gather` joins the values of all replicas along an axis, in their order."""
        strategy, each = self.under_test(), self.numbers()
        even = strategy.run(lambda: tf.fill([2, 2], replica_number()))
        joined = strategy.gather(even, axis=1).numpy().tolist()
        expect_equal("gather, axis 1", joined, [[r for r in each for _ in range(2)]] * 2)
        joined = strategy.gather(strategy.run(_uneven_rows), axis=0).numpy().tolist()
        expect_equal("gather, axis 0", joined, [r for r in each for _ in range(int(r))])

    def test_values_from_a_function(self) -> None:
        """`experimental_distribute_values_from_function`: a value for each replica, for `run`."""
        strategy, count = self.under_test(), self.replicas()
        made = strategy.experimental_distribute_values_from_function(
            lambda own: tf.constant(10.0 * own.replica_id_in_sync_group + own.num_replicas_in_sync)
        )
        right = [11.0 * number + count + 1 for number in range(count)]
        self.expect_run("values given to run", lambda x: x + replica_number(), right, made)


def _all_reduce(operation: Any, value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce(operation, value)


def _uneven_rows() -> Any:
    """On replica r, r rows of the number r."""
    return tf.repeat(replica_number(), tf.cast(replica_number(), tf.int32))
