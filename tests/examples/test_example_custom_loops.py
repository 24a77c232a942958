"""The example custom_loops: weights and each epoch's metrics are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import custom_loops as example
import keras
import numpy as np
import pytest

import tfdist_ext as tfd


def on_one_device() -> Any:
    """By Keras alone, outside of any strategy."""
    model = example.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"], run_eagerly=True)
    x, y = example.arrays()
    size = example.GLOBAL_BATCH
    logs = model.fit(x, y, batch_size=size, epochs=3, shuffle=False, verbose=0).history
    return model.get_weights(), logs


def assert_same(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for name, values in wanted[1].items():
        np.testing.assert_allclose([logs[name] for logs in found[1]], values, atol=1e-6)


@pytest.fixture(scope="module")
def one_device() -> Any:
    return on_one_device()


LOOPS = {
    "cut": example.plain,
    "sharded": lambda strategy: example.plain(strategy, example.sharded),
    "ours": example.with_tfdist_ext,
    "fit": example.fit_with_tfdist_ext,
}


@pytest.mark.long("sharded", "cut", "ours")
@pytest.mark.tfdist_logical_cpus(4)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_numbers_of_one_device(loop: Callable[..., Any], one_device: Any) -> None:
    """44 rows in batches of 16: in the last one a replica has 6 of 12 rows, or 4."""
    strategy = tfd.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
    assert_same(loop(strategy), one_device)


@pytest.mark.tfdist_cluster(worker=2)
def test_on_two_workers() -> None:
    strategy = tfd.create_strategy()
    assert strategy.num_replicas_in_sync == 2
    assert_same(example.with_tfdist_ext(strategy), on_one_device())
