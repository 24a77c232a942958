"""Data that the workers of parameter servers can, or cannot, read by themselves."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.data import Shard
from tfdist_ext.training.parameter_server.worker_data import why_not_remote

WORDS = ["a", "b", "c", "d"]


def indices(shard: Shard, *, adapts: bool) -> tf.data.Dataset:
    lookup = keras.layers.StringLookup(vocabulary=None if adapts else WORDS)
    if adapts:
        lookup.adapt(tf.constant(WORDS))
    return tf.data.Dataset.from_tensor_slices(WORDS).shard(shard.count, shard.index).map(lookup)


@pytest.mark.parametrize(
    ("adapts", "why"), [(False, ""), (True, "its function cannot be traced (Operator")]
)
def test_a_function_that_adapts_a_layer_is_read_by_the_coordinator(adapts: bool, why: str) -> None:
    data = tfd.data.from_dataset_fn(
        lambda shard: indices(shard, adapts=adapts), global_batch_size=2
    )
    found = why_not_remote(data, 2)
    assert found.startswith(why) if why else found == ""
    # The coordinator calls the function as it is.
    read = [batch.numpy() for batch in data.dataset(Shard(0, 1))]
    assert sorted(np.concatenate(read).tolist()) == [1, 2, 3, 4]
