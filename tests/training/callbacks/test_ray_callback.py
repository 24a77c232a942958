"""What ReportCallback tells Ray Train, for which a stand-in takes notes here.

On a real Ray: tests/environments/test_ray.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from training_cases import mirrored

import tfdist_ext as tfd
from tfdist_ext.ray import CHECKPOINT, ReportCallback


@dataclass
class Checkpoint:
    """As that of Ray: a folder, and metadata in it."""

    path: str

    @classmethod
    def from_directory(cls, path: str) -> Checkpoint:
        return cls(path)

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        Path(self.path, "metadata.json").write_text(json.dumps(metadata))

    def get_metadata(self) -> dict[str, Any]:
        return json.loads(Path(self.path, "metadata.json").read_text())


@dataclass
class RayTrain:
    """The functions of ray.train, for one worker; what is reported is kept in a folder."""

    storage: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint | None] = field(default_factory=list)
    fails_at: int | None = None  # the epoch before whose report the worker ends
    Checkpoint = Checkpoint

    def get_context(self) -> Any:
        return SimpleNamespace(get_world_rank=lambda: 0)

    def get_checkpoint(self) -> Checkpoint | None:
        return next(filter(None, reversed(self.checkpoints)), None)

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None) -> None:
        if metrics["epoch"] == self.fails_at:
            self.fails_at = None
            raise KeyboardInterrupt
        self.metrics.append(json.loads(json.dumps(metrics)))
        kept = checkpoint and self.storage / f"checkpoint_{len(self.metrics)}"
        if checkpoint:
            Path(checkpoint.path).rename(kept)
            Path(checkpoint.path).mkdir()  # which the callback removes
        self.checkpoints.append(Checkpoint(str(kept)) if checkpoint else None)

    @property
    def epochs(self) -> list[int]:
        return [metrics["epoch"] for metrics in self.metrics]


@pytest.fixture
def ray_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayTrain:
    storage = tmp_path / "storage"
    storage.mkdir()
    train = RayTrain(storage)
    ray = ModuleType("ray")
    ray.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", train)  # type: ignore[arg-type]
    return train


def model() -> tfd.DistributedModel:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=True)
        return made

    return tfd.distribute(build, mirrored())


def fit(folder: Path | None, epochs: int = 3) -> Any:
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    data = tfd.data.from_arrays((x, x.sum(axis=1)), global_batch_size=16, seed=1)
    made = model()
    callbacks = [ReportCallback()]
    return made.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, checkpoint_dir=folder)


def test_what_was_saved_and_not_reported_is_reported_by_the_next_job(
    ray_train: RayTrain, tmp_path: Path
) -> None:
    ray_train.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "fit")
    assert ray_train.epochs == [0, 1]
    fit(tmp_path / "fit")
    assert ray_train.epochs == [0, 1, 2]
    checkpoint = ray_train.checkpoints[2]
    assert checkpoint is not None
    assert model().restore_checkpoint(Path(checkpoint.path, CHECKPOINT)).epoch == 3
    fit(tmp_path / "fit", epochs=4)  # goes on, and tells nothing twice
    assert ray_train.epochs == [0, 1, 2, 3]


def test_outside_a_worker_is_refused(ray_train: RayTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_context() -> None:
        raise RuntimeError("not initialized")

    monkeypatch.setattr(ray_train, "get_context", get_context)
    with pytest.raises(tfd.TrainingError, match="only be created in the function that a worker"):
        tfd.ray.ReportCallback()


def test_without_ray_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(tfd.TrainingError, match=r"Install ray\[train\]"):
        tfd.ray.ReportCallback()
