"""The template and its hooks under Keras, beyond the conformance kit (tests/testing)."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from template_cases import Owned, build, train

import tfdist_ext as tfd
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.testing.conformance.replica_checks import replica_number, run

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> StrategyTemplate:
    return StrategyTemplate(3)


def variable(strategy: Any, value: Any, aggregation: str = "NONE", **options: Any) -> Any:
    with strategy.scope():
        return tf.Variable(value, aggregation=tf.VariableAggregation[aggregation], **options)


def test_one_replica() -> None:
    alone = StrategyTemplate("CPU:2")
    made = variable(alone, 1.0, "SUM")

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


def test_updates_go_through_the_hook() -> None:
    updated: list[int] = []

    class Noting(Owned):
        def update_variable(self, variable: Any, copies: Any, update: Any) -> Any:
            updated.append(id(variable))
            return super().update_variable(variable, copies, update)

    model = tfd.distribute(lambda: build("SGD"), Noting(2))
    updated.clear()
    train(model)
    inner = model.keras_model
    slots = inner.optimizer.variables[2:]  # on the owner alone, where the optimizer writes them
    written = [*inner.variables, *inner.optimizer.variables[:2], *inner.metrics_variables]
    assert all(len(model.strategy.copies(slot.value)) == 1 for slot in slots)
    assert [v.path for v in written if id(v.value) not in updated] == []
    # Set to zero first, and to what replicas counted in the end.
    assert [updated.count(id(v.value)) for v in inner.metrics_variables] == [2, 2, 2, 2]
