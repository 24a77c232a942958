"""Global batches of a ShardedDataset of `tfd.data`, from its own position.

If a function of the shard makes the data of each task, the tasks agree in each step on whether
there is a batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.data.function import FunctionDataset, then_nothing
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.pipelines import parts_of_dataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.data.shards import Shard
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.agreement.equality import check_equal_across_workers, from_each_worker
from tfdist_ext.training.agreement.task_status import Reduction
from tfdist_ext.training.inputs import GlobalBatches


def read_sharded(
    data: ShardedDataset, reduction: Reduction, *, from_position: bool
) -> GlobalBatches:
    """Returns the global batches from the data's position, or all of them in order."""
    if reduction.multi_worker:
        values = {f"{name} in the data's state": value for name, value in data.state().items()}
        advice = "Give every worker the same ShardedDataset, at the same position."
        check_equal_across_workers(reduction, values, advice)
    if isinstance(data, FunctionDataset):
        return _batches_of_function(data, reduction, from_position=from_position)
    assert isinstance(data, OrderedDataset)
    return _batches_of_ordered(data if from_position else data.in_order())


def check_no_other_arguments(data: ShardedDataset, **given: Any) -> None:
    """Check that `fit` gets no argument that a ShardedDataset already determines.

    Raises:
        TrainingError: it gets one.
    """
    if given["batch_size"] == data.global_batch_size:
        del given["batch_size"]
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise TrainingError(
            f"Remove {' and '.join(extra)}: set them in the ShardedDataset, as in"
            " from_arrays((x, y, sample_weight), global_batch_size=64)."
        )


def _batches_of_ordered(data: OrderedDataset) -> GlobalBatches:
    """The global batches, beginning at the data's position.

    Raises:
        TrainingError: a position between two batches.
    """

    def begin() -> int:
        epoch, examples = data.position
        if examples % data.global_batch_size:
            raise TrainingError(
                f"The position of the data is after {examples} examples of an epoch, inside a"
                f" global batch of {data.global_batch_size}. Resume with the global batch size of"
                " the earlier training."
            )
        return epoch * data.steps + data.steps_done

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        return data.parts(first, local, replicas, begin(), counted=not data.loses_examples)

    return GlobalBatches(
        parts_of=parts_of,
        steps=data.steps,
        batch_size=data.global_batch_size,
        is_infinite=True,
        begin=lambda: begin() % data.steps,
        needs_row_count=data.loses_examples,
        advance=data.advance,
    )


def _batches_of_function(
    data: FunctionDataset, reduction: Reduction, *, from_position: bool
) -> GlobalBatches:
    """This task's batches, from the data's position or of epoch 0; every worker must call."""
    shard = Shard(reduction.worker, reduction.workers)

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        dataset = data.dataset(shard) if from_position else data.whole_epoch(shard)
        if shard.count == 1:
            return parts_of_dataset(dataset)(first, local, replicas)
        return then_nothing(dataset, local, shard.count)

    epoch = data.position[0] if from_position else 0
    steps, is_infinite = _agreed_length(data.whole_epoch(shard, epoch), reduction)
    if data.takes_epoch and from_position:  # other epochs may have more batches, or fewer
        steps = None
    return GlobalBatches(
        parts_of=parts_of,
        steps=steps,
        batch_size=data.global_batch_size,
        is_infinite=is_infinite,
        begin=lambda: data.steps_done if from_position else 0,
        needs_row_count=shard.count > 1,
        reads_own_shard=shard.count > 1,
        advance=data.advance if from_position else lambda steps: None,
        ended=data.end_epoch if from_position else lambda: None,
    )


def _agreed_length(dataset: tf.data.Dataset, reduction: Reduction) -> tuple[int | None, bool]:
    """(steps of an epoch on the worker with most steps, whether one worker has endless data)."""
    lengths = from_each_worker(reduction, dataset.cardinality().numpy())
    if (lengths == tf.data.INFINITE_CARDINALITY).any():
        return None, True
    return None if lengths.min() < 0 else int(lengths.max()), False
