"""Packages that one feature needs: nothing else needs them, and the feature names them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from task_programs import LEFT_OUT

import tfdist_ext as tfd

WITHOUT_EXTRAS = """
import sys

for name in ("cloudpickle", "google_crc32c", "matplotlib", "pytest", "ray", "tensorboard"):
    sys.modules[name] = None

import keras
import numpy as np

import tfdist_ext as tfd
from tfdist_ext import cli
from tfdist_ext.testing import StrategyConformance

x = np.arange(64.0).reshape(16, 4)


def build():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


model = tfd.distribute(build, tfd.create_strategy("mirrored", logical_cpus=2))
data = tfd.data.from_arrays((x, x[:, :1]), global_batch_size=8)
boards = [tfd.WorkerTensorBoard("logs")]
model.fit(data, verbose=0, checkpoint_dir="checkpoints", callbacks=boards)


class TestTemplate(StrategyConformance):
    def strategy(self):
        return tfd.strategies.StrategyTemplate(2)


TestTemplate().test_reduce()
assert all(getattr(tfd, name) for name in tfd.__all__)
assert all(getattr(tfd.data, name) for name in tfd.data.__all__)
cli.main(["env"])
"""


def test_training_needs_no_optional_package(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS]
    env = {**os.environ, "PYTHONPATH": LEFT_OUT}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=100)


def test_missing_package_is_named_by_its_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    message = r"needs cloudpickle, which is not installed\. Install cloudpickle\.\nHelp: "
    with pytest.raises(tfd.TfDistError, match=message):
        tfd.launch(print, workers=1)


def test_text_files_are_sharded_without_optional_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("id,name,age\n1,Ada,36\n")
    files = tfd.data.shard_files(f"{tmp_path}/*.csv", tfd.data.Shard(1, 2))
    assert files == [str(tmp_path / "b.csv")]
    (tmp_path / "c.tfrecord").write_bytes(bytes(64))
    with pytest.raises(tfd.DataError, match=r"Reading or checking records .* needs google-crc32c"):
        tfd.data.shard_files(f"{tmp_path}/c.tfrecord", tfd.data.Shard(0, 1))
