"""The epochs of one `fit`, `evaluate` or `predict`: where they begin and end in the data.

They follow Keras's rules (`Epochs`). A seeded `shuffle` draws a new order whenever an iterator over
it is made. So `DatasetPasses` makes iterators exactly when Keras's EpochIterator makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfdist_ext.data.pipelines import without_autotune
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.inputs import GlobalBatches, parts_of_dataset
from tfdist_ext.training.protocols import BatchIterator, Epoch, Structure
from tfdist_ext.user_frames import warn

__all__ = ["DatasetPasses", "Epochs", "steps_of_epoch"]


_EMPTY = "the data must hold a batch, got none."


def steps_of_epoch(position: int, in_pass: int, requested: int | None) -> tuple[int, int]:
    """(steps of the next epoch, position in the pass after it).

    An epoch of `requested` steps continues where the last one ended. The epoch in which a pass ends
    is short, and the next epoch starts a new pass.
    """
    left = in_pass - position
    steps = left if requested is None else min(requested, left)
    return steps, (position + steps) % in_pass


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
            inspect: see `DatasetPasses`; called only if each task reads whole global batches.
        """
        requested = requested or None  # as Keras: 0 is all there is
        if batches.steps is None and batches.is_infinite and requested is None:
            raise TrainingError(
                "steps_per_epoch (in evaluate and predict: steps) must be given for infinite data,"
                " got None: such data has no end of an epoch."
            )
        if batches.steps == 0:
            raise TrainingError(_EMPTY)
        self._batches = batches
        self._requested = requested
        self._feed = feed
        self._passes = None
        if batches.dataset is not None:
            in_steps = requested is not None
            self._passes = DatasetPasses(batches.dataset, in_steps=in_steps, inspect=inspect)
        self._fed_from: tf.data.Dataset | None = None  # a dataset of the passes
        self._fed: Any = None  # what `feed` made from it
        self._iterator: BatchIterator | None = None
        self._position = self._start = batches.begin()
        self._seen: int | None = None
        self._fresh = True
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
        batches, in_pass = self._batches, self._batches.steps
        known = in_pass is not None or batches.is_infinite
        completed, self._completed = self._completed, 0
        requested = steps = None if self._requested is None else max(self._requested - completed, 0)
        if in_pass is not None:
            steps, after = steps_of_epoch(self._position, in_pass, requested)
            if requested is not None and steps < requested:
                self._warn_of_end(steps)
        batches.on_epoch_begin()
        try:
            self._begin(steps, known)
            yield Epoch(
                self._iterator,
                steps,
                known,
                batches.needs_row_count,
                completed,
                batches.advance,
                None if batches.arrays is None else batches.batch_size,
            )
        except BaseException:
            batches.on_epoch_end()  # stops workers that read ahead
            raise
        finally:
            if in_pass is not None:
                self._position = after

    def _begin(self, steps: int | None, known_length: bool) -> None:
        """Make the iterator of an epoch, or keep the one of the epoch before."""
        batches = self._batches
        if self._passes is not None:
            self._fresh = self._passes.begins_a_pass()
            dataset = self._passes.epoch(steps, known_length=known_length)
            if dataset is not self._fed_from:
                self._fed_from, parts_of = dataset, parts_of_dataset(dataset)
                untuned = replace(batches, parts_of=lambda *n: without_autotune(parts_of(*n)))
                self._fed = self._feed(untuned)
            self._iterator = iter(self._fed)
            return
        begins_a_pass = self._position == 0 and (
            self._requested is None or batches.steps is not None
        )
        self._fresh = self._iterator is None or (begins_a_pass and not batches.is_infinite)
        if self._fresh:
            self._iterator = iter(self._feed(batches))

    @property
    def can_begin_anywhere(self) -> bool:
        """Whether `begin_after` reads nothing of what it passes over."""
        return self._batches.from_step is not None and self._batches.steps is not None

    def begin_after(self, epochs: int, *, completed: int = 0) -> bool:
        """Pass over epochs without reading; returns False, with no effect, if that is impossible.

        Args:
            completed: steps of the epoch after them, which are passed over, too.
        """
        batches = self._batches
        if batches.from_step is None or batches.steps is None:
            return False
        passed = completed
        for _ in range(epochs):
            steps, self._position = steps_of_epoch(self._position, batches.steps, self._requested)
            passed += steps
        self._position = (self._position + completed) % batches.steps
        self._completed = completed
        self._batches = replace(batches, parts_of=batches.from_step(passed))
        return True

    def begin_at_position(self, *, completed: int) -> None:
        """Begin where the data's own position is, `completed` steps of an epoch being done."""
        self._position = self._start = self._batches.begin()
        self._completed = completed

    def rewind(self) -> None:
        """Begin the next epoch at the start of the data, so that validations see the same steps."""
        self.reset()
        if self._passes is not None:
            self._position = 0
            self._passes.restart()
        elif self._position != 0 or (self._requested is not None and self._batches.steps is None):
            self._position = 0
            self._iterator = None

    def is_done(self, epoch: Epoch, steps: int, *, stopped: bool) -> bool:
        """Note the end of an epoch; returns whether all of its steps, or of the data, are done.

        Args:
            steps: steps that were done.
            stopped: a callback stopped the training in this epoch. Then the data's `on_epoch_end`
                is not called, as in Keras.
        """
        if not stopped:
            self._batches.on_epoch_end()
        if epoch.steps is None or steps < epoch.steps:
            if not stopped:
                self.ended_after(steps)
            return not stopped
        if self._batches.steps is not None and self._position == 0:
            self._batches.ended()
            if self._passes is not None and not stopped:
                self._passes.pass_is_done()
        return True

    def ended_after(self, steps: int) -> None:
        """Note that the data ended after this many steps of an epoch of unknown length.

        Raises:
            TrainingError: the data is empty.
        """
        if steps == 0 and self._seen is None and self._fresh and self._start == 0:
            raise TrainingError(_EMPTY)
        if self._requested is not None and steps < self._requested:
            self._warn_of_end(steps)
        self._seen = steps
        self._iterator = None
        if self._passes is not None:
            self._passes.restart()
        self._batches.ended()

    def _warn_of_end(self, steps: int) -> None:
        warn(
            f"the data ended after {steps} of the {self._requested} steps requested in this epoch."
            " Request fewer steps, or repeat the data with .repeat()."
        )


