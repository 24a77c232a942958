"""`batches_of`: whatever `fit`, `evaluate` and `predict` accept, as global batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data._keras_private import array_parts, get_data_adapter
from tfdist_ext.data.batches import Batches, Readers
from tfdist_ext.data.function import FunctionDataset, ShardBatches
from tfdist_ext.data.keras_batches import ArrayBatches, DatasetBatches, KerasBatches
from tfdist_ext.data.ordered import OrderedBatches, OrderedDataset
from tfdist_ext.data.sharded import ShardedDataset
from tfdist_ext.data.worker_batches import WorkerBatches, why_not_remote
from tfdist_ext.errors import TrainingError
from tfdist_ext.user_frames import warn


def batches_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: dict[int, float] | None = None,
    seed: Callable[[], int] | None = None,
    readers: Readers,
) -> Batches:
    """Reads what Keras accepts as data, and a ShardedDataset, as global batches.

    Args:
        x: a tf.data.Dataset must yield global batches.
        batch_size: examples in a global batch of arrays (default 32).
        steps: global batches in an epoch, if the caller asked for a number.
        shuffle: whether the examples of arrays, and the batches of a finite `PyDataset`, have a
            new order in each pass, the same on every task. "batch" shuffles within each batch.
        seed: returns the seed of the orders, for data to train on. Without it nothing is shuffled,
            and a ShardedDataset is read from its start.
        readers: the tasks that read the data. Every one of them must call.

    Raises:
        TrainingError: data that is distributed already, or not in batches.
        ValueError: what Keras itself refuses.
    """
    if isinstance(x, ShardedDataset):
        settings = {"class_weight": class_weight, "batch_size": batch_size}
        _check_no_other_arguments(x, y=y, sample_weight=sample_weight, **settings)
        return _batches_of_sharded(x, readers, moves=seed is not None)
    if isinstance(x, tf.distribute.DistributedDataset | tf.distribute.DistributedIterator):
        raise TrainingError(
            f"The data is distributed already: it is a {type(x).__name__}. Pass the tf.data.Dataset"
            " of global batches. `fit` splits it for the replicas."
        )
    if all(part is None for part in keras.tree.flatten(x)):
        raise TrainingError(f"There is no data: x is {x!r}.")
    sizes = {"batch_size": batch_size, "steps_per_epoch": steps}
    # Keras does not shuffle: its random numbers differ between tasks.
    adapter = get_data_adapter(x, y, sample_weight, class_weight=class_weight, **sizes)
    shuffle = "batch" if shuffle == "batch" else bool(shuffle)
    with tf.device("CPU:0"):
        arrays = array_parts(adapter)
    if arrays is not None:
        number = None if seed is None else seed() if shuffle else 0
        return ArrayBatches(*arrays, shuffle, number)
    if isinstance(x, tf.data.Dataset):
        return DatasetBatches(adapter.get_tf_dataset(), adapter.num_batches, readers.replicas)
    seed = seed if shuffle else None
    return KerasBatches(x, adapter, readers.replicas, class_weight, seed)


def _batches_of_sharded(data: ShardedDataset, readers: Readers, *, moves: bool) -> Batches:
    """The global batches, from the data's position if it moves, else from the start.

    Workers of parameter servers read the data of a function themselves, if they can.
    """
    if isinstance(data, OrderedDataset):
        return OrderedBatches(data, moves=moves)
    assert isinstance(data, FunctionDataset)
    if readers.coordinator is not None and not data.takes_epoch:
        why = why_not_remote(data, readers.workers)
        if not why:
            return WorkerBatches(data, readers)
        warn(
            f"the workers cannot read this data themselves: {why}. This process reads all of the"
            " data and sends the batches."
        )
    return ShardBatches(data, readers, moves=moves)


def _check_no_other_arguments(data: ShardedDataset, **arguments: Any) -> None:
    """Check that `fit` gets no argument that a ShardedDataset already determines.

    Raises:
        TrainingError: it gets one.
    """
    if arguments["batch_size"] == data.global_batch_size:
        del arguments["batch_size"]
    if arguments["class_weight"] is not None:
        raise TrainingError(
            "class_weight cannot be used with a ShardedDataset. Multiply the weights of the classes"
            " into sample_weight."
        )
    extra = [name for name, value in arguments.items() if value is not None]
    if extra:
        raise TrainingError(
            f"Remove {' and '.join(extra)}: set them in the ShardedDataset, as in"
            " from_arrays((x, y, sample_weight), global_batch_size=64)."
        )
