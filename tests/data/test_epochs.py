"""Epochs of a dataset: how far it is read ahead, and what a worker reads again.

That a look at the first batch changes nothing: training/agreement/test_equality.py."""

from __future__ import annotations

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
