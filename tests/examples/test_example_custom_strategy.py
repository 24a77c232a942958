"""The example custom_strategy: data, run and reduce of a strategy of one's own, in two ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import custom_strategy as example
import numpy as np
import pytest
import tensorflow as tf

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
STRATEGIES = pytest.mark.parametrize("strategy_class", [example.InTurn, example.OneCopy])


@pytest.fixture(scope="module")
def one_device() -> Any:
    """NumPy's gradient descent on the same batches of 8, 8 and 4 rows."""
    x, y = example.data()
    weight = np.zeros(3)
    for _ in range(3):
        for start in range(0, len(x), 8):
            rows, wanted = x[start : start + 8], y[start : start + 8]
            weight -= example.RATE * 2 * rows.T @ (rows @ weight - wanted) / len(rows)
    return weight


@pytest.mark.tfdist_logical_cpus(4)
@pytest.mark.parametrize(
    "train", [example.plain, example.with_tfdist_ext, example.fit_with_tfdist_ext]
)
def test_weights_of_one_device(train: Callable[..., Any], one_device: Any) -> None:
    np.testing.assert_allclose(train(DEVICES), one_device, atol=1e-6)


@pytest.mark.tfdist_logical_cpus(4)
@STRATEGIES
def test_data_run_and_reduce(strategy_class: Any) -> None:
    strategy = strategy_class(DEVICES)
    with strategy.scope():
        variable = tf.Variable(10.0)
    assert [v.device[-5:] for v in strategy.experimental_local_results(variable)] == ["CPU:0"]

    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(8))
    parts = [strategy.experimental_local_results(batch) for batch in batches]
    assert all(len(part) == len(DEVICES) for part in parts)
    rows = [np.concatenate(part).tolist() for part in parts]
    assert rows == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]

    where = {}

    def step(rows: Any) -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        total = tf.cast(tf.reduce_sum(rows), tf.float32) + variable
        where[int(tf.get_static_value(number))] = total.device[-5:]
        return total

    @tf.function
    def sums(batch: Any) -> Any:
        by_replica = strategy.run(step, args=(batch,))
        of_rows = strategy.reduce("SUM", batch, axis=0)
        total, mean = (strategy.reduce(op, by_replica, axis=None) for op in ("SUM", "MEAN"))
        return total, mean, of_rows

    total, mean, of_rows = sums(next(iter(batches)))
    assert where == {0: "CPU:0", 1: "CPU:1", 2: "CPU:2"}
    assert (float(total), float(mean), int(of_rows)) == (58.0, pytest.approx(58 / 3), 28)
