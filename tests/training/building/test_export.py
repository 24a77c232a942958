"""Exports from every strategy: fresh processes load them, and predict the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, compiled, mirrored, stack

import tfdist_ext as tfd

FIT = {"batch_size": 16, "verbose": 0}
IDS = np.arange(24, dtype="int32").reshape(12, 2) % 7

SERVES_AND_LOADS = """
import sys, keras, numpy as np, tensorflow as tf
exported, saved, inputs, expected = sys.argv[1:]
inputs, expected = np.load(inputs), np.load(expected)
loaded = tf.saved_model.load(exported)
np.testing.assert_allclose(loaded.serve(inputs), expected, atol=1e-6)
predicted = keras.models.load_model(saved).predict(inputs, verbose=0)
np.testing.assert_allclose(predicted, expected, atol=1e-6)
assert "tfdist_ext" not in sys.modules
"""


def normalized() -> keras.Model:
    """What fails to export, or to be saved, where its variables are distributed."""
    layers = keras.layers
    between = layers.BatchNormalization(momentum=0.5), layers.GaussianNoise(0.1)
    return compiled(stack(layers.Dense(4), *between, layers.Dense(1)), "adam")


class OfIds(keras.Model):
    """Not built before the first batch; nobody can tell its arguments; inputs are no floats."""

    def __init__(self, rows):
        super().__init__()
        self.table = keras.layers.Embedding(rows, 3)
        self.pool = keras.layers.GlobalAveragePooling1D()
        self.dense = keras.layers.Dense(1)

    def call(self, ids):
        return self.dense(self.pool(self.table(ids)))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_fresh_process_serves_and_loads_it(tmp_path: Path) -> None:
    model = tfd.distribute(normalized, mirrored(3), synchronize_batch_norm=False)
    model.fit(X, Y, **FIT)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "expected.npy", model.predict(X, verbose=0))
    model.export(tmp_path / "exported", verbose=False)
    model.save(tmp_path / "saved.keras")
    files = tmp_path / "x.npy", tmp_path / "expected.npy"
    command = [sys.executable, "-W", "ignore", "-c", SERVES_AND_LOADS]
    command += map(str, (tmp_path / "exported", tmp_path / "saved.keras", *files))
    subprocess.run(command, check=True, timeout=100)


def test_a_model_that_is_built_by_batches_of_a_fixed_size(tmp_path: Path) -> None:
    """Only its builder can make it again. The exported model takes any number of rows."""
    model = tfd.distribute(lambda: compiled(OfIds(7)), mirrored())
    data = tf.data.Dataset.from_tensor_slices((IDS, np.ones((12, 1))))
    model.fit(data.batch(6, drop_remainder=True), verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(loaded.serve(IDS[:5]), model.predict(IDS[:5], verbose=0), atol=1e-6)


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    unbuilt = tfd.distribute(lambda: compiled(OfIds(7)), mirrored())
    with pytest.raises(tfd.TrainingError, match=r"export\(\) needs the variables of"):
        unbuilt.export(tmp_path / "exported")
