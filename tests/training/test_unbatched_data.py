"""A dataset that was not batched, or whose batches have tensors without rows, is named."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training_cases import X, Y, assert_trains_as_keras, mirrored, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training.inputs import read

IMAGES = np.zeros((6, 10, 10, 3), "float32")
ROWS = np.zeros((6, 10), "float32")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param(({"a": ROWS, "b": ROWS[:, 0]}, ROWS), "single values", id="among inputs"),
        pytest.param((IMAGES, ROWS[:, :4]), r"parts of \[4, 10\] rows", id="images, classes"),
    ],
)
def test_examples_instead_of_batches(data, found: str) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(data)
    with pytest.raises(tfd.TrainingError, match=rf"must yield batches, got {found}.* Call \.batch"):
        read(dataset, replicas=2)
    for drop in (False, True):
        assert read(dataset.batch(4, drop_remainder=drop)).steps == (1 if drop else 2)


SHARED = np.random.default_rng(5).normal(size=(20, 5)).astype("float32")


class AddsRows(keras.Model):
    """Adds a row of a table, which is in the batch, to each example."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        rows, table = inputs["rows"], inputs["table"]
        return self.dense(rows + tf.gather(table, tf.cast(rows[:, 0] > 0, tf.int32)))


def build() -> keras.Model:
    model = AddsRows()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def with_table(drop: bool = False) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=drop)
    return dataset.map(lambda x, y: ({"rows": x, "table": SHARED}, y))


def of_unknown_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    def without_size(x: Any, y: Any) -> Any:
        table = tf.numpy_function(lambda value: value, [x["table"]], tf.float32)
        return {**x, "table": tf.ensure_shape(table, [None, 5])}, y

    return dataset.map(without_size)


@pytest.mark.parametrize(
    ("data", "place", "shape"),
    [
        pytest.param(
            lambda: of_unknown_size(with_table()),
            "x['table']",
            "[20, 5] in a batch of 16",
            id="no size",
        ),
        pytest.param(
            lambda: (
                tf.data.Dataset.from_tensor_slices((X, Y))
                .batch(16)
                .map(lambda x, y: ({"rows": x, "table": x}, y, tf.ones([3])))
            ),
            "sample_weight",
            "[3] in a batch of 16",
            id="sample_weight",
        ),
    ],
)
def test_a_tensor_without_a_row_for_each_example_is_named(
    data: Any, place: str, shape: str
) -> None:
    model = tfd.distribute(build, mirrored())
    with pytest.raises(tfd.DataError, match=re.escape(f"{place} has shape {shape}")) as caught:
        model.fit(data(), verbose=0)
    assert "over 2 replicas" in str(caught.value)
    assert "non-trainable weight" in str(caught.value)
    assert caught.value.__cause__ is None


def test_shapes_that_are_known_are_named_before_the_first_step() -> None:
    found = r"must yield batches, got .*x\['table'\] of shape \[20, 5\].*non-trainable"
    with pytest.raises(tfd.TrainingError, match=found):
        tfd.distribute(build, mirrored()).fit(with_table(drop=True), verbose=0)


def test_one_replica_gets_what_keras_gets() -> None:
    assert_trains_as_keras(build, with_table(), strategy=strategy_of("one_device"))
