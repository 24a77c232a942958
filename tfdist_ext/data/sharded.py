"""ShardedDataset: data that is read in shards, and a position in it that can be saved."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_ext.data.pipelines import data_errors_as_raised
from tfdist_ext.data.shards import ReadBy, Remainder, Shard
from tfdist_ext.errors import DataError
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Batches", "ShardedDataset", "check_reads_here", "sharded_already"]


@filter_traceback
class ShardedDataset(abc.ABC):
    """Data for `fit`, `evaluate`, `predict` and custom loops, on any cluster.

    It goes into `fit` as it is; each task then reads its own part. What it is made by says what the
    parts are: `from_arrays`, `from_tfrecords` and `from_source` have one order of examples for any
    number of tasks; `from_dataset_fn` leaves it to a function what each task reads.
    """

    _epoch = _done = 0

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The structure of a batch, batch dimension None."""

    @property
    @abc.abstractmethod
    def steps(self) -> int | None:
        """Global batches of an epoch, a last smaller one included; None if only reading tells."""

    @property
    @abc.abstractmethod
    def global_batch_size(self) -> int | None:
        """Examples of a step, over all tasks; None where the batches come as they are."""

    @property
    def position(self) -> tuple[int, int]:
        """The epoch of the position, and how much of it is behind.

        That is counted in examples where there is one order of them, else in batches of each task.
        """
        return self._epoch, self._done

    @property
    def steps_done(self) -> int:
        """Global batches of the position's epoch that are done."""
        return self._done

    @property
    def resumes_inside_epochs(self) -> bool:
        """Whether a position may be anywhere; else it is at the beginning of an epoch."""
        return True

    @abc.abstractmethod
    def dataset(
        self,
        shard: ReadBy | None = None,
        epoch: int | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
    ) -> tf.data.Dataset:
        """This shard's part of each global batch of an epoch.

        Args:
            shard: `Shard(index, count)`, or whose it is: what `Shard.of` takes. By default, all
                there is.
            epoch: whose order; by default that of the position, from the position on. All other
                epochs begin at their start.
            remainder: of a global batch that does not divide by the shards.

        Raises:
            DataError: an invalid shard or epoch.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """The position, as JSON fields. `fit` moves it on, and keeps it in its checkpoints."""

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            DataError: it is no state, or not one of this data.
        """

    @abc.abstractmethod
    def advance(self, steps: int) -> None:
        """Say that so many more global batches are done.

        Raises:
            DataError: a number that is no whole one from 0.
        """

    def batches(
        self,
        strategy: tf.distribute.Strategy | None = None,
        *,
        remainder: Remainder = Remainder.KEEP,
        progress: bool = True,
    ) -> Batches:
        """The rest of the position's epoch for a custom loop, which moves the position on.

        `for batch in data` is the same with its defaults. To look at a batch and stay where it is,
        take `next(iter(data.dataset()))`.

        Args:
            strategy: batches come as `strategy.run` takes them, each replica's part on its device;
                by default they are whole global batches.
            remainder: of global batches that do not divide by the number of replicas. With PAD,
                all parts have the same size, and added rows sample weight 0; only ordered data can.
            progress: show Keras's progress bar, on the task that is the chief.
        """
        return Batches(self, strategy, remainder, progress)

    @abc.abstractmethod
    def distributed(
        self, strategy: tf.distribute.Strategy, remainder: Remainder = Remainder.KEEP
    ) -> Any:
        """The rest of the position's epoch, each replica's part on its device, to iterate over.

        Raises:
            DataError: a strategy whose workers read for themselves.
        """

    def end_epoch(self) -> None:
        """Move the position to the beginning of the next epoch, whatever is left of this one."""
        self._epoch, self._done = self._epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches())

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Global batches of an epoch."""
        if self.steps is None:
            raise TypeError("the number of global batches is known only after reading them")
        return self.steps


@dataclass(frozen=True)
class Batches:
    """The rest of an epoch, batch by batch.

    A batch counts as done when it is handed out: a state that is saved in the body of the loop,
    after the step, resumes after it.

    Attributes:
        data: its position moves on with each batch.
        strategy: batches come as its `run` takes them; None: as the dataset has them.
        remainder: rows that do not divide by the shards.
        progress: show a progress bar.
    """

    data: ShardedDataset
    strategy: tf.distribute.Strategy | None
    remainder: Remainder
    progress: bool

    def __iter__(self) -> Iterator[Any]:
        data = self.data
        epoch = data.position[0]
        batches: Any
        if self.strategy is None:
            batches = data.dataset(remainder=self.remainder)
        else:
            batches = data.distributed(self.strategy, self.remainder)
        bar = self._bar()
        with data_errors_as_raised():
            for batch in batches:
                data.advance(1)
                yield batch
                bar(1)
        bar(0)
        if data.position[0] == epoch:  # only reading could tell that this is its end
            data.end_epoch()

    def _bar(self) -> Callable[[int], None]:
        """The progress bar's callback: gets each step that is done; 0 at the end of the epoch."""
        strategy = self.strategy
        if not self.progress or not (strategy is None or strategy.extended.should_checkpoint):
            return lambda more: None
        import keras  # costly, and not everybody shows a bar

        bar = keras.utils.Progbar(self.data.steps)
        done = self.data.steps_done

        def show(more: int) -> None:
            nonlocal done
            done += more
            if more or bar.target is None:
                bar.update(done, finalize=True if not more else None)

        return show


def sharded_already(dataset: tf.data.Dataset, shard: Shard) -> tf.data.Dataset:
    """With options that keep tf.distribute from sharding a shard again, and from AUTO.

    All of the data may still be cut: by DATA, each worker then uses its rows of each batch.
    """
    policies = tf.data.experimental.AutoShardPolicy
    policy = policies.OFF if shard.count > 1 else policies.DATA
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def check_reads_here(strategy: object) -> None:
    """
    Raises:
        DataError: no strategy, or one whose workers run steps in other processes.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise DataError(
            f"strategy must be a tf.distribute.Strategy, got {strategy!r}; create_strategy() makes"
            " one."
        )
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise DataError(
            "strategy must run its steps in this process, got ParameterServerStrategy, whose steps"
            " run on the workers: train with tfd.distribute(...).fit(data), or read"
            " data.dataset(Shard(index, workers)) in ClusterCoordinator.create_per_worker_dataset."
        )
