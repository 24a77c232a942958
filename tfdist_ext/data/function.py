"""FunctionDataset: a function decides what each task reads, without random access."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.batches import Position, PositionedBatches, Readers
from tfdist_ext.data.pipelines import Part, of_any_rows, parts_of_dataset
from tfdist_ext.data.sharded import (
    ShardedDataset,
    check_reads_here,
    check_state,
    sharded_already,
)
from tfdist_ext.data.shards import ReadBy, Remainder, Shard, bounds
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback


@filter_traceback
def from_dataset_fn(
    function: Callable[..., tf.data.Dataset],
    *,
    global_batch_size: int | None = None,
) -> FunctionDataset:
    """Creates a dataset from a function that returns the data of one shard.

    In `fit`, each worker reads one shard and splits its batches over its replicas. The function
    must put each example into exactly one shard. It also determines the order of the examples.

    With parameter servers, the workers read their shards, and each batch of a shard is a step. If
    the function takes `epoch`, calls Python, or uses a dataset from outside, the coordinator reads
    the data instead.

    Args:
        function: a function of `Shard(index, count)` that returns a `tf.data.Dataset`. Each element
            is the part of the shard of one global batch. Shards can have different numbers of
            batches, of any size. If the function has a parameter `epoch`, it is called for each
            epoch. Otherwise, its dataset is iterated again for each epoch.
        global_batch_size: the number of examples of a step, over all shards. If given, the function
            returns a dataset of single examples, and each shard batches its part.

    Raises:
        DataError: the function does not take a shard, or `global_batch_size` is not a positive
            integer. The result of the function is checked when the function is called.
    """
    return FunctionDataset(function, global_batch_size)


@filter_traceback
class FunctionDataset(ShardedDataset):
    """A dataset from a function that returns the data of one shard, for one task.

    Step k of a training uses the k-th batch of each task: together they are global batch k. Tasks
    may have different numbers of batches, of different sizes. A task whose data has ended computes
    with no rows until the data of all tasks has ended.

    Attributes:
        takes_epoch: whether the function is called again for each epoch.
    """

    def __init__(self, function: Callable[..., tf.data.Dataset], global_batch_size: int | None):
        """Arguments and errors are those of `from_dataset_fn`."""
        self._function = function
        self.takes_epoch = _takes_epoch(function)
        # Otherwise a shuffle without a seed may give other examples when the epoch is read again.
        self.resumes_inside_epochs = self.takes_epoch
        self._batch = global_batch_size
        if global_batch_size is not None:
            self._batch = check_int(global_batch_size, "global_batch_size", 1, error=DataError)
        self._kept: dict[Shard, tf.data.Dataset] = {}
        # Of the first shard that was read: the function may be slow, and each `state` needs it.
        self._spec: Any = None

    @property
    def element_spec(self) -> Any:
        if self._spec is None:
            self.rest_of_epoch(Shard(0, 1), self._epoch)
        return self._spec

    @property
    def global_batch_size(self) -> int | None:
        return self._batch

    @property
    def steps(self) -> int | None:
        """The batches in an epoch if one task reads all data; None if unknown."""
        length = int(self.rest_of_epoch(Shard(0, 1), self._epoch).cardinality())
        return None if length < 0 else length  # unknown or infinite

    def dataset(
        self,
        shard: ReadBy | None = None,
        epoch: int | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
    ) -> tf.data.Dataset:
        if remainder is not Remainder.KEEP:
            raise DataError(
                f"remainder must be Remainder.KEEP for data made by a function, got {remainder}."
            )
        shard = Shard(0, 1) if shard is None else Shard.of(shard)
        epoch = self._epoch if epoch is None else check_int(epoch, "epoch", error=DataError)
        return self.rest_of_epoch(shard, epoch, self._done if epoch == self._epoch else 0)

    def rest_of_epoch(self, shard: Shard, epoch: int, steps: int = 0) -> tf.data.Dataset:
        """The batches of a shard after its first `steps` batches.

        If the function takes no epoch, one dataset serves all epochs: its `shuffle` gives another
        order each time the dataset is iterated.
        """
        if not self.takes_epoch and shard not in self._kept:
            self._kept[shard] = self.create_dataset(shard)
        dataset = self._kept.get(shard) or self.create_dataset(shard, epoch)
        if not steps:
            return dataset
        if self.shards not in (None, shard.count):
            raise DataError(
                f"the position is after {steps} batches of each of {self.shards} shards, so"
                f" {shard.count} shards cannot resume there. Resume with {self.shards} tasks, or"
                " from the end of an epoch."
            )
        return dataset.skip(steps)

    def create_dataset(
        self, shard: Shard, epoch: int = 0, *, whole_batches: bool = False
    ) -> tf.data.Dataset:
        """Returns the result of the function in batches, with sharding options set.

        Args:
            whole_batches: each batch is a whole global batch, not the shard's part of one.
        """
        dataset = self._function(shard, **({"epoch": epoch} if self.takes_epoch else {}))
        if not isinstance(dataset, tf.data.Dataset):
            raise DataError(
                f"the function returned {shown(dataset)} for {shard}, not a tf.data.Dataset."
            )
        if self._batch is not None:
            reader = Shard(0, 1) if whole_batches else shard
            if self._batch < reader.count:  # raised on all tasks, also where the part has rows
                raise DataError(
                    f"global_batch_size={self._batch} is less than the number of shards,"
                    f" {reader.count}. Use a larger batch or fewer tasks."
                )
            low, high = bounds(self._batch, reader.index, reader.count)
            dataset = dataset.batch(high - low, num_parallel_calls=tf.data.AUTOTUNE)
            dataset = dataset.prefetch(tf.data.AUTOTUNE)
        elif any(
            isinstance(part, tf.TensorSpec) and part.shape.rank == 0
            for part in tf.nest.flatten(dataset.element_spec)
        ):
            raise DataError(
                "the function's dataset has single examples, not batches: its element_spec is"
                f" {dataset.element_spec}. Call .batch(n) in the function, or give"
                " global_batch_size."
            )
        if self._spec is None:
            self._spec = tf.nest.map_structure(of_any_rows, dataset.element_spec)
        return sharded_already(dataset, shard)

    def distributed(
        self, strategy: tf.distribute.Strategy, remainder: Remainder = Remainder.KEEP
    ) -> Any:
        check_reads_here(strategy)
        if Shard.of(strategy).count > 1:
            raise DataError(
                "a custom loop on several workers cannot read data made by a function: the workers"
                " may have different numbers of batches, and the loop would hang. Use"
                " from_tfrecords or from_arrays, or fit, evaluate and predict."
            )
        return strategy.experimental_distribute_dataset(self.dataset(remainder=remainder))

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "steps": self._done,
            "shards": self.shards,
            "fingerprint": {"kind": "dataset function", "element": str(self.element_spec)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        check_state(state, self.state())
        epoch = check_int(state["epoch"], "the position's epoch", error=DataError)
        steps = check_int(state["steps"], "the position's steps", error=DataError)
        shards = state["shards"]
        if shards is not None:
            shards = check_int(shards, "the position's shards", 1, error=DataError)
        self._epoch, self._done, self.shards = epoch, steps, shards

    def advance(self, steps: int) -> None:
        steps = check_int(steps, "the number of steps done", error=DataError)
        self.move_to(self._epoch, self._done + steps)

    def move_to(self, epoch: int, steps: int) -> None:
        super().move_to(epoch, steps if self.resumes_inside_epochs else 0)


def _takes_epoch(function: Callable[..., tf.data.Dataset]) -> bool:
    """Whether a function of the shard also takes the epoch.

    Raises:
        DataError: the function cannot be called with a shard.
    """
    try:
        signature = inspect.signature(function)
        takes_epoch = "epoch" in signature.parameters
        signature.bind(None, **({"epoch": 0} if takes_epoch else {}))
    except (TypeError, ValueError):
        raise DataError(
            f"function must take (shard) or (shard, epoch), got {shown(function)}; write"
            " `def data(shard): ... dataset.shard(shard.count, shard.index)`."
        ) from None
    return takes_epoch


class ShardBatches(PositionedBatches):
    """Global batches that consist of one batch of each task's own shard.

    Args:
        moves: the data is trained on, from its position. Otherwise epoch 0 is read.
    """

    def __init__(self, data: FunctionDataset, readers: Readers, *, moves: bool):
        self._readers = readers
        self.sharded = self._function = data
        dataset = data.rest_of_epoch(readers.shard, data.position[0] if moves else 0)
        steps, is_infinite = _agreed_length(dataset, readers)
        if data.takes_epoch and moves:  # other epochs may have more batches, or fewer
            steps = None
        spec, is_shared = dataset.element_spec, readers.shard.count > 1
        if is_shared:  # shards may have other sizes
            spec = tf.nest.map_structure(of_any_rows, spec)
        size = data.global_batch_size
        super().__init__(spec, steps=steps, batch_size=size, is_infinite=is_infinite)
        self.data = data if moves else None
        self.needs_row_count = self.reads_own_shard = is_shared
        self.has_order = not is_shared

    def parts(self, first: int, local: int, replicas: int, start: Position) -> tf.data.Dataset:
        shard = self._readers.shard
        dataset = self._function.rest_of_epoch(shard, *start)
        if self.data is not None:
            self.data.shards = shard.count
        if shard.count == 1:
            return parts_of_dataset(dataset)(first, local, replicas)
        return then_nothing(dataset, local, shard.count)

    def skip(self, iterator: Any, steps: int | None, report: Callable[[], object]) -> int:
        if not self.needs_row_count:
            return super().skip(iterator, steps, report)

        def any_has_data(parts: Any) -> bool:  # all tasks read the same number of batches
            return bool(self._readers.from_each(np.array(int(_has_data(parts)))).any())

        return super().skip(itertools.takewhile(any_has_data, iterator), steps, report)


def _agreed_length(dataset: tf.data.Dataset, readers: Readers) -> tuple[int | None, bool]:
    """(steps of an epoch on the worker with most steps, whether the data is endless).

    Raises:
        DataError: only some shards are endless. The examples of others would be used only once.
    """
    lengths = readers.from_each(dataset.cardinality().numpy())
    is_endless = lengths == tf.data.INFINITE_CARDINALITY
    if is_endless.all():
        return None, True
    if is_endless.any():
        ends, repeats = is_endless.argmin(), is_endless.argmax()
        raise DataError(
            f"The data of shard {ends} ends, but the data of shard {repeats} does not. Call"
            " .repeat() in the function for all shards, or for none."
        )
    return None if lengths.min() < 0 else int(lengths.max()), False


def then_nothing(dataset: tf.data.Dataset, local: int, readers: int) -> tf.data.Dataset:
    """Parts for the local replicas, followed by an endless sequence of parts without rows.

    Each part has 1 in place of the number of rows of its global batch, or 0 after the end: the
    tasks of a training agree in each step on whether a task has rows.
    """

    def marked(batches: tf.data.Dataset, is_real: int) -> tf.data.Dataset:
        def of_parts(*parts: Part) -> tuple[Part, ...]:
            flag = tf.constant(is_real, tf.int64)
            return tuple((rows * flag, flag, batch) for rows, _, batch in parts)

        return parts_of_dataset(batches, readers)(0, local, local).map(of_parts)

    one_row = tf.nest.map_structure(_one_row, dataset.element_spec)
    nothing = marked(tf.data.Dataset.from_tensors(one_row), 0)
    return marked(dataset, 1).concatenate(nothing.repeat())


def _has_data(parts: Any) -> bool:
    """Whether parts of `then_nothing`, for one replica or several, come before the end."""
    _, flags, _ = parts[0] if isinstance(parts[0], tuple) else parts
    return bool(tf.nest.flatten(flags, expand_composites=True)[0] > 0)


def _one_row(spec: tf.TypeSpec) -> tf.Tensor:
    """A batch of one row of zeros, for a replica without rows."""
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
