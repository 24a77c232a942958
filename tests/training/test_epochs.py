"""Where epochs begin and end in the data: as in Keras's own fit."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import strategy_of

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.epochs import DatasetPasses, steps_of_epoch

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))


@functools.cache
def of_keras(kind: str) -> dict[str, list[float]]:
    import shuffled_training

    return shuffled_training.losses(None, [kind])


@pytest.mark.long("one_device")
@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:the data ended after")
@pytest.mark.parametrize(
    ("name", "kinds"), [("one_device", None), ("mirrored", ["shuffled, batched", "infinite"])]
)
def test_shuffled_datasets_have_the_order_of_keras(name: str, kinds: list[str] | None) -> None:
    import shuffled_training

    ours = shuffled_training.losses(strategy_of(name), kinds)
    expected = {}
    for kind in kinds or shuffled_training.DATASETS:
        expected |= of_keras(kind)
    assert list(ours) == list(expected)
    for kind, losses in ours.items():
        assert losses == pytest.approx(expected[kind], rel=1e-5), kind


def without_targets() -> tf.data.Dataset:
    adapter = kp.get_data_adapter((np.full((2, 3), i), None) for i in range(3))
    return adapter.get_tf_dataset()


ROWS = np.arange(6.0).reshape(6, 1)
FORMS = {
    "dict": lambda: tf.data.Dataset.from_tensor_slices({"a": ROWS, "b": ROWS}).batch(2),
    "ragged": lambda: tf.data.Dataset.from_tensor_slices(
        tf.ragged.constant([[1], [2, 3], [], [4], [5], [6, 7]])
    ).batch(2),
    "sparse": lambda: tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(ROWS)).batch(2),
    "without targets": without_targets,
}


@pytest.mark.parametrize(
    ("form", "known_length"),
    [("dict", True), ("ragged", False), ("sparse", False), ("without targets", False)],
)
def test_a_first_batch_that_was_looked_at_is_used(form: str, known_length: bool) -> None:
    dataset = FORMS[form]()
    seen: list[Any] = []
    passes = DatasetPasses(dataset, in_steps=False, inspect=seen.append)
    epoch = passes.epoch(3 if known_length else None, known_length=known_length)
    first, second, third = [str(batch) for batch in epoch]
    assert first == str(seen[0]) or form == "without targets"
    assert len({first, second, third}) == 3
    assert len(seen) == 1
    left = 2 if form == "without targets" else 3  # what Keras has peeked at of a generator
    assert len(list(passes.epoch(None, known_length=False))) == left


def epochs_of_keras(in_pass: int, asked: int | None, epochs: int) -> list[list[int]]:
    """Keras's EpochIterator as a list: the numbers of the batches that each epoch reads."""
    result, position = [], 0
    for _ in range(epochs):
        if asked is None:
            position = 0
        read = []
        for _ in range(asked or in_pass):
            if position >= in_pass:
                break
            read.append(position)
            position += 1
        if position >= in_pass:
            position = 0
        result.append(read)
    return result


@given(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 30)), st.integers(1, 9))
@settings(max_examples=300)
def test_epochs_read_the_batches_that_keras_reads(
    in_pass: int, asked: int | None, epochs: int
) -> None:
    position, read = 0, []
    for _ in range(epochs):
        steps, after = steps_of_epoch(position, in_pass, asked)
        read.append(list(range(position, position + steps)))
        position = after
    assert read == epochs_of_keras(in_pass, asked, epochs)
