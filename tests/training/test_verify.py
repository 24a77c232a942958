"""`tfd.verify`: what differs on a strategy, why, and what to do about it.

Four replicas, and global batches of 12, 12 and 6 rows: parts of 3, 1 and 2 rows.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext import cli
from tfdist_ext.testing import assert_trains_like_one_device
from tfdist_ext.training.verify import TOLERANCE, Verification, relative_differences

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 5)).astype("float32")
Y = RANDOM.integers(0, 3, 48)
Dense = keras.layers.Dense


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def shuffled(seed: int | None = None) -> tf.data.Dataset:
    return rows().shuffle(48, seed=seed).batch(12)


def verify(build: Callable[[], keras.Model], data: Any = (X, Y), **options: Any) -> Verification:
    options = {"batch_size": 12, **options}
    return tfd.verify(build, data, tfd.create_strategy("mirrored"), **options)


def model(*layers: keras.Layer, **settings: Any) -> keras.Model:
    made = keras.Sequential([keras.Input([5]), *layers, Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": loss, **settings})
    return made


def equal_model() -> keras.Model:
    return model(Dense(8, "tanh"), keras.layers.Dropout(0.3), optimizer="adam", metrics=["acc"])


def batch_norm_model() -> keras.Model:
    return model(Dense(8), keras.layers.BatchNormalization())


class CountsRows(keras.layers.Layer):
    """Counts rows in a variable that Keras does not know."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.seen = tf.Variable(0, trainable=False, dtype=dtype)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.seen.assign_add(tf.cast(tf.shape(x)[0], self.seen.dtype))
        return x


