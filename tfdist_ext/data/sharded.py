"""ShardedDataset: data that is read in shards, and a position in it that can be saved."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist_ext.data.pipelines import data_errors_as_raised
from tfdist_ext.data.shards import ReadBy, Remainder, Shard
from tfdist_ext.data.sources import difference
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback


@filter_traceback
class ShardedDataset(abc.ABC):
    """Data for `fit`, `evaluate`, `predict` and custom loops, read in shards.

    In `fit`, each task reads its own shard. The datasets of `from_arrays`, `from_tfrecords` and
    `from_source` have the same order of examples for any number of tasks. With `from_dataset_fn`,
    a function returns the examples of each task.

    Attributes:
        resumes_inside_epochs: whether training can resume inside an epoch.
        shards: with `from_dataset_fn`, the number of shards in which the position counts batches;
            None if it is not known. A loop that calls `dataset` for a shard sets it.
    """

    resumes_inside_epochs = True
    shards: int | None = None
    _epoch = _done = 0

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The structure of a batch, with a `tf.TypeSpec` of batch dimension None per tensor."""

    @property
    @abc.abstractmethod
    def steps(self) -> int | None:
        """The number of global batches per epoch, or None if it is not known."""

    @property
    @abc.abstractmethod
    def global_batch_size(self) -> int | None:
        """The examples of a step over all tasks, or None if a function creates the batches."""

    @property
    def position(self) -> tuple[int, int]:
        """The current epoch, and how many of its examples are read.

        For data from a function, the second number counts batches.
        """
        return self._epoch, self._done

    @property
    def steps_done(self) -> int:
        """The number of global batches of the current epoch that are read.

        Raises:
            TrainingError: the position is inside a global batch, after a training with another
                global batch size.
        """
        return self._done

    @abc.abstractmethod
    def dataset(
        self,
        shard: ReadBy | None = None,
        epoch: int | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
    ) -> tf.data.Dataset:
        """Returns the part of a shard of each global batch of an epoch.

        Part k of all shards, in the order of the shards, is global batch k. If a global batch has
        fewer examples than there are shards, some parts are empty.

        Args:
            shard: `Shard(index, count)`, or an argument of `Shard.of`. The default is all data.
            epoch: the epoch, which determines the order. The default is the current epoch, which
                starts at the current position. Other epochs start at their beginning.
            remainder: what to do if a global batch does not divide evenly. With KEEP, some parts
                have one more example. With DROP, the last examples are left out, and so is a last
                batch with fewer examples than shards. With PAD, all parts have
                ceil(global_batch_size / shards) rows, the added rows have sample weight 0, and
                elements are (x, y, sample_weight). Data from a function supports only KEEP.

        Raises:
            DataError: the shard or epoch is invalid, PAD is used for data without targets, the
                function does not return a dataset of batches, or the position is inside an epoch of
                data from a function with another number of shards.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the position and a fingerprint of the data as a dict for JSON.

        `fit` advances the position, and saves it in checkpoints.
        """

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restores the position from a state.

        Data with one order for all tasks can resume on any number of tasks.

        Raises:
            DataError: the state is invalid, or belongs to other data or another seed.
        """

    @abc.abstractmethod
    def advance(self, steps: int) -> None:
        """Moves the position forward by a number of global batches.

        At the end of an epoch, the position moves to the start of the next epoch. For data from a
        function, call `end_epoch` at the end of an epoch.

        Raises:
            DataError: `steps` is not an integer, or is negative.
        """

    def move_to(self, epoch: int, steps: int) -> None:
        """Sets the position to an epoch, and a number of its global batches that are read."""
        self._epoch, self._done = epoch, steps

    def batches(
        self,
        strategy: tf.distribute.Strategy | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
    ) -> Iterator[Any]:
        """Yields the remaining batches of the epoch, for a custom loop.

        Each batch advances the position. A state that you save after the step of a batch therefore
        resumes at the next batch. `for batch in data` is the same as `data.batches()`. To read a
        batch without moving the position, use `next(iter(data.dataset()))`.

        Args:
            strategy: if given, the batches are per-replica values for `strategy.run`. By default,
                they are whole global batches.
            remainder: what to do if a global batch does not divide evenly over the replicas. Data
                from a function supports only KEEP.
        """
        epoch = self._epoch
        with data_errors_as_raised():
            for batch in (
                self.dataset(remainder=remainder)
                if strategy is None
                else self.distributed(strategy, remainder)
            ):
                self.shards = 1  # also on several replicas, which split its batches
                self.advance(1)
                yield batch
        if self._epoch == epoch:  # the number of batches was not known before
            self.end_epoch()

    @abc.abstractmethod
    def distributed(
        self, strategy: tf.distribute.Strategy, remainder: Remainder = Remainder.KEEP
    ) -> Any:
        """Returns the remaining batches of the epoch as per-replica batches.

        Raises:
            DataError: the strategy uses parameter servers.
        """

    def end_epoch(self) -> None:
        """Moves the position to the start of the next epoch."""
        self.move_to(self._epoch + 1, 0)

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Global batches of an epoch."""
        if self.steps is None:
            raise TypeError("the number of global batches is known only after reading them")
        return self.steps


def check_state(state: object, current: Mapping[str, Any]) -> None:
    """Raise DataError unless a state has the fields and the fingerprint of the current one."""
    if not isinstance(state, Mapping) or state.keys() != current.keys():
        raise DataError(
            f"state must have the fields {', '.join(current)}, got {shown(state)}. Pass the result"
            " of state() of the same data."
        )
    if changed := difference(state["fingerprint"], current["fingerprint"]):
        raise DataError(
            f"the data has changed since this position was saved: {changed}. Use the original"
            " data, or start again without the saved position."
        )


def sharded_already(dataset: tf.data.Dataset, shard: Shard) -> tf.data.Dataset:
    """The dataset with options, so that tf.distribute does not shard a shard again."""
    policies = tf.data.experimental.AutoShardPolicy
    policy = policies.OFF if shard.count > 1 else policies.DATA
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def check_reads_here(strategy: tf.distribute.Strategy) -> None:
    """Raise DataError if the steps of a strategy run in other processes."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise DataError(
            "the steps of ParameterServerStrategy run on the workers, so this process cannot read"
            " their batches. Train with tfd.distribute(...).fit(data). For a custom loop, make a"
            " tf.data pipeline in the function of ClusterCoordinator.create_per_worker_dataset, and"
            " split its files with tfd.data.shard_files."
        )
