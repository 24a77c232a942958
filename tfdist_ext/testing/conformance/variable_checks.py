"""Variables of a strategy: creation, assignments, updates, checkpoints and saved models."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import tensorflow as tf

from tfdist_ext.testing.conformance.replica_checks import (
    RUN_MODES,
    StrategyCase,
    expect_equal,
    local_values,
    replica_number,
    run,
)

LARGE = [512, 512]  # 1 MiB of float32, for strategies that decide by size
MATRIX = [[1.0, 2.0], [3.0, 4.0]]  # what steps write, and checkpoints hold


class VariableChecks(StrategyCase):
    """Checks that every replica reads the values that were written."""

    def seen(self, variable: Any) -> list[Any]:
        """The value that each replica reads; [minimum, maximum] of a large one."""
        # Converted, because variables in pieces have no `read_value`.
        read = self.under_test().run(lambda: tf.convert_to_tensor(variable))
        return local_values(self.under_test(), read)

    def expect_everywhere(self, what: str, variable: Any, value: Any) -> None:
        """Raise AssertionError unless all replicas, all copies and Python read `value`."""
        expect_equal(f"{what}, read in replicas", self.seen(variable), [value] * self.replicas())
        copies = local_values(self.under_test(), variable)
        expect_equal(f"{what}, in the copies", copies, [value] * len(copies))
        self.expect_values(f"{what}, read in Python", tf.convert_to_tensor(variable), [value])

    def counter(self) -> tf.Variable:
        """Returns an int64 counter that starts at 5, like the step counter of an optimizer."""
        five = tf.constant(5, tf.int64)
        return self.variable(five, "ONLY_FIRST_REPLICA", trainable=False)

    def _metric(self) -> tf.Variable:
        """Returns a variable like the total of a metric: reading sums the replicas' values."""
        on_read = tf.VariableSynchronization.ON_READ
        return self.variable(0.0, "SUM", synchronization=on_read, trainable=False)

    def test_variables_created_in_scope(self) -> None:
        """Only a variable created in the scope belongs to the strategy."""
        strategy = self.under_test()
        variable, other = self.variable([1.0, 2.0]), tf.Variable(1.0)
        is_created_here = strategy.extended.variable_created_in_scope
        expect_equal("variable_created_in_scope, inside", is_created_here(variable), True)
        expect_equal("variable_created_in_scope, outside", is_created_here(other), False)
        self.expect_everywhere("the initial value", variable, [1.0, 2.0])

    def test_equal_initial_values(self) -> None:
        """A random initial value is drawn once, not on each replica."""
        variable = self.variable(lambda: tf.random.normal([4]))
        self.expect_everywhere("a random initial value", variable, self.seen(variable)[0])
        large = self.variable(lambda: tf.random.normal(LARGE))
        self.expect_everywhere("a random initial value of 1 MiB", large, self.seen(large)[0])

    def test_variables_created_in_a_step(self) -> None:
        """A variable created in a step or in a tf.function exists once for all replicas."""
        created: list[Any] = []

        @tf.function
        def first_call() -> Any:
            if not created:
                created.append(tf.Variable(lambda: tf.fill([2], 3.0)))
            return created[0] + 1

        def step() -> Any:
            created.append(tf.Variable(5.0))
            return created[-1] * replica_number()

        with self.under_test().scope():
            expect_equal("the function's result", first_call().numpy().tolist(), [4.0, 4.0])
        self.expect_everywhere("a variable created in a tf.function", created.pop(), [3.0, 3.0])
        right = [5 * r for r in self.numbers()]
        self.expect_values("run with a variable", self.under_test().run(step), right)
        expect_equal("number of variables", len({id(variable) for variable in created}), 1)
        self.expect_everywhere("a variable created in replicas", created[0], 5.0)

    def test_assignments_in_replicas(self) -> None:
        """Replica r assigns r: every replica reads the sum, the mean or the first value."""
        count, total = self.replicas(), sum(self.numbers())
        sums = {"SUM": total, "MEAN": total / count, "ONLY_FIRST_REPLICA": 1.0}
        for aggregation, value in sums.items():
            for mode in RUN_MODES[:2]:
                variable = self.variable(10.0, aggregation)

                def step(variable: Any = variable) -> Any:
                    variable.assign(replica_number())
                    variable.assign_add(2 * replica_number())
                    variable.assign_sub(replica_number())
                    return variable.read_value()

                what = f"assignments in replicas, aggregation {aggregation}, {mode}"
                read = run(self.under_test(), step, mode)
                self.expect_values(f"{what}, read in the step", read, [2 * value] * count)
                self.expect_everywhere(what, variable, 2 * value)
        for mode in RUN_MODES[:2]:
            steps = self.counter()
            run(self.under_test(), lambda steps=steps: steps.assign_add(1), mode)
            self.expect_everywhere(f"an int64 counter, 1 added in replicas, {mode}", steps, 6)

    def test_assignments_outside_replicas(self) -> None:
        """Assignments in Python, inside and outside the scope, write every copy."""
        variable = self.variable([1.0, 2.0])
        variable.assign([3.0, 4.0])
        variable.assign_sub([1.0, 1.0])
        with self.under_test().scope():
            variable.assign_add([0.5, 0.5])
        self.expect_everywhere("assignments outside replicas", variable, [2.5, 3.5])
        expect_equal("variable + 1", (variable + 1).numpy().tolist(), [3.5, 4.5])
        with self.under_test().scope():
            variable.scatter_add(tf.IndexedSlices([1.0], [1]))
        self.expect_everywhere("scatter_add", variable, [2.5, 4.5])
        steps = self.counter()
        steps.assign_add(2)
        self.expect_everywhere("an int64 counter, 2 added outside replicas", steps, 7)

    def test_metric_variables(self) -> None:
        """Reading a variable that is synchronized on read sums what the replicas added."""
        strategy, total, counter = self.under_test(), sum(self.numbers()), self._metric()
        run(strategy, lambda: counter.assign_add(replica_number()), "tf.function around")
        expect_equal("the sum over replicas", float(counter.numpy()), total)
        run(strategy, lambda: counter.assign_add(replica_number()), "eager")
        expect_equal("the sum after a second step", float(counter.numpy()), 2 * total)
        counter.assign(0.0)
        expect_equal("the sum after assign(0)", float(counter.numpy()), 0.0)

    def test_update(self) -> None:
        """`extended.update` applies a function to every copy, with equal results."""
        strategy, total = self.under_test(), sum(self.numbers())
        variable, other = self.variable(1.0), self.variable(10.0)

        def add(variable: Any, value: Any, *, times: float) -> Any:
            return variable.assign_add(times * value + other)

        with strategy.scope():
            reduced = strategy.extended.reduce_to(
                "SUM", strategy.run(replica_number), destinations=variable
            )
            strategy.extended.update(variable, add, args=(reduced,), kwargs={"times": 2.0})
        self.expect_everywhere("update", variable, 11 + 2 * total)
        steps, large = self.counter(), self.variable(tf.ones(LARGE))
        with strategy.scope():
            strategy.extended.update(steps, lambda v: v.assign_add(tf.constant(3, tf.int64)))
            values = strategy.run(lambda: tf.fill(LARGE, replica_number()))
            reduced = strategy.extended.reduce_to("SUM", values, destinations=large)
            strategy.extended.update(large, lambda v, x: v.assign_add(x), args=(reduced,))
        self.expect_everywhere("update of an int64 counter", steps, 8)
        self.expect_everywhere("update of 1 MiB", large, [1 + total] * 2)

    def test_update_in_replicas(self) -> None:
        """`extended.update` in a step, with values that are equal on all replicas."""
        strategy, total = self.under_test(), sum(self.numbers())
        for mode in RUN_MODES[:2]:
            variable = self.variable(1.0)

            def step(variable: Any = variable) -> None:
                summed = tf.distribute.get_replica_context().all_reduce("SUM", replica_number())
                strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(summed,))

            run(strategy, step, mode)
            self.expect_everywhere(f"update in replicas, {mode}", variable, 1 + total)

    def test_colocate_vars_with(self) -> None:
        """A variable colocated with another variable, such as a slot, is on its devices."""
        strategy = self.under_test()
        variable = self.variable([1.0, 2.0])
        with strategy.scope(), strategy.extended.colocate_vars_with(variable):
            slot = tf.Variable(tf.zeros_like(variable))
        local = strategy.experimental_local_results
        other = {copy.device for copy in local(slot)} - {copy.device for copy in local(variable)}
        expect_equal("devices of the slot, without the variable", other, set())
        self.expect_everywhere("the slot", slot, [0.0, 0.0])

    def test_checkpoint(self) -> None:
        """A `tf.train.Checkpoint` is compatible with programs without a strategy."""
        total, module, plain = sum(self.numbers()), self._written_module(), tf.Module()
        plain.matrix, plain.total = tf.Variable(tf.zeros([2, 2])), tf.Variable(0.0)
        plain.counter = tf.Variable(0.0)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(module).save(f"{folder}/of_the_strategy")
            tf.train.Checkpoint(plain).restore(path).expect_partial()
            saved = [plain.matrix.numpy().tolist(), float(plain.total), float(plain.counter)]
            expect_equal("values in the checkpoint", saved, [MATRIX, total, total])
            plain.matrix.assign([[5.0, 6.0], [7.0, 8.0]])
            plain.total.assign(9.0)
            path = tf.train.Checkpoint(plain).save(f"{folder}/of_none")
            tf.train.Checkpoint(module).restore(path).assert_existing_objects_matched()
        self.expect_everywhere("a matrix restored", module.matrix, [[5.0, 6.0], [7.0, 8.0]])
        self.expect_everywhere("a sum restored", module.total, 9.0)
        expect_equal("a metric's sum restored", float(module.counter.numpy()), total)

    def test_deferred_restore(self) -> None:
        """Variables created after a checkpoint was restored get its values."""
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(self._written_module()).save(f"{folder}/checkpoint")
            later = tf.Module()
            with self.under_test().scope():
                tf.train.Checkpoint(later).restore(path)
                later.matrix = tf.Variable(tf.zeros([2, 2]))
        self.expect_everywhere("a matrix created after restore", later.matrix, MATRIX)

    def test_saved_model(self) -> None:
        """`tf.saved_model.save` writes the values once, and loading needs no strategy."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TensorFlow and Keras
            tf.saved_model.save(self._written_module(), folder)
            loaded = tf.saved_model.load(folder)
        expect_equal("the matrix loaded", loaded.matrix.numpy().tolist(), MATRIX)

    def _written_module(self) -> Any:
        module: Any = tf.Module()
        module.matrix = self.variable(tf.zeros([2, 2]), "MEAN")
        module.total = self.variable(0.0, "SUM")
        module.counter = self._metric()

        def step() -> None:
            module.matrix.assign(MATRIX)
            module.total.assign(replica_number())
            module.counter.assign_add(replica_number())

        self.under_test().run(step)
        return module
