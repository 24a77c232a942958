"""Old spellings of public names work for one release, and each warns once with the new one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext as tfd
import tfdist_ext.cluster

X = np.arange(8)
SPECS = [tfd.placement.VariableSpec("w", (4, 4))]


def of_shard(shard: tfd.data.Shard) -> tf.data.Dataset:
    return tf.data.Dataset.range(8)


class Numbers:
    """Examples by number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        return X[numbers]


def data() -> tfd.data.ShardedDataset:
    return tfd.data.from_arrays(X, global_batch_size=4)


OLD = [
    # (the old call, what it gives, the new name)
    (
        lambda: tfd.data.from_arrays(X, global_batch=4).global_batch_size,
        4,
        r"from_arrays\(global_batch=\.\.\.\) .* use global_batch_size=",
    ),
    (
        lambda: tfd.data.from_source(Numbers(), global_batch=2).global_batch_size,
        2,
        r"from_source\(global_batch=\.\.\.\) .* use global_batch_size=",
    ),
    (
        lambda: tfd.data.from_dataset_fn(of_shard, global_batch=2).global_batch_size,
        2,
        r"from_dataset_fn\(global_batch=\.\.\.\) .* use global_batch_size=",
    ),
    (lambda: data().global_batch, 4, "use ShardedDataset.global_batch_size"),
    (lambda: data().place, (0, 0), "use ShardedDataset.position"),
    (lambda: data().steps_behind, 0, "use ShardedDataset.steps_done"),
    (
        lambda: tfd.data.Order(8, global_batch=4).global_batch_size,
        4,
        r"Order\(global_batch=\.\.\.\) .* use global_batch_size=",
    ),
    (
        lambda: tfd.data.Order(8, 4, first=2).examples_seen,
        2,
        r"Order\(first=\.\.\.\) .* use examples_seen=",
    ),
    (lambda: tfd.data.Order(8, 4).global_batch, 4, "use Order.global_batch_size"),
    (lambda: tfd.data.Order(8, 4).first, 0, "use Order.examples_seen"),
    (
        lambda: tfd.placement.Shard,
        tfd.placement.VariableShard,
        "use tfdist_ext.placement.VariableShard",
    ),
    (
        lambda: tfd.placement.plan(SPECS, 2, policy="planner").policy,
        "balanced",
        'use policy "balanced"',
    ),
    (
        lambda: tfd.placement.plan(
            SPECS, devices=["CPU:0"], otherwise=tfd.placement.Mirrored()
        ).tasks_of("w"),
        (0,),
        r"plan\(otherwise=\.\.\.\) .* use default=",
    ),
    (lambda: len(tfdist_ext.cluster.survey({})), 6, "use tfdist_ext.cluster.describe_env"),
]


@pytest.mark.parametrize(("call", "value", "new"), OLD, ids=[row[2] for row in OLD])
def test_an_old_name_works_and_warns_once(call: Callable[[], Any], value: Any, new: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert call() == value
    with pytest.warns(DeprecationWarning, match=new):
        call()
    (one,) = caught
    assert one.category is DeprecationWarning
    assert one.filename == __file__, "it points to the line to change"


def test_both_names_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"from_arrays\(\) must get global_batch_size alone"):
        tfd.data.from_arrays(X, global_batch=4, global_batch_size=4)  # type: ignore[call-arg]
