"""PlacedStrategy: where variables and slots are, and bad input."""

from __future__ import annotations

import pytest
import tensorflow as tf
from template_cases import devices_of

import tfdist_ext as tfd
from tfdist_ext.placement import OnDevice, Rule
from tfdist_ext.strategies import PlacedStrategy


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