class DrawsByNumpy(keras.optimizers.SGD):
    """Each replica gets numbers of its own."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        noise = tf.numpy_function(lambda: np.random.normal(size=[1]), [], tf.float64)
        scale = tf.cast(tf.ensure_shape(noise, [1])[0], tf.float32)
        super().apply([g * scale for g in grads], trainable_variables)


class MeanOfRatios(keras.metrics.Metric):
    """The mean over batches of the share of right answers."""

    def __init__(self) -> None:
        super().__init__(name="share")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.batches = self.add_weight(initializer="zeros", name="batches")

    def update_state(self, y: tf.Tensor, predicted: tf.Tensor, sample_weight: Any = None) -> None:
        right = tf.cast(tf.reshape(y, [-1]), tf.int64) == tf.argmax(predicted, axis=1)
        positive = tf.reduce_sum(tf.cast(y > 0, tf.float32)) + 1
        self.total.assign_add(tf.reduce_sum(tf.cast(right, tf.float32)) / positive)
        self.batches.assign_add(1.0)

    def result(self) -> tf.Tensor:
        return self.total / self.batches


def test_a_model_that_is_equal() -> None:
    result = verify(equal_model)
    assert result.equal
    assert "Causes" not in str(result)
    kinds = {name.split()[0] for name in result.differences}
    assert kinds == {"weight", "variable", "optimizer", "log", "prediction"}
    assert max(result.differences.values()) < 1e-6
    assert "12, 12, 6" in str(result)
    assert "EQUAL" in str(result)
    assert result.tolerance == TOLERANCE


# case -> builder, data, where a difference is
CASES: dict[str, tuple[Callable[[], keras.Model], Any, str]] = {
    "variable of your own": (lambda: model(CountsRows()), (X, Y), "variable counts_rows/seen"),
    "BatchNormalization": (batch_norm_model, (X, Y), "weight"),
    "unseeded shuffle": (equal_model, shuffled, "data first batch"),
    "metric": (lambda: model(metrics=[MeanOfRatios()]), (X, Y), "log share"),
}


@pytest.mark.parametrize("case", CASES)
def test_differences_of(case: str) -> None:
    build, data, place = CASES[case]
    result = verify(build, data)
    assert not result.equal
    assert any(name.startswith(place) for name in result.unequal)
    assert min(result.differences[name] for name in result.unequal) > 1e-4
    assert "NOT EQUAL" in str(result)
    assert 'section "losses differ from one device"' in str(result)


def test_copies_that_differ_are_infinitely_different() -> None:
    result = verify(lambda: model(optimizer=DrawsByNumpy(0.1)))
    assert result.differences["weight dense/kernel"] == float("inf")


def test_a_count_of_rows_is_an_error_that_says_what_to_do() -> None:
    result = verify(lambda: model(CountsRows("int64")))
    assert not result.equal
    assert "must be the same on all" in result.error
    assert "tfd.all_rows" in str(result)


def test_settings_that_make_a_model_equal() -> None:
    assert verify(batch_norm_model, synchronize_batch_norm=True).equal
    assert verify(equal_model, rows().batch(12), validation_data=(X, Y), epochs=2).equal
    assert verify(equal_model, ((X[:n], Y[:n]) for n in (12, 6))).equal
    sharded = tfd.data.from_arrays((X, Y), global_batch_size=12, seed=0)
    assert verify(equal_model, sharded).equal


def test_a_seeded_shuffle_is_equal() -> None:
    """The dataset shuffles anew when it is read again, and a second worker reads it once, too."""
    dataset = shuffled(seed=1)
    assert verify(equal_model, dataset).equal
    assert verify(equal_model, lambda: dataset).equal


def test_a_bias_that_is_rounding_alone_is_named() -> None:
    """A bias before BatchNormalization moves by whole steps of Adam, in plain Keras, too."""
    images = np.random.default_rng(0).random((24, 12, 12, 1)).astype("float32")
    labels = (images.mean(axis=(1, 2, 3)) > 0.5).astype("float32")

    def build() -> keras.Model:
        layers = keras.layers
        hidden = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten()]
        made = keras.Sequential([keras.Input([12, 12, 1]), *hidden, Dense(1)])
        made.compile(keras.optimizers.Adam(0.003), "mse")
        return made

    result = verify(build, (images, labels), synchronize_batch_norm=True)
    assert result.equal
    (row,) = [line.split() for line in str(result).splitlines() if line.startswith("weight ")]
    assert row[-2:] == ["rounding", "conv2d/bias"]


def test_arguments_that_cannot_be_compared() -> None:
    with pytest.raises(tfd.TrainingError, match="needs a function"):
        verify(equal_model())  # type: ignore[arg-type]
    with pytest.raises(tfd.TrainingError, match="has no batch"):
        verify(equal_model, rows().take(0).batch(2))
    with pytest.raises(tfd.TrainingError, match="batch_size must be a whole number from 1, got 0"):
        verify(equal_model, batch_size=0)
    with pytest.raises(ValueError, match="validation_split"):
        verify(equal_model, validation_split=0.25)
    with pytest.raises(tfd.TrainingError, match=r"at least 2 replicas, got 1: .*--devices 2"):
        tfd.verify(equal_model, (X, Y), tfd.strategies.StrategyTemplate(1))


def test_every_comparison_has_one_default_tolerance() -> None:
    """That of verify is in the report of a model that is equal."""
    parameters = inspect.signature(assert_trains_like_one_device).parameters
    assert parameters["tolerance"].default == TOLERANCE
    options = cli._parser().parse_args(["verify", "a:b", "--data", "a:c"])
    assert options.tolerance == TOLERANCE


def test_relative_differences() -> None:
    wanted = {"a": np.array([2.0, -4.0]), "b": np.array([1e-9]), "c": np.array([np.nan, 1.0])}
    found = {"a": np.array([2.0, -3.0]), "b": np.array([2e-9]), "c": np.array([np.nan, 1.0])}
    differences = relative_differences(found, wanted)
    assert differences == {"a": 0.25, "b": pytest.approx(1e-6), "c": 0.0}
    infinite = {"a": np.array([np.inf, 2.0, -np.inf])}
    assert relative_differences(infinite, infinite) == {"a": 0.0}
    other = {"a": np.array([np.inf, 1.0, -np.inf])}
    assert relative_differences(other, infinite) == {"a": 0.5}
    odd = {"a": np.zeros(3), "b": np.array([np.nan])}
    assert list(relative_differences(odd, wanted).values()) == [np.inf] * 3


def test_rounding_explains_a_difference() -> None:
    differences, rounding = {"weight a": 3e-5, "weight b": 3e-5}, {"weight a": 4e-7}
    result = Verification("Title.", differences, rounding, 1e-5)
    assert result.unequal == ["weight b"]
    assert "1 of 2 compared values differ, the most in weight b." in str(result)


SCRIPT = """
import keras
import numpy as np

import tfdist_ext as tfd

tfd.flags.define_strategy_flags()  # which the command does not parse

def build():
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def data():
    random = np.random.default_rng(0)
    return random.normal(size=(90, 5)).astype("float32"), random.integers(0, 3, 90)
"""


@pytest.mark.timeout(90)
def test_the_command_on_two_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = "verify train.py:build --data train.py:data --workers 2"
    command = [sys.executable, "-m", "tfdist_ext.cli", *words.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=80)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "with 2 replicas" in ended.stdout
    assert "EQUAL: the model trains as it does on one device." in ended.stdout


def test_the_commands_hide_what_tensorflow_prints_when_it_starts(tmp_path: Path) -> None:
    shout = "import os, sys\nos.write(2, b'a line of the script\\n')\n"
    (tmp_path / "train.py").write_text(shout + SCRIPT)
    for words in ("plan train.py:build --ps 2", "verify train.py:build --data train.py:data"):
        command = [sys.executable, "-m", "tfdist_ext.cli", *words.split()]
        env = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=80, env=env
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stderr == "a line of the script\n"
