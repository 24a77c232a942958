"""The example central_storage: weights once; loss, metrics and weights as on one device."""

from __future__ import annotations

from typing import Any

import central_storage as example
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd


def central() -> Any:
    """Replicas on three devices, variables on a fourth."""
    computing = ["CPU:0", "CPU:1", "CPU:2"]
    return tfd.create_strategy("central_storage", devices=computing, parameter_device="CPU:3")


@pytest.fixture(scope="module")
def one_device() -> tuple[Any, dict[str, list[float]]]:
    """By Keras alone."""
    model = example.build()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    accuracy = keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)
    model.compile(example.optimizer(), loss, metrics=[accuracy], run_eagerly=True)
    x, y = example.data()
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
    return model, history


@pytest.mark.long("plain")
@pytest.mark.tfdist_logical_cpus(4)
@pytest.mark.parametrize("train", [example.plain, example.with_tfdist_ext])
def test_numbers_of_one_device(train: Any, one_device: Any) -> None:
    """44 rows in batches of 16 on three replicas: no batch divides evenly."""
    wanted, wanted_history = one_device
    model, history = train(central())
    for ours, theirs in zip(model.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-6)
    assert history["loss"] == pytest.approx(wanted_history["loss"], abs=1e-6)
    assert history["accuracy"] == pytest.approx(wanted_history["accuracy"], abs=1e-7)
    assert history["loss"][-1] < history["loss"][0] / 2


@pytest.mark.tfdist_logical_cpus(4)
def test_a_metric_is_wrong_where_tensorflow_makes_the_strategy() -> None:
    """The first mistake on the page. If this fails, the page and our variables may go."""
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    strategy = tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:3")
    assert type(central()) is type(strategy)
    assert counted_by_replicas(strategy) == [3.0, 12.0, 39.0, 120.0]
    assert counted_by_replicas(central()) == [3.0, 6.0, 9.0, 12.0]


def counted_by_replicas(strategy: Any) -> list[float]:
    """A metric after each of four steps in which each replica adds 1."""
    with strategy.scope():
        metric = keras.metrics.Sum()

    @tf.function
    def count() -> None:
        strategy.run(lambda: metric.update_state(1.0))

    found = []
    for _ in range(4):
        count()
        found.append(float(metric.result()))
    return found
