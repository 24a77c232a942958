"""What users call on a strategy, on the template as it stands: sums that only N replicas give."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from template_cases import numbers, replica, run

import tfdist_ext as tfd
from tfdist_ext.strategies import StrategyTemplate

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
WAYS = ["eager", "tf.function around", "tf.function within"]


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> StrategyTemplate:
    return StrategyTemplate(3)


def variable(strategy: Any, value: Any, aggregation: str = "NONE", **options: Any) -> Any:
    with strategy.scope():
        return tf.Variable(value, aggregation=tf.VariableAggregation[aggregation], **options)


def of_copies(strategy: Any, variable: Any) -> list[Any]:
    return [one.numpy().tolist() for one in strategy.copies(variable)]


def test_it_is_a_strategy_of_tensorflow(strategy: StrategyTemplate) -> None:
    assert isinstance(strategy, tf.distribute.Strategy)
    assert isinstance(strategy.extended, tf.distribute.StrategyExtended)
    assert strategy.num_replicas_in_sync == 3
    assert strategy.devices == ("CPU:0", "CPU:1", "CPU:2")
    with strategy.scope() as entered:
        assert entered is strategy
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
    assert not tf.distribute.has_strategy()
    text = tfd.explain(strategy)
    assert "replicas     3 in sync" in text
    assert "devices      CPU:0, CPU:1, CPU:2" in text


@pytest.mark.parametrize("how", WAYS)
def test_run_on_each_device(strategy: StrategyTemplate, how: str) -> None:
    def step(x: Any) -> Any:
        own = tf.distribute.get_replica_context()
        assert own.num_replicas_in_sync == 3
        return {"x": x * replica()}

    result = run(strategy, step, how, tf.constant(2.0))
    assert numbers(strategy, result["x"]) == [2, 4, 6]
    devices = [part.device[-5:] for part in strategy.experimental_local_results(result["x"])]
    if how == "eager":
        assert devices == ["CPU:0", "CPU:1", "CPU:2"]


@pytest.mark.parametrize("how", WAYS)
def test_all_reduce_all_gather_and_merge_call(strategy: StrategyTemplate, how: str) -> None:
    def largest(strategy: Any, value: Any) -> Any:
        return tf.reduce_max(tf.stack(strategy.experimental_local_results(value)))

    def step() -> Any:
        own = tf.distribute.get_replica_context()
        mine = replica()
        rows = tf.repeat(mine, tf.cast(mine, tf.int32))  # of another length on each replica
        return (
            own.all_reduce("SUM", mine),
            own.all_reduce(MEAN, {"a": mine, "b": [2 * mine]}),
            own.all_gather(rows, axis=0),
            own.merge_call(largest, args=(mine,)),
        )

    total, mean, gathered, most = run(strategy, step, how)
    assert numbers(strategy, total) == [6, 6, 6]
    assert numbers(strategy, mean["a"]) == [2, 2, 2]
    assert numbers(strategy, mean["b"][0]) == [4, 4, 4]
    assert numbers(strategy, gathered) == [[1, 2, 2, 3, 3, 3]] * 3
    most = strategy.experimental_local_results(most)
    assert [float(part) for part in most] == [3] * len(most)


def test_gradients_of_all_reduce(strategy: StrategyTemplate) -> None:
    def step() -> Any:
        x = replica()
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.distribute.get_replica_context().all_reduce("SUM", x) * replica()
        return tape.gradient(total, x)

    assert numbers(strategy, run(strategy, step, "tf.function around")) == [6, 6, 6]


def test_slices_are_added(strategy: StrategyTemplate) -> None:
    def step() -> Any:
        row = tf.cast(replica(), tf.int64)
        slices = tf.IndexedSlices(tf.reshape(replica(), [1, 1]), row[None] // 2, (4, 1))
        total = tf.distribute.get_replica_context().all_reduce("SUM", slices)
        return tf.convert_to_tensor(total)

    total = run(strategy, step, "tf.function around")
    assert numbers(strategy, total) == [[[1], [5], [0], [0]]] * 3


def test_a_tensor_from_outside_counts_on_each_replica(strategy: StrategyTemplate) -> None:
    """Under MirroredStrategy the sum of it over three replicas is 2, or an error."""
    two = tf.constant(2.0)
    total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", two))
    assert numbers(strategy, total) == [6, 6, 6]


def test_reduce_and_gather_outside_of_replicas(strategy: StrategyTemplate) -> None:
    rows = strategy.run(lambda: tf.fill([2, 2], replica()))
    assert float(strategy.reduce("SUM", strategy.run(replica), axis=None)) == 6
    assert float(strategy.reduce("MEAN", strategy.run(replica), axis=None)) == 2
    assert strategy.reduce("SUM", rows, axis=0).numpy().tolist() == [12, 12]
    assert strategy.reduce("MEAN", rows, axis=0).numpy().tolist() == [2, 2]
    assert strategy.gather(rows, axis=1).numpy().tolist() == [[1, 1, 2, 2, 3, 3]] * 2
    within = tf.function(lambda: strategy.reduce("SUM", strategy.run(replica), axis=None))
    assert float(within()) == 6


def test_values_from_a_function(strategy: StrategyTemplate) -> None:
    values = strategy.experimental_distribute_values_from_function(
        lambda own: tf.constant(10 * own.replica_id_in_sync_group + own.num_replicas_in_sync)
    )
    assert numbers(strategy, values) == [3, 13, 23]
    assert numbers(strategy, strategy.run(lambda x: x + 1, args=(values,))) == [4, 14, 24]
    same = strategy.experimental_distribute_values_from_function(lambda own: 7)
    assert strategy.experimental_local_results(same) == (7, 7, 7)
    assert strategy.experimental_local_results(5) == (5,)


def test_a_variable_has_an_equal_copy_on_each_device(strategy: StrategyTemplate) -> None:
    made = variable(strategy, lambda: tf.random.normal([4]), name="mine")
    one, *others = of_copies(strategy, made)
    assert others == [one, one]
    assert [c.device[-5:] for c in strategy.copies(made)] == ["CPU:0", "CPU:1", "CPU:2"]
    assert [c.name for c in strategy.copies(made)][:2] == ["mine:0", "mine/replica_1:0"]
    assert strategy.extended.variable_created_in_scope(made)
    assert not strategy.extended.variable_created_in_scope(tf.Variable(1.0))
    assert strategy.extended.value_container(strategy.copies(made)[2]) is made
    with strategy.scope():
        other = copy.deepcopy(made)
    made.assign([0, 0, 0, 0])
    assert of_copies(strategy, other) == [one, one, one]


@pytest.mark.parametrize("how", WAYS[:2])
@pytest.mark.parametrize(
    ("aggregation", "after"), [("SUM", 6.0), ("MEAN", 2.0), ("ONLY_FIRST_REPLICA", 1.0)]
)
def test_assignments_in_replicas_are_aggregated(
    strategy: StrategyTemplate, aggregation: str, after: float, how: str
) -> None:
    made = variable(strategy, 10.0, aggregation)

    def step() -> Any:
        made.assign(replica())
        made.assign_add(replica())
        return made.read_value()

    assert numbers(strategy, run(strategy, step, how)) == [2 * after] * 3
    assert of_copies(strategy, made) == [2 * after] * 3


def test_assignments_outside_of_replicas(strategy: StrategyTemplate) -> None:
    made = variable(strategy, [1.0, 2.0])
    made.assign([3.0, 4.0])
    made.assign_sub([1.0, 1.0])
    with strategy.scope():
        made.assign_add([0.5, 0.5])
        made.scatter_add(tf.IndexedSlices([1.0], [1]))
    assert of_copies(strategy, made) == [[2.5, 4.5]] * 3
    assert (made + 1).numpy().tolist() == [3.5, 5.5]
    assert made[1].numpy() == made.value().numpy()[1] == np.array(made)[1] == 4.5


def test_metrics_have_a_value_for_each_replica(strategy: StrategyTemplate) -> None:
    counter = variable(
        strategy, 0.0, "SUM", synchronization=tf.VariableSynchronization.ON_READ, trainable=False
    )
    run(strategy, lambda: counter.assign_add(replica()), "tf.function around")
    assert of_copies(strategy, counter) == [1, 2, 3]
    assert counter.numpy() == 6
    counter.assign(3.0)
    assert of_copies(strategy, counter) == [1, 1, 1]


def test_variables_made_in_a_function_or_in_replicas(strategy: StrategyTemplate) -> None:
    made: list[Any] = []

    @tf.function
    def in_function() -> Any:
        if not made:
            made.append(tf.Variable(lambda: tf.fill([2], 3.0)))
            made.append(tf.Variable(1.0))
        return made[0] + made[1]

    with strategy.scope():
        assert in_function().numpy().tolist() == [4, 4]
    assert of_copies(strategy, made[0]) == [[3, 3]] * 3

    def step() -> Any:
        if len(made) < 3:
            made.append(tf.Variable(5.0))
        return made[2] * replica()

    assert numbers(strategy, strategy.run(step)) == [5, 10, 15]
    assert of_copies(strategy, made[2]) == [5, 5, 5]


def test_variables_whose_shape_is_not_known(strategy: StrategyTemplate) -> None:
    made = variable(strategy, [1.0, 2.0], shape=tf.TensorShape([None]))
    made.assign([1.0, 2.0, 3.0])
    assert of_copies(strategy, made) == [[1, 2, 3]] * 3


def test_extended_update_goes_to_each_copy(strategy: StrategyTemplate) -> None:
    made, other = variable(strategy, 1.0), variable(strategy, 10.0)
    with strategy.scope():
        reduced = strategy.extended.reduce_to("SUM", strategy.run(replica), destinations=made)

        def add(v: Any, value: Any, *, times: float) -> Any:
            return v.assign_add(times * value + other)

        done = strategy.extended.update(made, add, args=(reduced,), kwargs={"times": 2.0})
        assert numbers(strategy, done) == [23, 23, 23]
        listed = strategy.extended.update(made, lambda v: v.assign(0), group=False)
        assert len(listed) == 3
    assert of_copies(strategy, made) == [0, 0, 0]

    def step() -> None:
        strategy.extended.update(made, lambda v, x: v.assign(x), args=(replica(),))

    strategy.run(step)  # each replica's own value: "dangerously out of synchronization"
    assert of_copies(strategy, made) == [1, 2, 3]


def test_reductions_to_a_place(strategy: StrategyTemplate) -> None:
    made = variable(strategy, 0.0)
    with strategy.scope():
        values = strategy.run(replica)
        here = strategy.extended.reduce_to(MEAN, values, destinations="CPU:3")
        assert float(here) == 2
        assert here.device.endswith("CPU:3")
        first, second = strategy.extended.batch_reduce_to(
            SUM, [(values, "CPU:1"), (strategy.run(lambda: 2 * replica()), made)]
        )
        assert (float(first), first.device[-5:]) == (6, "CPU:1")
        assert numbers(strategy, second) == [12, 12, 12]
        assert numbers(strategy, strategy.extended.reduce_to(MEAN, second, made)) == [12, 12, 12]
        with pytest.raises(tfd.StrategyError, match="a sum over replicas of what is the same"):
            strategy.extended.reduce_to(SUM, second, made)
        assert int(strategy.reduce("SUM", strategy.run(lambda: tf.constant([1, 2])), 0)) == 9


def test_colocated_variables(strategy: StrategyTemplate) -> None:
    made = variable(strategy, [1.0, 2.0])
    with strategy.scope(), strategy.extended.colocate_vars_with(made):
        slot = tf.Variable(tf.zeros_like(made))
    assert [c.device for c in strategy.copies(slot)] == [c.device for c in strategy.copies(made)]
    with pytest.raises(ValueError, match="created in this"), strategy.scope():
        strategy.extended.colocate_vars_with(tf.distribute.get_strategy)
    stranger = variable(StrategyTemplate(2), 1.0)
    with pytest.raises(ValueError, match="created in this"), strategy.scope():
        strategy.extended.colocate_vars_with(stranger)


# TensorFlow says so of each distributed dataset that a tf.function goes through.
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options")
@pytest.mark.parametrize("fetch", [True, False])
def test_a_dataset_is_cut_for_the_replicas(strategy: StrategyTemplate, fetch: bool) -> None:
    options = tf.distribute.InputOptions(experimental_fetch_to_device=fetch)
    dataset = tf.data.Dataset.range(11).batch(6)
    distributed = strategy.experimental_distribute_dataset(dataset, options)
    parts = [numbers(strategy, batch) for batch in distributed]
    assert parts == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10]]]

    @tf.function
    def total(data: Any) -> Any:
        result = tf.constant(0, tf.int64)
        for batch in data:
            each = strategy.run(tf.reduce_sum, args=(batch,))
            result += strategy.reduce("SUM", each, axis=None)
        return result

    assert int(total(distributed)) == 55
    mode = tf.distribute.InputReplicationMode.PER_REPLICA
    options = tf.distribute.InputOptions(experimental_replication_mode=mode)
    with pytest.raises(NotImplementedError, match="is for distribute_datasets_from_function"):
        strategy.experimental_distribute_dataset(dataset, options)


def test_datasets_from_a_function(strategy: StrategyTemplate) -> None:
    seen = []

    def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
        seen.append((context.input_pipeline_id, context.num_input_pipelines))
        assert context.num_replicas_in_sync == 3
        size = context.get_per_replica_batch_size(6)
        dataset = tf.data.Dataset.range(12)
        shard = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return shard.batch(size)

    one = strategy.distribute_datasets_from_function(pipeline)
    assert next(numbers(strategy, batch) for batch in one) == [[0, 1], [2, 3], [4, 5]]
    assert seen == [(0, 1)]
    for on_device in (False, True):
        options = tf.distribute.InputOptions(
            experimental_fetch_to_device=False,
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
            experimental_place_dataset_on_device=on_device,
        )
        each = strategy.distribute_datasets_from_function(pipeline, options)
        batches = [numbers(strategy, batch) for batch in each]
        assert batches == [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 10], [8, 11]]]


def test_one_replica() -> None:
    alone = StrategyTemplate("CPU:2")
    made = variable(alone, 1.0, "SUM")

    def step() -> Any:
        made.assign_add(replica())
        own = tf.distribute.get_replica_context()
        return own.all_reduce("SUM", made), own.all_gather(tf.ones([2]), 0)

    total, gathered = run(alone, step, "tf.function around")
    assert (float(total), gathered.numpy().tolist()) == (2, [1, 1])
    assert made.values[0].device.endswith("CPU:2")
    assert float(alone.reduce("SUM", total, axis=None)) == 2
    dataset = alone.experimental_distribute_dataset(tf.data.Dataset.range(3).batch(3))
    assert [batch.numpy().tolist() for batch in dataset] == [[0, 1, 2]]


def test_errors_of_steps_arrive(strategy: StrategyTemplate) -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(fails)

    def unequal() -> None:
        if int(tf.get_static_value(replica())) > 1:
            tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))

    with pytest.raises(RuntimeError, match="a different number of"):
        strategy.run(unequal)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["CPU:0", "CPU:7"], "StrategyTemplate: there is no CPU:7; devices seen are CPU:0, CPU:1"),
        (["CPU:1", "/cpu:1"], "StrategyTemplate: the device CPU:1 is named twice"),
        (9, "StrategyTemplate: devices=9 was asked for"),
        ([], r"StrategyTemplate: devices takes names or a number of devices; \[\] arrived"),
        ("everywhere", "'everywhere' is no name of a device"),
    ],
)
def test_devices_that_cannot_be(devices: Any, message: str) -> None:
    with pytest.raises(tfd.StrategyError, match=message):
        StrategyTemplate(devices)
