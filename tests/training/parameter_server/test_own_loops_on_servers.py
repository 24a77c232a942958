"""Loops of the user's own over variables in shards on parameter servers."""

from __future__ import annotations

from typing import Any

import pytest
from task_programs import results_of

TOLERANCE = 5e-7


@pytest.fixture(scope="module")
def result() -> Any:
    (found,) = results_of("own_loop_on_servers.py", timeout=240)
    return found


def test_a_tape_gives_the_gradient_of_a_variable_in_shards(result: Any) -> None:
    found = result["gradients"]
    assert len(found) == 4
    for name, (difference, rows) in found.items():
        assert difference <= TOLERANCE, name
        if name != "of a gradient":  # of a table: of its rows alone
            assert rows[0], name
        assert not any(rows[1:]), name


def test_an_optimizer_updates_each_shard_as_one_device_does(result: Any) -> None:
    """Weights and the optimizer's own variables, which are in shards as well."""
    assert len(result["trained"]) == 3
    for name, difference in result["trained"].items():
        assert difference <= TOLERANCE, name
    servers = [f"/job:ps/replica:0/task:{server}" for server in range(3)]
    assert result["updates"] == servers
    assert result["slots"] == 4  # two of Adam for each of two variables


@pytest.mark.tfdist_cluster(worker=3, ps=1)
def test_metrics_count_the_steps_of_all_workers(tfdist_cluster: Any) -> None:
    """Keras counts by `assign(self + x)`, which lost about half of the steps here."""
    import keras
    import tensorflow as tf

    import tfdist_ext as tfd

    def count() -> None:
        strategy = tfd.create_strategy()
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            mean, auc = keras.metrics.Mean(), keras.metrics.AUC(num_thresholds=3)
            weight, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.0)
            optimizer.build([weight])

        def step() -> None:
            mean.update_state([1.0, 5.0], sample_weight=[1.0, 3.0])
            auc.update_state([0.0, 1.0], [0.2, 0.7])
            optimizer.apply([tf.constant(1.0)], [weight])

        @tf.function
        def two_steps() -> None:
            for _ in tf.range(2):
                strategy.run(step)

        for _ in range(2):
            mean.reset_state()
            for _ in range(100):
                coordinator.schedule(two_steps)
            coordinator.join()
            assert [float(variable.numpy()) for variable in mean.variables] == [3200.0, 800.0]
        assert auc.true_positives.numpy().tolist() == [400.0, 400.0, 0.0]
        assert int(optimizer.iterations.numpy()) == 400

    tfd.run(count)
