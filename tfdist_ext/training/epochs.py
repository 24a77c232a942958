"""The epochs of one `fit`, `evaluate` or `predict`: where they begin and end in the data.

Epochs follow the rules of Keras's EpochIterator. A seeded `shuffle` draws a new order whenever an
iterator over it is made, so `Epochs` makes iterators over a dataset exactly when Keras makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_ext.data.pipelines import without_autotune
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.inputs import GlobalBatches, parts_of_dataset
from tfdist_ext.training.protocols import BatchIterator, Structure
from tfdist_ext.user_frames import warn

__all__ = ["Epoch", "Epochs"]

_EMPTY = "the data must hold a batch, got none."


@dataclass(frozen=True)
class Epoch:
    """One epoch: its iterator and its number of global batches.

    Attributes:
        iterator: over the parts of this task's replicas.
        steps: global batches of the epoch; None: until the data ends.
        known_length: whether the data is known to have these steps.
        needs_row_count: whether the tasks have to agree in each step on what the global batch is.
        completed: global batches of the same epoch that are in the metrics already.
        advance: called with the number of batches that an execution used.
        batch_size: examples of a global batch; None if only reading tells.
    """

    iterator: BatchIterator
    steps: int | None
    known_length: bool
    needs_row_count: bool
    completed: int
    advance: Callable[[int], None]
    batch_size: int | None = None


class Epochs:
    """The epochs of one `fit`, `evaluate` or `predict`."""

    def __init__(
        self,
        batches: GlobalBatches,
        feed: Callable[[Any], Any],
        requested: int | None,
        inspect: Callable[[Structure], None] | None = None,
    ) -> None:
        """
        Args:
            feed: returns what the steps iterate over, from global batches.
            requested: steps of an epoch, if the caller gave a number.
            inspect: called with the first batch of a dataset (None if there is no batch) before
                the first step gets it. Nothing else is read for this.
        """
        requested = requested or None  # as in Keras, 0 means all steps of the data
        if batches.steps is None and batches.is_infinite and requested is None:
            raise TrainingError(
                "steps_per_epoch (in evaluate and predict: steps) must be given for infinite data,"
                " got None: such data has no end of an epoch."
            )
        if batches.steps == 0:
            raise TrainingError(_EMPTY)
        self._batches = batches
        self._feed = feed
        self._requested = requested
        self._inspect = inspect
        self._iterator: BatchIterator | None = None  # over the parts of the running pass
        self._source: Any = None  # a tf.data.Iterator over the dataset of the running pass
        self._fed: tuple[object, Any] = None, None  # what a dataset was fed for, and the input
        self._position = batches.begin()
        self._is_empty = self._position == 0  # as far as it was read
        self._seen: int | None = None
        self._completed = 0  # steps of the next epoch that are done

    @property
    def steps(self) -> int | None:
        """Global batches in an epoch; None until the first epoch is over."""
        return self._requested or self._batches.steps or self._seen

    @property
    def batch_size(self) -> int | None:
        """Examples in a global batch; None if only reading tells."""
        return self._batches.batch_size

    def reset(self) -> None:
        """Call the data's `on_epoch_end`, as Keras does before `fit` and before each `evaluate`."""
        self._batches.on_epoch_end()

    @contextlib.contextmanager
    def next(self) -> Iterator[Epoch]:
        """The next epoch. Calls the data's `on_epoch_begin`; `is_done` calls `on_epoch_end`."""
        batches, requested = self._batches, self._requested
        known = batches.steps is not None or batches.is_infinite
        completed, self._completed = self._completed, 0
        steps = requested = None if requested is None else max(requested - completed, 0)
        if batches.steps is not None:
            steps = self._move_on(batches.steps, requested)
            if requested is not None and steps < requested:
                self._warn_of_end(steps)
        batches.on_epoch_begin()
        try:
            yield Epoch(
                self._begin(steps),
                steps,
                known,
                batches.needs_row_count,
                completed,
                batches.advance,
                batches.batch_size or _batch_size_of(batches.dataset),
            )
        except BaseException:
            batches.on_epoch_end()  # stops workers that read ahead
            raise

    def _move_on(self, in_pass: int, requested: int | None) -> int:
        """Set the position after the next epoch; returns the steps of the epoch.

        An epoch of `requested` steps continues where the last one ended. The epoch in which a pass
        ends is short, and the next epoch starts a new pass.
        """
        left = in_pass - self._position
        steps = left if requested is None else min(requested, left)
        self._position = (self._position + steps) % in_pass
        return steps

    def _begin(self, steps: int | None) -> BatchIterator:
        """The iterator of an epoch: a new one, or that of the epoch before."""
        batches, dataset = self._batches, self._batches.dataset
        if dataset is None:
            self._iterator = self._iterator or iter(self._feed(batches))
            return self._iterator
        inspected = self._inspect is not None
        made_for = None
        if self._requested is not None or inspected:
            if self._requested is None or self._source is None:
                self._source = _without_prefetch(dataset)
            made_for = self._source, steps  # else iterating the same input again reads on
        if inspected or self._fed[1] is None or self._fed[0] != made_for:
            of_epoch = self._dataset_of_epoch(dataset, steps)
            fed = self._feed(replace(batches, parts_of=parts_of_dataset(of_epoch)))
            self._fed = (object() if inspected else made_for), fed
        return iter(self._fed[1])

    def _dataset_of_epoch(self, dataset: tf.data.Dataset, steps: int | None) -> tf.data.Dataset:
        """The global batches of an epoch.

        Reading ahead stops at the end of the epoch. Reading ahead into another repetition of the
        data would make iterators at unknown times.
        """
        inspect, self._inspect = self._inspect, None
        if inspect is None:
            return dataset if self._requested is None else _rest_of(self._source, steps)
        first = next(self._source, None)
        inspect(first)
        if first is None:
            return dataset
        rest = _rest_of(self._source, None if steps is None else steps - 1)
        return tf.data.Dataset.from_tensors(first).concatenate(rest)

    @property
    def can_begin_anywhere(self) -> bool:
        """Whether `begin_after` reads nothing of what it passes over."""
        return self._batches.from_step is not None and self._batches.steps is not None

    def begin_after(self, epochs: int, *, completed: int = 0) -> None:
        """Pass over epochs. Data that cannot begin anywhere is read.

        Args:
            completed: steps of the epoch after them, which are passed over, too. There may be
                some only if the data `can_begin_anywhere`.
        """
        batches = self._batches
        if batches.from_step is None or batches.steps is None:
            self._read_past(epochs)
            return
        passed = completed + sum(
            self._move_on(batches.steps, self._requested) for _ in range(epochs)
        )
        self._position = (self._position + completed) % batches.steps
        self._completed = completed
        self._batches = replace(batches, parts_of=batches.from_step(passed))

    def _read_past(self, epochs: int) -> None:
        """Read epochs as a training reads them: the order of examples may depend on it."""
        for _ in range(epochs):
            with self.next() as epoch:
                if not isinstance(epoch.iterator, Iterator):
                    return  # workers that read for themselves keep no common order
                steps = 0
                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    while epoch.steps is None or steps < epoch.steps:
                        next(epoch.iterator)
                        steps += 1
            self.is_done(epoch, steps, stopped=False)

    def begin_at_position(self, *, completed: int) -> None:
        """Begin where the data's own position is, `completed` steps of an epoch being done."""
        self._position = self._batches.begin()
        self._is_empty = self._position == 0
        self._completed = completed

    def rewind(self) -> None:
        """Begin the next epoch at the start of the data, so that validations see the same steps."""
        self.reset()
        if self._position != 0 or self._batches.steps is None:
            self._iterator = None
        self._position, self._source = 0, None

    def is_done(self, epoch: Epoch, steps: int, *, stopped: bool) -> bool:
        """Note the end of an epoch; returns whether all of its steps, or of the data, are done.

        Args:
            steps: steps that were done.
            stopped: a callback stopped the training in this epoch. Then the data's `on_epoch_end`
                is not called, as in Keras.
        """
        self._is_empty = self._is_empty and steps == 0
        if not stopped:
            self._batches.on_epoch_end()
        if epoch.steps is None or steps < epoch.steps:
            if stopped:
                self._iterator = None
            else:
                self.ended_after(steps)
            return not stopped
        if self._batches.steps is not None and self._position == 0:
            self._batches.ended()
            if not self._batches.is_infinite:
                self._iterator = None
            if self._batches.dataset is not None and not stopped:
                # Keras makes an iterator here. If the epochs have no number of steps, Keras makes
                # another one when the next epoch begins.
                self._source = _without_prefetch(self._batches.dataset)
        return True

    def ended_after(self, steps: int) -> None:
        """Note that the data ended after this many steps of an epoch of unknown length.

        Raises:
            TrainingError: the data is empty.
        """
        if self._is_empty and steps == 0:
            raise TrainingError(_EMPTY)
        if self._requested is not None and steps < self._requested:
            self._warn_of_end(steps)
        self._seen = steps
        self._iterator = self._source = None
        self._batches.ended()

    def _warn_of_end(self, steps: int) -> None:
        warn(
            f"the data ended after {steps} of the {self._requested} steps requested in this epoch."
            " Request fewer steps, or repeat the data with .repeat()."
        )


def _batch_size_of(dataset: tf.data.Dataset | None) -> int | None:
    """The rows of the batches that a dataset makes; None if only reading tells."""
    if dataset is None:
        return None
    variant = tf.data.experimental.to_variant(dataset)
    size = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
    return size if size > 0 else None


def _without_prefetch(dataset: tf.data.Dataset) -> tf.data.Iterator:
    """An iterator that reads nothing ahead."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    with tf.device("CPU:0"):
        # Deleting the iterator would wait for its tuner; see `without_autotune`.
        return iter(without_autotune(dataset).with_options(options))


@tf.autograph.experimental.do_not_convert
def _rest_of(iterator: tf.data.Iterator, steps: int | None) -> tf.data.Dataset:
    """The rest of an iterator, at most `steps` elements."""
    turns = tf.data.Dataset.range(2**62 if steps is None else steps)
    options = turns.map(lambda _: iterator.get_next_as_optional())
    there = options.take_while(lambda option: option.has_value())
    return there.map(lambda option: option.get_value())
