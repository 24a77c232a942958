"""Ordered data as the global batches of `fit`, from its position on."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.global_batches import GlobalBatches

__all__ = ["batches_of_sharded", "check_says_nothing_else"]


def batches_of_sharded(
    data: OrderedDataset,
    *,
    beside: tuple[Any, ...],
    batch_size: int | None,
    class_weight: Any,
    going_on: bool,
) -> GlobalBatches:
    """The global batches from the data's position on, or all of it in its own order.

    Args:
        beside: targets and sample weights, which the data holds itself.
        going_on: from the position; else, as predictions are wanted, in the order of the data.

    Raises:
        TrainingError: an argument of `fit` that says again, and otherwise, what the data says; or
            a position between two batches.
    """
    check_says_nothing_else(data, beside, batch_size, class_weight)
    data = data if going_on else data.in_order()
    epoch, examples = data.position
    if examples % data.global_batch_size:
        raise TrainingError(
            f"the data's position is after {examples} examples of an epoch, which is between two"
            f" global batches of {data.global_batch_size}: go on with the global batch of the"
            " training that was there before."
        )
    begin = epoch * data.steps + examples // data.global_batch_size

    def parts_of(first: int, local: int, replicas: int) -> tf.data.Dataset:
        return data.parts(first, local, replicas, begin, counted=not data.loses_examples)

    return GlobalBatches(
        parts_of,
        data.steps,
        data.global_batch_size,
        endless=True,
        on_epoch_begin=lambda: None,
        on_epoch_end=lambda: None,
        begin=begin % data.steps,
        done=lambda steps, logs: data.advance(steps) if going_on else None,
        agreed=data.loses_examples,
        at_position=lambda: batches_of_sharded(
            data,
            beside=beside,
            batch_size=batch_size,
            class_weight=class_weight,
            going_on=going_on,
        ),
    )


def check_says_nothing_else(
    data: ShardedDataset, beside: tuple[Any, ...], batch_size: int | None, class_weight: Any
) -> None:
    """
    Raises:
        TrainingError: an argument of `fit` that says again, or otherwise, what the data says.
    """
    if any(given is not None for given in beside):
        raise TrainingError(
            "a ShardedDataset holds targets and sample weights itself, as from_arrays((x, y)):"
            " leave out y and sample_weight."
        )
    if class_weight is not None:
        raise TrainingError(
            "class_weight cannot be given beside a ShardedDataset: give it sample weights, as"
            " from_arrays((x, y, sample_weight)), or return them from parse."
        )
    if batch_size not in (None, data.global_batch_size):
        has = (
            f"global batches of {data.global_batch_size} examples"
            if data.global_batch_size
            else "batches"
        )
        raise TrainingError(
            f"the ShardedDataset has {has}, and batch_size={batch_size} arrived: leave it out."
        )
