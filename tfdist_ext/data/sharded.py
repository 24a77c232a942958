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

__all__ = ["ShardedDataset", "check_reads_here", "check_state", "sharded_already"]


@filter_traceback
class ShardedDataset(abc.ABC):
    """Data for `fit`, `evaluate`, `predict` and custom loops, on any cluster.

    In `fit` each task reads its own part. `from_arrays`, `from_tfrecords` and `from_source` give
    one order of examples for any number of tasks; with `from_dataset_fn` a function decides what
    each task reads.
    """

    _epoch = _done = 0

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The structure of a batch, batch dimension None."""

    @property
    @abc.abstractmethod
    def steps(self) -> int | None:
        """The global batches in an epoch, including a smaller last one; None if unknown."""

    @property
    @abc.abstractmethod
    def global_batch_size(self) -> int | None:
        """The examples per step over all tasks; None if a function determines the batches."""

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the examples (of ordered data) or batches in it that are done."""
        return self._epoch, self._done

    @property
    def steps_done(self) -> int:
        """The number of global batches that are done in the current epoch."""
        return self._done

    @property
    def resumes_inside_epochs(self) -> bool:
        """Whether a position can be inside an epoch, not only at its start."""
        return True

    @abc.abstractmethod
    def dataset(
        self,
        shard: ReadBy | None = None,
        epoch: int | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
    ) -> tf.data.Dataset:
        """Returns this shard's part of each global batch in an epoch.

        The parts of step k, in shard order, are global batch k. If a batch has fewer examples than
        there are shards, some parts are empty.

        Args:
            shard: `Shard(index, count)`, or what `Shard.of` takes. By default, all of the data.
            epoch: determines the order; by default the epoch of the position. That epoch begins at
                the position, all others at their start.
            remainder: of a global batch that does not divide by the shards. KEEP: some parts have
                one example more. DROP: the last examples are left out, and a last batch of fewer
                examples than shards altogether. PAD: all parts of all steps have
                ceil(global_batch_size / shards) rows, and the added rows have sample weight 0;
                elements are (x, y, sample_weight). Data made by a function takes KEEP only.

        Raises:
            DataError: an invalid shard or epoch; PAD for data without targets; a function that
                returns no dataset of batches; a position inside an epoch of data made by a
                function, counted with another number of shards.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the position and a fingerprint of the data, as JSON fields.

        `fit` advances the position and saves it in its checkpoints.
        """

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from a state. Ordered data can resume on any number of tasks.

        Raises:
            DataError: no state, or a state of other data or another seed; the error names the
                difference.
        """

    @abc.abstractmethod
    def advance(self, steps: int) -> None:
        """Moves the position forward by a number of global batches.

        The end of an epoch of ordered data is the start of the next. An epoch of data made by a
        function ends with `end_epoch`.

        Raises:
            DataError: the number is not an integer from 0.
        """

    def batches(
        self,
        strategy: tf.distribute.Strategy | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
    ) -> Iterator[Any]:
        """Yields the remaining batches of the epoch, for a custom loop.

        Each batch that the loop gets advances the position, so a state that is saved in the body of
        the loop, after the step, resumes after the batch. `for batch in data` is the same with the
        defaults. `next(iter(data.dataset()))` reads a batch and leaves the position.

        Args:
            strategy: batches are per-replica batches for `strategy.run`; by default they are whole
                global batches.
            remainder: of global batches that do not divide by the number of replicas; data made by
                a function takes KEEP only.
        """
        epoch = self._epoch
        with data_errors_as_raised():
            for batch in (
                self.dataset(remainder=remainder)
                if strategy is None
                else self.distributed(strategy, remainder)
            ):
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
            DataError: a strategy whose steps run in other processes.
        """

    def end_epoch(self) -> None:
        """Moves the position to the start of the next epoch."""
        self._epoch, self._done = self._epoch + 1, 0

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
            " their batches. Train with tfd.distribute(...).fit(data), or read"
            " data.dataset(Shard(index, workers)) in ClusterCoordinator.create_per_worker_dataset."
        )
