"""PlacedStrategy: where variables and slots are, bad input, and the numbers of one device."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from template_cases import DATA, LABELS, ROWS, build, devices_of, train

import tfdist_ext as tfd
from tfdist_ext.placement import OnDevice, Rule
from tfdist_ext.placement.live.creating import is_partitioned
from tfdist_ext.strategies import PlacedStrategy
from tfdist_ext.testing import assert_same_on_all_replicas, assert_trains_like_one_device


def test_where_variables_and_their_slots_are() -> None:
    rules = {"table": "device CPU:3", "kernel_.": "owned", "bias": "mirrored"}
    strategy = PlacedStrategy(["CPU:1", "CPU:3"], rules)
    with strategy.scope():
        made = {
            name: tf.Variable(tf.zeros([4]), name=name)
            for name in ("table", "kernel_a", "kernel_b", "bias")
        }
        slots = {}
        for name, variable in made.items():
            with strategy.extended.colocate_vars_with(variable):
                slots[name] = tf.Variable(tf.zeros([4]), name="slot")
    both = ["CPU:1", "CPU:3"]
    assert devices_of(strategy, made["table"]) == devices_of(strategy, slots["table"]) == ["CPU:3"]
    assert devices_of(strategy, made["bias"]) == devices_of(strategy, slots["bias"]) == both
    for name, owner in (("kernel_a", 0), ("kernel_b", 1)):
        assert devices_of(strategy, made[name]) == both
        assert devices_of(strategy, slots[name]) == [both[owner]]
        assert strategy.owner(made[name]) == owner


def test_rules_and_devices_that_cannot_be_are_refused() -> None:
    """Others: test_factory.py and tests/placement/test_placer.py."""
    with pytest.raises(tfd.StrategyError, match="devices of PlacedStrategy do not exist: CPU:9"):
        PlacedStrategy(["CPU:0", "CPU:9"])
    with pytest.raises(tfd.StrategyError, match="PlacedStrategy: 'k' cannot be on device GPU:0"):
        PlacedStrategy(["CPU:1"], [Rule("k", OnDevice("GPU:0"))])


def test_create_strategy_makes_it_by_name() -> None:
    strategy = tfd.create_strategy("placed", devices=2, placement={"table": "device CPU:0"})
    assert type(strategy) is PlacedStrategy
    assert strategy.devices == ("CPU:0", "CPU:1")
    assert "strategy     placed (PlacedStrategy)" in str(tfd.explain(strategy))
    rules = [Rule("table", OnDevice("CPU:0"))]
    assert len(tfd.create_strategy("placed", placement=rules, owned_from=1).devices) == 4


RULES = {
    "sharded": {
        "table/.*": "sharded(3)",
        ".*kernel": "sharded(2)",
        "hidden/bias": "sharded",
        "norm/.*": "sharded(2)",
    },
    "mixed": {
        "table/.*": "device CPU:0",
        "hidden/kernel": "sharded(2)",
        "head/kernel": "owned",
        ".*bias": "mirrored",
    },
}


@pytest.mark.parametrize(
    ("optimizer", "rules", "replicas"),
    [("AdamW, clipped, EMA", "sharded", 3), ("loss scaling", "mixed", 2)],
)
def test_trained_as_on_one_device(optimizer: str, rules: str, replicas: int) -> None:
    """Other rules: tests/exactness."""
    strategy = PlacedStrategy(replicas, RULES[rules])
    fit = {"batch_size": 12, "epochs": 2, "validation_data": (DATA, LABELS)}
    assert_trains_like_one_device(lambda: build(optimizer), (DATA, LABELS), strategy, **fit)


def test_in_eager_steps() -> None:
    rules = {"table/.*": "sharded", "hidden/kernel": "sharded(2)"}
    strategy = PlacedStrategy(2, rules, owned_from=64)
    eager = functools.partial(build, "SGD", run_eagerly=True)
    assert_trains_like_one_device(eager, (DATA, LABELS), strategy, batch_size=12)


def test_slots_are_with_the_owner_alone_and_balanced() -> None:
    def equal_layers() -> keras.Model:
        layers = [keras.layers.Dense(16, use_bias=False) for _ in range(8)]
        model = keras.Sequential([keras.Input([16]), *layers])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    strategy = PlacedStrategy(4, owned_from=1)
    model = tfd.distribute(equal_layers, strategy).keras_model
    assert strategy.placement_plan is not None
    held = dict.fromkeys(strategy.devices, 0)
    optimizer = model.optimizer
    for variable, *slots in zip(
        model.trainable_variables, optimizer._momentums, optimizer._velocities, strict=True
    ):
        owner = strategy.devices[strategy.owner(variable.value)]
        assert strategy.placement_plan.owner_of(variable.path) == strategy.owner(variable.value)
        for slot in slots:
            (copy,) = strategy.copies(slot.value)
            assert copy.device.endswith(owner)
            held[owner] += copy.shape.num_elements() * 4
    assert list(held.values()) == [2 * 2 * 16 * 16 * 4] * 4


def test_gradients_go_to_the_owner_alone() -> None:
    asked: list[tuple[list[int], list[str]]] = []

    class Noting(PlacedStrategy):
        def reduce_values(self, op: Any, values: Any, devices: Any, what: Any) -> Any:
            asked.append((values[0].shape.as_list(), [name[-5:] for name in devices]))
            return super().reduce_values(op, values, devices, what)

    strategy = Noting(3, {"hidden/kernel": "owned", "table/.*": "device CPU:2"})
    model = tfd.distribute(lambda: build("SGD"), strategy)
    asked.clear()
    train(model)
    owner = strategy.devices[strategy.owner(model.keras_model.get_layer("hidden").kernel.value)]
    assert {tuple(devices) for shape, devices in asked if shape == [17, 8]} == {(owner,)}
    assert {tuple(devices) for shape, devices in asked if shape == [12, 4]} == {("CPU:2",)}
    for variable in [*model.weights, *model.optimizer.variables]:
        assert_same_on_all_replicas(variable, strategy=strategy)


def test_an_existing_model_and_a_rule_that_matches_nothing() -> None:
    original = build("SGD")
    rules = {"hidden/kernel": "owned", "table/.*": "sharded"}
    model = tfd.distribute(original, PlacedStrategy(2, rules))
    plan = model.strategy.placement_plan
    assert plan is not None
    assert plan.owner_of("hidden/kernel") is not None
    for ours, theirs in zip(model.keras_model.weights, original.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    with pytest.raises(tfd.PlacementError, match=r"hiden/kernel.* matches no variable"):
        tfd.distribute(build, PlacedStrategy(2, {"hiden/kernel": "owned"}))


def test_a_model_that_is_built_by_its_data() -> None:
    """Its variables are not known before, and are owned or cut as they come."""

    def unbuilt() -> keras.Model:
        keras.utils.set_random_seed(1)
        hidden, output = keras.layers.Dense(4, name="dense"), keras.layers.Dense(1, name="output")
        model = keras.Sequential([hidden, output])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    strategy = PlacedStrategy(2, {".*dense/kernel": "sharded"}, owned_from=1)
    model = tfd.distribute(unbuilt, strategy)
    model.fit(ROWS, LABELS, batch_size=12, verbose=0)
    assert model.strategy.placement_plan is None
    assert {model.strategy.owner(v.value) for v in model.keras_model.weights} == {0, 1}
    assert is_partitioned(model.keras_model.layers[0].kernel.value)
