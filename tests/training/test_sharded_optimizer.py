"""Workers that share the optimizer: the numbers, the memory and the files of one device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from task_programs import results_of

import tfdist_ext as tfd
from tfdist_ext.placement.specs import size_text

PROGRAMS = Path(__file__).parents[1] / "programs"
sys.path.insert(0, str(PROGRAMS))

import sharded_optimizer_models as models  # noqa: E402


def build() -> keras.Model:
    return models.build(keras.optimizers.Adam(0.01))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def continued(shared: Path) -> list[np.ndarray]:
    """The weights of one device that trains, saves a checkpoint, and trains on."""
    keras.utils.set_random_seed(1)  # as the workers
    model = tfd.distribute(build, tfd.create_strategy("default"))
    model.fit(*models.data(), **models.FIT)
    model.save_checkpoint(shared / "one.ckpt")
    model.fit(*models.data(), **models.FIT)
    return [np.asarray(each) for each in model.keras_model.weights]


@pytest.fixture(scope="module")
def workers(shared: Path, continued: list[np.ndarray]) -> list[dict[str, Any]]:
    return results_of("sharded_optimizer.py", str(shared), cluster=2, timeout=600)


@pytest.mark.timeout(700)
def test_optimizers_give_the_numbers_of_one_device(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        assert "state sharded across workers" in worker["explain"]
        assert list(worker["optimizers"]) == models.KINDS
        for name, found in worker["optimizers"].items():
            assert found["weights"] < 1e-6, name
            assert found["variables"] < 5e-6, name  # some sums are above 10


def test_each_worker_has_its_part_of_the_slots(workers: list[dict[str, Any]]) -> None:
    for name in models.KINDS:
        own = [worker["optimizers"][name]["own"] for worker in workers]
        whole = workers[0]["optimizers"][name]["all"]
        of_whole = f" of {size_text(4 * whole)} here"
        for worker, elements in zip(workers, own, strict=True):
            line = f"optimizer state: {size_text(4 * elements)}{of_whole}"
            assert not whole or line in worker["optimizers"][name]["explain"]
        if name != "Adafactor":  # some of its slots do not follow the rows of a weight
            assert sum(own) == whole, name
        if name == "Adam":  # cut along rows
            assert max(own) <= whole * (1 / len(workers) + 0.05), name


def test_steps_of_the_users_own_and_eager_steps(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        assert worker["own step"] < 1e-6
        assert worker["eager"] < 1e-6


def test_an_optimizer_of_the_users_own(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        assert worker["own optimizer"] < 1e-6
        assert any("OfOneWeight is an optimizer of your own" in w for w in worker["warned of own"])
        first, again = worker["refused"]
        assert "has a variable 'of_all_weights/seen' for all weights" in first
        assert again == first


def test_files_hold_whole_slots(
    workers: list[dict[str, Any]], shared: Path, continued: list[np.ndarray]
) -> None:
    for worker in workers:
        assert worker["warned"] == []
        assert worker["loaded"] < 1e-6
        assert worker["load_weights"] < 1e-6
        assert worker["restored step"] == 8  # of one device
        for ours, theirs in zip(worker["continued"], continued, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    alone = tfd.distribute(build, tfd.create_strategy("default"))
    alone.restore_checkpoint(shared / "two.ckpt")  # of two workers
    alone.fit(*models.data(), **models.FIT)
    for ours, theirs in zip(alone.keras_model.weights, continued, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_trained_model_brings_the_slots_of_the_chief(workers: list[dict[str, Any]]) -> None:
    chief, other = workers
    assert chief["own"] != other["own"]
    for worker in workers:
        np.testing.assert_allclose(worker["adopted"], chief["own"], rtol=1e-6)


def test_callbacks_that_need_the_whole_optimizer(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        assert "SwapEMAWeights needs the whole state" in worker["swap"]
        assert worker["checkpoint"] is None
    assert any("without the state of the optimizer" in w for w in workers[0]["warned_by_callback"])


def test_verify_compares_whole_slots(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        assert "optimizer Adam" not in worker["verified"]
        assert "equal" in worker["verified"]