class DatasetPasses:
    """The passes of one `fit`, `evaluate` or `predict` over a dataset, epoch by epoch.

    Args:
        dataset: one pass of global batches, or an infinite dataset.
        in_steps: epochs have a number of steps, and may end in the middle of a pass.
        inspect: called with the first batch (None if there is no batch) before the first step gets
            it. Nothing else is read for this.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        in_steps: bool,
        inspect: Callable[[Structure], None] | None = None,
    ):
        # Each epoch deletes an iterator, which would wait for its tuner; see `without_autotune`.
        self._dataset = without_autotune(dataset)
        self._in_steps = in_steps
        self._inspect = inspect
        self._iterator: Any = None  # a tf.data.Iterator
        self._rest: tf.data.Dataset | None = None
        self._rest_of: tuple[tf.data.Iterator | None, int | None] = (None, None)

    def begins_a_pass(self) -> bool:
        """Whether the next epoch makes an iterator of its own."""
        return self._iterator is None or not self._in_steps

    def epoch(self, steps: int | None, *, known_length: bool) -> tf.data.Dataset:
        """The global batches of the next epoch; the same dataset may serve several epochs.

        Reading ahead stops at the end of the epoch. Reading ahead into another repetition of the
        data would make iterators at unknown times.

        Args:
            steps: batches in the epoch; None: all that are left.
            known_length: whether the data is known to have these batches.
        """
        if not self._in_steps and self._inspect is None:
            return self._dataset
        if self.begins_a_pass():
            self._iterator = self._new_iterator()
        if self._inspect is None:
            if self._rest_of != (self._iterator, steps):  # else iterating again reads on
                self._rest = _rest_of(self._iterator, steps, known_length)
                self._rest_of = self._iterator, steps
            return self._rest
        inspect, self._inspect = self._inspect, None
        first = next(self._iterator, None)
        inspect(first)
        if first is None:
            return self._dataset
        left = None if steps is None else steps - 1
        rest = _rest_of(self._iterator, left, known_length)
        return tf.data.Dataset.from_tensors(first).concatenate(rest)

    def pass_is_done(self) -> None:
        """Make the iterator of the next pass, as Keras's fit does at this point.

        In epochs without a number of steps, Keras makes another one when the next epoch begins.
        """
        self._iterator = self._new_iterator()

    def restart(self) -> None:
        """Begin the next epoch at the start of the data."""
        self._iterator = None

    def _new_iterator(self) -> tf.data.Iterator:
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it reads ahead, too
        with tf.device("CPU:0"):
            return iter(self._dataset.with_options(options))


@tf.autograph.experimental.do_not_convert
def _rest_of(iterator: tf.data.Iterator, steps: int | None, known_length: bool) -> tf.data.Dataset:
    """The rest of an iterator, at most `steps` elements."""
    turns = tf.data.Dataset.range(2**62 if steps is None else steps)
    if known_length:
        return turns.map(lambda _: iterator.get_next())
    options = turns.map(lambda _: iterator.get_next_as_optional())
    there = options.take_while(lambda option: option.has_value())
    return there.map(lambda option: option.get_value())
