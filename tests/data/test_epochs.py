"""Epochs of a dataset: looking at the first batch changes nothing in what is read."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.data import Shard, from_dataset_fn
from tfdist_ext.data.batches import Position, Readers
from tfdist_ext.data.epochs import Epochs
from tfdist_ext.data.reading import batches_of


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(10).shuffle(10, seed=3).batch(4)


def read(data: tf.data.Dataset, steps: int | None, inspect: Any) -> list[list[list[int]]]:
    batches = batches_of(data, steps=steps, readers=Readers())
    epochs = Epochs(batches, lambda parts_of: parts_of(0, 1, 1), steps, inspect)
    epochs_read = []
    for _ in range(4):
        with epochs.next() as epoch:
            rows: list[list[int]] = []
            with contextlib.suppress(StopIteration):
                while epoch.steps is None or len(rows) < epoch.steps:
                    rows.append(next(epoch.iterator)[0][2].numpy().tolist())
        epochs.advance(len(rows))
        epochs.end_epoch(epoch, len(rows), stopped=False)
        epochs_read.append(rows)
    return epochs_read


def test_arrays_are_read_ahead_to_the_end_of_the_pass() -> None:
    """Only a training needs the next pass."""

    def batches_read(**options: Any) -> int:
        batches = batches_of(tf.range(10), batch_size=4, readers=Readers(), **options)
        return int(batches.parts(0, 1, 1, Position()).cardinality())

    assert batches_read() == 3
    assert batches_read(seed=lambda: 1) > 2**61


def test_a_worker_reads_again_what_all_workers_have_read() -> None:
    """A pass ends with the data of the other worker, which has 5 batches."""
    of_other_worker = iter([tf.data.UNKNOWN_CARDINALITY, 1, 1, 1, 1, 1, 0])
    readers = Readers(2, Shard(0, 2), lambda own: np.array([own, next(of_other_worker)]))
    data = from_dataset_fn(lambda shard: shuffled().filter(lambda _: True))
    batches = batches_of(data, seed=lambda: 0, readers=readers)
    epochs = Epochs(batches, lambda parts_of: parts_of(0, 1, 2), 4)
    with pytest.warns(UserWarning, match="ended after 1 of the 4 steps"):
        epochs.resume(2, 0, data.state(), reads=True)
    assert data.position == (1, 0)
    with epochs.next() as epoch:
        parts: Any = list(itertools.islice(epoch.iterator, 4))
    assert [int(rows) for ((rows, _, _),) in parts] == [4, 4, 2, 0]


@pytest.mark.filterwarnings("ignore:the data ended after")
@pytest.mark.parametrize("steps", [None, 2, 3])
@pytest.mark.parametrize("known", [True, False])
def test_an_inspected_batch_is_read_once(steps: int | None, known: bool) -> None:
    def data() -> tf.data.Dataset:
        return shuffled() if known else shuffled().filter(lambda _: True)

    seen: list[Any] = []
    rows = read(data(), steps, lambda batch: seen.append(batch.numpy().tolist()))
    assert rows == read(data(), steps, None)
    assert seen == rows[0][:1]
