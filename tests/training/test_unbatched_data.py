"""A dataset that was not batched is told, as far as its shapes tell."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.training.inputs import read

IMAGES = np.zeros((6, 10, 10, 3), "float32")
ROWS = np.zeros((6, 10), "float32")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param((ROWS, ROWS[:, 0]), "single values", id="labels"),
        pytest.param(({"a": ROWS, "b": ROWS[:, 0]}, ROWS), "single values", id="among inputs"),
        pytest.param((ROWS, ROWS[:, :1]), r"parts of \[1, 10\] rows", id="columns"),
        pytest.param((IMAGES, ROWS[:, :4]), r"parts of \[4, 10\] rows", id="images, classes"),
    ],
)
def test_examples_instead_of_batches(data, found: str) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(data)
    with pytest.raises(tfd.TrainingError, match=rf"must yield batches, got {found}.* Call \.batch"):
        read(dataset)
    for drop in (False, True):
        assert read(dataset.batch(4, drop_remainder=drop)).steps == (1 if drop else 2)
