"""Checkpoints and files of models on parameter servers, partitioned and not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_cases import everything
from task_programs import PROGRAMS, results_of
from training_cases import mirrored, strategy_of

import tfdist_ext as tfd

sys.path.insert(0, str(PROGRAMS))


def state(model: tfd.DistributedModel) -> dict[str, np.ndarray]:
    return {n: value for n, value in everything(model).items() if not n.startswith("metrics/")}


class Servers:
    """What the program reported, and the files it left."""

    def __init__(self, result: dict[str, Any], folder: Path, before: dict[str, np.ndarray]):
        self.result = result
        self.folder = folder
        self.before = before  # the state in the checkpoint that it was given

    def saved_state(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / name) as file:
            return dict(file)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    import tables

    folder = tmp_path_factory.mktemp("servers")
    model = tfd.distribute(tables.build, mirrored(2), synchronize_batch_norm=False)
    model.fit(*tables.data(), batch_size=tables.BATCH, verbose=0)
    model.save_checkpoint(folder / "one_device.safetensors")
    (result,) = results_of("checkpoint_servers.py", str(folder), timeout=120)
    return Servers(result, folder, state(model))


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_a_checkpoint_of_replicas_is_restored_on_two_servers(servers: Servers) -> None:
    assert servers.result["two"] == [[25, "task:0"], [25, "task:1"]]
    assert_same(servers.before, servers.saved_state("restored.npz"))
    assert int(servers.before["optimizer.Adam/iteration"]) == 6


def test_a_checkpoint_of_two_servers_is_restored_on_three_and_whole(servers: Servers) -> None:
    assert servers.result["three"] == [[17, "task:0"], [17, "task:1"], [16, "task:2"]]
    assert servers.result["differ_on_three"] == []
    assert servers.result["differ_on_whole"] == []


def test_a_checkpoint_of_servers_is_restored_on_replicas(servers: Servers) -> None:
    import tables

    model = tfd.distribute(tables.build, mirrored(4), synchronize_batch_norm=False)
    progress = model.restore_checkpoint(servers.folder / "three.safetensors")
    assert_same(servers.saved_state("three.npz"), state(model))
    assert progress.step == 6 + 2 * 6 + 6


def test_a_training_goes_on_with_another_number_of_servers(servers: Servers) -> None:
    assert servers.result["resumed_on_three"] == [[0, 1, 2, 3], 6 + 4 * 6]


def test_plain_keras_and_tensorflow_load_what_was_in_pieces(servers: Servers) -> None:
    import tables

    ids, _ = tables.data()
    plain = strategy_of("default")
    model = tfd.distribute(tables.build, plain)
    model.restore_checkpoint(servers.folder / "three.safetensors")
    expected = model.predict(ids, verbose=0)
    for name in ("model.keras", "saved.keras"):
        loaded = keras.models.load_model(servers.folder / name)
        loaded.run_eagerly = True  # to make a graph would take longer
        np.testing.assert_allclose(loaded.predict(ids, verbose=0), expected, atol=1e-6)
        assert int(loaded.optimizer.iterations.numpy()) == 6 + 2 * 6 + 6
    fresh = tables.build()
    fresh.optimizer.build(fresh.trainable_variables)  # Keras wants its slots to be there
    fresh.run_eagerly = True
    fresh.load_weights(servers.folder / "a.weights.h5")
    np.testing.assert_allclose(fresh.predict(ids, verbose=0), expected, atol=1e-6)
    exported = tf.saved_model.load(servers.folder / "exported")
    np.testing.assert_allclose(exported.serve(ids), expected, atol=1e-6)


def test_callbacks_write_once(servers: Servers) -> None:
    assert (servers.folder / "log.csv").read_text().count("\n") == 2
    assert len(list((servers.folder / "board" / "train").glob("events.out.*"))) == 1
