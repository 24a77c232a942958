"""Global batches of a ShardedDataset of `tfd.data`, from its own position.

If a function of the shard makes the data of each task, the tasks agree in each step on whether
there is a batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.data.batches import Batches, Readers
from tfdist_ext.data.function import FunctionDataset
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.pipelines import Part, parts_of_dataset
from tfdist_ext.errors import TrainingError


class OrderedBatches(Batches):
    """Global batches of examples in one order, epoch after epoch.

    Args:
        moves: the data is trained on, from its position. Otherwise it is read in order.
    """

    def __init__(self, data: OrderedDataset, *, moves: bool):
        super().__init__(
            data.element_spec,
            steps=data.steps,
            batch_size=data.global_batch_size,
            is_infinite=True,
        )
        self.needs_row_count = data.loses_examples
        self.data = data if moves else None
        self._ordered = data if moves else data.in_order()
        self._state = data.state()

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, **_named(self._state)}

    @property
    def position(self) -> int:
        data = self._ordered
        epoch, examples = data.position
        if examples % data.global_batch_size:
            raise TrainingError(
                f"The position of the data is after {examples} examples of an epoch, inside a"
                f" global batch of {data.global_batch_size}. Resume with the global batch size of"
                " the earlier training."
            )
        return epoch * data.steps + data.steps_done

    def parts(self, first: int, local: int, replicas: int, start: int) -> tf.data.Dataset:
        counted = not self.needs_row_count
        return self._ordered.parts(first, local, replicas, start, counted=counted)


class ShardBatches(Batches):
    """Global batches that consist of one batch of each task's own shard.

    Args:
        moves: the data is trained on, from its position. Otherwise epoch 0 is read.
    """

    def __init__(self, data: FunctionDataset, readers: Readers, *, moves: bool):
        self._state = data.state()
        self._shard = readers.shard
        self._function = data
        dataset = data.whole_epoch(readers.shard, data.position[0] if moves else 0)
        steps, is_infinite = _agreed_length(dataset, readers)
        if data.takes_epoch and moves:  # other epochs may have more batches, or fewer
            steps = None
        super().__init__(
            dataset.element_spec,
            steps=steps,
            batch_size=data.global_batch_size,
            is_infinite=is_infinite,
        )
        self.data = data if moves else None
        self.needs_row_count = self.reads_own_shard = readers.shard.count > 1
        self.has_order = not self.reads_own_shard

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, **_named(self._state)}

    @property
    def position(self) -> int:
        return 0 if self.data is None else self.data.steps_done

    def parts(self, first: int, local: int, replicas: int, start: int) -> tf.data.Dataset:
        """The parts from the data's own position: each iterator reads one epoch of the data."""
        shard, data = self._shard, self._function
        dataset = data.whole_epoch(shard) if self.data is None else data.dataset(shard)
        if shard.count == 1:
            return parts_of_dataset(dataset)(first, local, replicas)
        return then_nothing(dataset, local, shard.count)

    def pass_ended(self) -> None:
        if self.data is not None:
            self.data.end_epoch()


def _named(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} in the data's state": value for name, value in state.items()}


def _agreed_length(dataset: tf.data.Dataset, readers: Readers) -> tuple[int | None, bool]:
    """(steps of an epoch on the worker with most steps, whether one worker has endless data)."""
    lengths = readers.from_each(dataset.cardinality().numpy())
    if (lengths == tf.data.INFINITE_CARDINALITY).any():
        return None, True
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
