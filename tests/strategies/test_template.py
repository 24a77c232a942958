"""The template: each hook is asked where its decision counts, and its answer is checked.

Beyond the conformance kit (tests/testing).
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import template_cases
import tensorflow as tf
from template_cases import ON_DEVICE, Owned, Pairwise, Shared, devices_of, values_of

import tfdist_ext as tfd
from tfdist_ext.strategies import Reduced, StrategyTemplate
from tfdist_ext.testing.conformance.replica_checks import local_values, replica_number, run


def test_one_replica_sums_and_gathers_its_own_values() -> None:
    alone = StrategyTemplate("CPU:2")
    with alone.scope():
        made = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    def step() -> Any:
        made.assign_add(replica_number())
        own = tf.distribute.get_replica_context()
        return own.all_reduce("SUM", made), own.all_gather(tf.ones([2]), 0)

    total, gathered = run(alone, step, "tf.function around")
    assert (float(total), gathered.numpy().tolist()) == (2, [1, 1])
    assert made.values[0].device.endswith("CPU:2")
    assert float(alone.reduce("SUM", total, axis=None)) == 2
    dataset = alone.experimental_distribute_dataset(tf.data.Dataset.range(3).batch(3))
    assert [batch.numpy().tolist() for batch in dataset] == [[0, 1, 2]]


def test_create_variable_decides_the_devices_of_variables_and_slots() -> None:
    asked: list[Any] = []

    class Noting(StrategyTemplate):
        def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
            asked.append((spec, beside))
            if spec.path == "large":
                return create(["CPU:3"])
            return super().create_variable(spec, create, beside)

    strategy = Noting(2)
    with strategy.scope():
        large = tf.Variable(tf.zeros([8, 4]), name="large", trainable=False)
        small = tf.Variable(lambda: np.float64([1.0]), name="small")
        tf.Variable(0, name="metric", synchronization=tf.VariableSynchronization.ON_READ)
        with strategy.extended.colocate_vars_with(large):
            slot = tf.Variable(tf.zeros([8, 4]), name="slot")
    assert devices_of(strategy, large) == ["CPU:3"]
    assert devices_of(strategy, slot) == ["CPU:3"]
    assert devices_of(strategy, small) == ["CPU:0", "CPU:1"]
    assert [spec.path for spec, _ in asked] == ["large", "small", "slot"]
    assert [spec.bytes for spec, _ in asked] == [128, 8, 128]
    assert [spec.trainable for spec, _ in asked] == [False, True, True]
    assert [spec.dtype for spec, _ in asked] == ["float32", "float64", "float32"]
    assert [beside for _, beside in asked] == [None, None, large]


def test_a_shared_variable_is_written_once() -> None:
    strategy = Shared(3)
    with strategy.scope():
        total = tf.Variable(10.0, aggregation=tf.VariableAggregation.SUM)
        mean = tf.Variable(10.0, aggregation=tf.VariableAggregation.MEAN)

    def step() -> Any:
        total.assign_add(replica_number())
        mean.assign_sub(replica_number())
        return total * replica_number()

    assert local_values(strategy, run(strategy, step, "tf.function around")) == [16, 32, 48]
    assert values_of(strategy, total) == [16]
    assert values_of(strategy, mean) == [8]
    total.assign(1.0)
    assert (total + 1).numpy() == 2
    with strategy.scope():
        done = strategy.extended.update(total, lambda v, x: v.assign_add(x), args=(4.0,))
    assert float(done) == 5
    assert strategy.extended.value_container(strategy.copies(total)[0]) is total


def test_update_variable_decides_which_copy_is_computed() -> None:
    asked: list[Any] = []

    class Noting(Owned):
        def update_variable(self, variable: Any, copies: Any, update: Any) -> Any:
            asked.append((variable, len(copies)))
            return super().update_variable(variable, copies, update)

    strategy = Noting(3)
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    computed: list[str] = []

    def double(copy: Any, value: Any) -> Any:
        computed.append(copy.device.removeprefix(ON_DEVICE))
        return copy.assign(2 * copy + value)

    def step() -> None:
        variable.assign_add(replica_number())
        strategy.extended.update(variable, double, args=(10 * replica_number(),))

    run(strategy, step, "tf.function around")
    assert values_of(strategy, variable) == [34, 34, 34]  # 2 * (1 + 6) + 20, as the second has it
    assert computed == ["CPU:1"]
    assert asked == [(variable, 3)] * 2
    variable.assign(5.0)
    assert values_of(strategy, variable) == [5, 5, 5]


def test_all_that_a_training_writes_goes_through_update_variable() -> None:
    updated: list[int] = []

    class Noting(Owned):
        def update_variable(self, variable: Any, copies: Any, update: Any) -> Any:
            updated.append(id(variable))
            return super().update_variable(variable, copies, update)

    model = tfd.distribute(lambda: template_cases.build("SGD"), Noting(2))
    updated.clear()
    template_cases.train(model)
    inner = model.keras_model
    slots = inner.optimizer.variables[2:]  # on the owner alone, where the optimizer writes them
    written = [*inner.variables, *inner.optimizer.variables[:2], *inner.metrics_variables]
    assert all(len(model.strategy.copies(slot.value)) == 1 for slot in slots)
    assert [v.path for v in written if id(v.value) not in updated] == []
    # Set to zero first, and to what replicas counted in the end.
    assert [updated.count(id(v.value)) for v in inner.metrics_variables] == [2, 2, 2, 2]


def test_reduce_values_gets_every_sum_and_mean() -> None:
    strategy = Pairwise(4)
    with strategy.scope():
        variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def step() -> Any:
        variable.assign(replica_number())
        return tf.distribute.get_replica_context().all_reduce(
            "SUM", [replica_number(), 2 * replica_number()]
        )

    one, two = run(strategy, step, "tf.function around")
    assert local_values(strategy, one) == [10, 10, 10, 10]
    assert local_values(strategy, two) == [20, 20, 20, 20]
    assert float(strategy.reduce("MEAN", strategy.run(replica_number), axis=None)) == 2.5
    assert values_of(strategy, variable) == [2.5] * 4
    everywhere = tuple(f"{ON_DEVICE}CPU:{number}" for number in range(4))
    total, mean = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
    assert strategy.asked == [
        (mean, 4, everywhere),
        (total, 4, everywhere),
        (total, 4, everywhere),
        (mean, 4, everywhere[:1]),
    ]


class Told(StrategyTemplate):
    """Remembers what each reduction is of."""

    def __init__(self, devices: Any = None):
        self.told: list[Reduced] = []
        super().__init__(devices)

    def reduce_values(self, op: Any, values: Any, devices: Any, what: Any) -> Any:
        self.told.append(what)
        return super().reduce_values(op, values, devices, what)


class Average(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.average = self.add_weight(shape=(), trainable=False, name="average")

    def call(self, x: Any) -> Any:
        self.average.assign(0.5 * self.average + tf.reduce_mean(x))
        return x


class OwnReduction(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        tf.distribute.get_replica_context().all_reduce("SUM", tf.shape(data[0])[1])
        tfd.all_rows(data[0])
        return super().train_step(data)


def test_a_reduction_is_told_what_it_reduces() -> None:
    def build() -> keras.Model:
        layers = [
            keras.layers.Embedding(5, 3, name="table"),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(synchronized=True, name="norm"),
            Average(name="averaged"),
            keras.layers.Dense(1, name="last"),
        ]
        model = OwnReduction([keras.Input([2], dtype="int32"), *layers], name="own")
        model.compile("sgd", "mse")
        return model

    strategy = Told(2)
    model = tfd.distribute(build, strategy)
    strategy.told.clear()
    model.fit(tf.zeros([7, 2], tf.int32), tf.zeros([7, 1]), batch_size=4, verbose=0)
    paths = {kind: set() for kind in ("gradient", "metric", "statistic", "assignment", "other")}
    variables = {v.path: v.value for v in model.keras_model.variables}
    for what in strategy.told:
        paths[what.kind].add(what.path)
        assert what.variable is variables.get(what.path)
    trained = {"table/embeddings", "norm/gamma", "norm/beta", "last/kernel", "last/bias"}
    assert {path.removeprefix("own/") for path in paths["gradient"]} == trained
    assert paths["metric"] == {""}
    moving = {"norm/moving_mean", "norm/moving_variance", "averaged/average", ""}
    assert {path.removeprefix("own/") for path in paths["statistic"]} == moving
    assert paths["assignment"] == set()
    assert paths["other"] == {""}


def build() -> keras.Model:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def all_reduced(strategy: Any) -> None:
    def step() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.fill([3], replica_number()))

    tf.function(lambda: strategy.run(step), autograph=False)()


def assigned(strategy: Any) -> None:
    made = variable(strategy)
    tf.function(lambda: strategy.run(lambda: made.assign(made + replica_number())))()


def variable(strategy: Any) -> tf.Variable:
    with strategy.scope():
        return tf.Variable([1.0, 2.0], name="v", aggregation=tf.VariableAggregation.SUM)


def trained(strategy: Any) -> None:
    tfd.distribute(build, strategy).fit(tf.zeros([4, 2]), tf.zeros([4, 1]), verbose=0)


WRONG_RESULTS = [
    (
        "create_variable",
        lambda *_: None,
        variable,
        r"Wrong.create_variable must return the variable that create\(\) makes of 'v', got N",
    ),
    (
        "create_variable",
        lambda self, spec, create, beside: create(["CPU:1", "CPU:0"]),
        variable,
        r"Wrong.create_variable\('v'\): create\(\) must get one device for all replicas, or"
        r" the devices of all .* order, \['CPU:0', 'CPU:1'\], got \['CPU:1', 'CPU:0'\]",
    ),
    (
        "update_variable",
        lambda self, v, copies, update: [update(0)],
        assigned,
        r"for each copy of 'v:0', got \[",
    ),
    (
        "reduce_values",
        lambda self, op, values, devices, what: [tf.reduce_sum(values[0])] * 2,
        all_reduced,
        r"values of the shape and dtype of its arguments, such as"
        r" <tf.Tensor .*shape=\(3,\) dtype=float32>, got <tf.Tensor .*shape=\(\) dtype=float32>",
    ),
    (
        "owner",
        lambda self, variable: 2,
        trained,
        r"Wrong.owner must return the index of a device, f",
    ),
]


@pytest.mark.parametrize(("hook", "answer", "use", "message"), WRONG_RESULTS)
def test_a_wrong_result_of_a_hook_is_named(hook: str, answer: Any, use: Any, message: str) -> None:
    base = Owned if hook == "owner" else StrategyTemplate  # only with updates of its own
    wrong = type("Wrong", (base,), {hook: lambda self, *args: answer(self, *args)})
    with pytest.raises(tfd.StrategyError, match=message):
        use(wrong(2))
