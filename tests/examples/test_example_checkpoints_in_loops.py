"""The example checkpoints_in_loops: gone on with by other replicas, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints_in_loops as example
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.data import Shard


def mirrored(replicas: int) -> Any:
    return tfd.create_strategy("mirrored", devices=[f"CPU:{n}" for n in range(replicas)])


def by_keras(epochs: list[tf.data.Dataset]) -> tuple[Any, list[float]]:
    """Weights and losses of one device that is not interrupted."""
    model, adam, _, _ = example.parts_of_a_loop(tfd.create_strategy("default", alone=True))
    model.compile(adam, "mse", run_eagerly=True)
    losses = [model.fit(batches, shuffle=False, verbose=0).history["loss"][0] for batches in epochs]
    return model.get_weights(), losses


def in_order(epochs: int) -> list[tf.data.Dataset]:
    return [tf.data.Dataset.from_tensor_slices(example.arrays()).batch(16)] * epochs


def assert_same(weights: Any, losses: list[float], wanted: tuple[Any, list[float]]) -> None:
    for ours, theirs in zip(weights, wanted[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    np.testing.assert_allclose(losses, wanted[1], rtol=1e-6)


@pytest.mark.tfdist_logical_cpus(4)
def test_broken_off_in_the_middle_of_a_shuffled_epoch(tmp_path: Path) -> None:
    """4 steps on two replicas, the first of the second epoch among them; 2 more on three."""
    folder = str(tmp_path)
    _, first = example.with_tfdist_ext(mirrored(2), folder, epochs=2, steps=4)
    weights, then = example.with_tfdist_ext(mirrored(3), folder, epochs=2)
    assert (len(first), len(then)) == (1, 1)
    data = tfd.data.from_arrays(example.arrays(), global_batch_size=16, seed=3)
    epochs = [data.dataset(Shard(0, 1), epoch) for epoch in (0, 1)]
    assert_same(weights, first + then, by_keras(epochs))


@pytest.mark.tfdist_cluster(worker=2)
def test_two_workers_then_one_process(tfdist_cluster: Any, tmp_path: Path) -> None:
    strategy = tfd.create_strategy()
    folder = str(tmp_path)  # each task has its own: what is in it, that task has written
    _, first = example.plain(strategy, folder, epochs=1)
    is_chief = tfdist_cluster.task.index == 0
    assert len(list(tmp_path.glob("*.index"))) == int(is_chief)
    if is_chief:
        weights, then = example.plain(tfd.create_strategy("default", alone=True), folder, epochs=2)
        assert_same(weights, first + then, by_keras(in_order(2)))
    # Nobody leaves while another one is at work.
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
