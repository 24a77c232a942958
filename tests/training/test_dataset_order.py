"""The order of examples of shuffled datasets, epoch by epoch, is that of Keras's own fit."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from training_cases import strategy_of

from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.epochs import DatasetPasses

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))


@functools.cache
def of_keras(kind: str) -> dict[str, list[float]]:
    import shuffled_training

    return shuffled_training.losses(None, [kind])


@pytest.mark.long("one_device")
@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:the data ended after")
@pytest.mark.parametrize(
    ("name", "feeds_on_host", "kinds"),
    [
        ("one_device", True, None),
        ("mirrored", True, ["infinite"]),
        ("mirrored", False, ["shuffled, batched"]),  # as GPUs are fed
    ],
)
def test_shuffled_datasets_have_the_order_of_keras(
    name: str,
    feeds_on_host: bool,
    kinds: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import shuffled_training

    from tfdist_ext.training.synchronous.reduction import SynchronousReduction as Reduction

    if not feeds_on_host:
        never = property(lambda _: False, lambda *_: None)
        monkeypatch.setattr(Reduction, "feeds_on_host", never, raising=False)
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


@pytest.mark.parametrize("known_length", [True, False])
@pytest.mark.parametrize("form", FORMS)
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


def test_data_without_a_batch_is_looked_at_too() -> None:
    seen: list[Any] = []
    passes = DatasetPasses(tf.data.Dataset.range(0), in_steps=False, inspect=seen.append)
    assert list(passes.epoch(None, known_length=False)) == []
    assert seen == [None]
