"""Batches that each task reads for itself, from a function of its shard, as those of `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.shards import Shard
from tfdist_ext.training.global_batches import GlobalBatches
from tfdist_ext.training.inputs import parts_of_dataset
from tfdist_ext.training.reduction import Reduction
from tfdist_ext.training.sharded_batches import check_says_nothing_else

__all__ = ["FunctionBatches", "batches_of_function"]


@dataclass
class FunctionBatches(GlobalBatches):
    """Each iteration asks the data anew what its position's epoch is."""

    def distributed(self, strategy: tf.distribute.Strategy) -> Any:
        return _Passes(lambda: GlobalBatches.distributed(self, strategy))

    def on_host(self, first: int, local: int, replicas: int) -> Any:
        return _Passes(lambda: GlobalBatches.on_host(self, first, local, replicas))


class _Passes:
    """Made anew for each iteration."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def batches_of_function(
    data: FunctionDataset,
    reduction: Reduction,
    *,
    beside: tuple[Any, ...],
    batch_size: int | None,
    class_weight: Any,
    going_on: bool,
) -> GlobalBatches:
    """This task's batches, from the data's position on, or of epoch 0; every worker must call.

    Arguments and errors are those of `batches_of_sharded`.
    """
    check_says_nothing_else(data, beside, batch_size, class_weight)
    workers = reduction.replicas // reduction.local_replicas
    shard = Shard(reduction.first_replica // reduction.local_replicas, workers)

    def dataset() -> tf.data.Dataset:
        return data.dataset(shard) if going_on else data.whole_epoch(shard)

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        if workers == 1:
            return parts_of_dataset(dataset())(first, local, replicas)
        return _then_nothing(dataset(), local)

    epoch = data.position[0] if going_on else 0
    steps, endless = _agreed_length(data.whole_epoch(shard, epoch), shard, reduction)
    if data.takes_epoch and going_on:  # other epochs may have more batches, or fewer
        steps = None

    def batches() -> FunctionBatches:
        return FunctionBatches(
            parts_of,
            steps,
            data.global_batch_size,
            endless,
            on_epoch_begin=lambda: None,
            on_epoch_end=lambda: None,
            begin=data.steps_done if going_on else 0,
            done=lambda steps, logs: data.advance(steps) if going_on else None,
            ended=data.end_epoch if going_on else lambda: None,
            agreed=workers > 1,
            at_position=batches,
        )

    return batches()


def _agreed_length(
    dataset: tf.data.Dataset, shard: Shard, reduction: Reduction
) -> tuple[int | None, bool]:
    """(steps of an epoch: those of the worker that has most, whether one of them has no end)."""
    lengths = np.zeros(shard.count, np.int64)
    lengths[shard.index] = int(dataset.cardinality())
    lengths = reduction.sum_over_workers(lengths)
    if (lengths == tf.data.INFINITE_CARDINALITY).any():
        return None, True
    return None if lengths.min() < 0 else int(lengths.max()), False


def _then_nothing(dataset: tf.data.Dataset, local: int) -> tf.data.Dataset:
    """Parts for the local replicas, and after the last batch parts of no rows, without an end.

    The tasks agree in each step on what there is; see `GlobalBatches`.
    """

    def marked(real: bool) -> Callable[..., Any]:
        def of_parts(*parts: Any) -> Any:
            flag = tf.constant(int(real), tf.int64)
            return tuple((rows * flag, flag, batch) for rows, _, batch in parts)

        return of_parts

    one_row = tf.nest.map_structure(_one_row, dataset.element_spec)
    nothing = parts_of_dataset(tf.data.Dataset.from_tensors(one_row))(0, local, local)
    parts = parts_of_dataset(dataset)(0, local, local).map(marked(True))
    return parts.concatenate(nothing.map(marked(False)).repeat())


def _one_row(spec: Any) -> Any:
    """A batch of one row of zeros: what a replica computes with that has none."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]]
        splits = [tf.zeros([2], spec.row_splits_dtype)]
        splits += [tf.zeros([1], spec.row_splits_dtype)] * (spec.ragged_rank - 1)
        return tf.RaggedTensor.from_nested_row_splits(tf.zeros([0, *inner], spec.dtype), splits)
    rest = [size or 1 for size in spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        indices = tf.zeros([0, 1 + len(rest)], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), [1, *rest])
    return tf.zeros([1, *rest], spec.dtype)
