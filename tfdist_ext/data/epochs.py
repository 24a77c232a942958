"""Epochs: where each epoch of a `fit`, `evaluate` or `predict` begins and ends in the data.

The rules are those of Keras's EpochIterator:

- Without a number of steps, an epoch is a pass over the data.
- With a number of steps, an epoch continues where the last one has ended. The epoch in which a pass
  ends is short, and the next epoch begins a new pass.
- If only reading tells the length of a pass, the pass ends when the iterator ends.

`Epochs` counts the steps. `Iterators` and `KerasIterators` make the iterators of epochs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext.data.batches import Batches, BatchIterator, Feed
from tfdist_ext.data.pipelines import Structure
from tfdist_ext.errors import TrainingError
from tfdist_ext.user_frames import warn

EMPTY = "The dataset is empty: it produced no batch. Check its filters and steps."


@dataclass(frozen=True)
class Epoch:
    """One epoch: its iterator and its number of global batches.

    Attributes:
        batches: the data.
        iterator: over the parts of this task's replicas.
        steps: global batches of the epoch; None: until the data ends.
        completed: steps of this epoch that ran before the job resumed.
    """

    batches: Batches
    iterator: BatchIterator
    steps: int | None
    completed: int


class Epochs:
    """The epochs of one `fit`, `evaluate` or `predict`.

    Args:
        feed: returns what the steps iterate over.
        requested: steps of an epoch, if the caller gave a number.
        inspect: called with the first batch of a dataset (None if there is no batch) before the
            first step gets it. Nothing else is read for this.

    Raises:
        TrainingError: infinite data without a number of steps, or no data.
    """

    def __init__(
        self,
        batches: Batches,
        feed: Feed,
        requested: int | None,
        inspect: Callable[[Structure], None] | None = None,
    ) -> None:
        # As in Keras, 0 means all steps of the data.
        requested = min(filter(None, [requested, keras.config.max_steps_per_epoch()]), default=None)
        if batches.steps is None and batches.is_infinite and requested is None:
            raise TrainingError(
                "The data is infinite, so an epoch has no end. Pass steps_per_epoch to `fit`, or"
                " steps to `evaluate` and `predict`."
            )
        if batches.steps == 0:
            raise TrainingError(EMPTY)
        self._batches = batches
        self._requested = requested
        self._iterators = batches.iterators(feed, in_pieces=requested is not None, inspect=inspect)
        self._begin_at(batches.position)

    def _begin_at(self, start: int, *, completed: int = 0) -> None:
        """Begins the next epoch at a global batch, counted from the first pass.

        Args:
            completed: global batches of the epoch that are done.
        """
        self._iterators.start = start
        self._position = start % self._batches.steps if self._batches.steps else start  # in a pass
        self._longest = self._position  # steps of the longest epoch so far
        self._completed = completed

    @property
    def steps(self) -> int | None:
        """Global batches in an epoch; None if only reading tells."""
        return self._requested or self._batches.steps

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sizes by name, of data without a state; None if only reading tells."""
        batches, steps = self._batches, self.steps
        if batches.data is not None:
            return {}
        sizes = {"batch_size": batches.batch_size, "number of examples": batches.examples}
        return {n: size and int(size) for n, size in {**sizes, "steps per epoch": steps}.items()}

    @property
    def resumes_inside(self) -> bool:
        """Whether a training can resume inside an epoch."""
        data = self._batches.data
        if data is not None:
            return data.resumes_inside_epochs
        return self._batches.can_begin_anywhere and self._batches.steps is not None

    def state(self) -> dict[str, Any] | None:
        """Returns the state of the data, for a checkpoint; None of data without a state."""
        return None if self._batches.data is None else self._batches.data.state()

    def resume(
        self, epochs: int, completed: int, state: dict[str, Any] | None, *, reads: bool
    ) -> None:
        """Begins where a checkpoint was saved.

        Args:
            epochs: completed epochs.
            completed: completed steps of the next epoch.
            state: of the data; None if the job before had data without a state.
            reads: whether to read the epochs of data that can only be read from its start.
        """
        data = self._batches.data
        if data is not None:
            if state is not None:
                data.restore(state)
            else:
                for _ in range(epochs):
                    data.end_epoch()
            self._begin_at(self._batches.position, completed=completed)
        elif reads and self.resumes_inside:
            passed = 0
            for _ in range(epochs):
                passed += self._steps_at(passed, self._requested)
            self._begin_at(passed + completed, completed=completed)
        elif reads and self._batches.has_order:
            self._read_past(epochs)

    def reset(self) -> None:
        """Calls the data's `on_epoch_end`, as Keras does before `fit` and `evaluate`."""
        self._batches.on_epoch_end()

    def rewind(self) -> None:
        """Begins the next epoch at the start of the data."""
        self.reset()
        if self._position or self._batches.steps is None or not self._batches.is_infinite:
            self._iterators.forget()
        self._position = 0

    @contextlib.contextmanager
    def next(self) -> Iterator[Epoch]:
        """The next epoch. Calls the data's `on_epoch_begin`; `end_epoch` calls `on_epoch_end`."""
        batches = self._batches
        completed, self._completed = self._completed, 0
        steps = None if self._requested is None else max(self._requested - completed, 0)
        if batches.steps is not None:
            requested, steps = steps, self._steps_at(self._position, steps)
            self._position = (self._position + steps) % batches.steps
            if requested is not None and steps < requested:
                self._warn_of_end(steps)
        batches.on_epoch_begin()
        try:
            yield Epoch(batches, self._iterators.of_epoch(steps), steps, completed)
        except BaseException:
            batches.on_epoch_end()  # stops workers that read ahead
            raise

    def _steps_at(self, position: int, requested: int | None) -> int:
        """The steps of an epoch that begins at a global batch, in passes of a known length."""
        assert self._batches.steps is not None
        left = self._batches.steps - position % self._batches.steps
        return left if requested is None else min(requested, left)

    def end_epoch(self, epoch: Epoch, steps: int, *, stopped: bool) -> None:
        """Ends an epoch.

        Args:
            steps: steps that were done.
            stopped: a callback stopped the training in this epoch. Then the data's `on_epoch_end`
                is not called, as in Keras.

        Raises:
            TrainingError: the data is empty.
        """
        batches = self._batches
        longest, self._longest = self._longest, max(self._longest, steps)
        if not stopped:
            batches.on_epoch_end()
        if epoch.steps is None or steps < epoch.steps:  # the iterator has ended
            self._iterators.forget()
            if stopped:
                return
            if self._longest == 0:
                raise TrainingError(EMPTY)
            if self._requested is not None and steps < self._requested:
                self._warn_of_end(steps)
            elif batches.reads_once and steps < longest:
                warn(
                    f"the generator has ended: this epoch had {steps} steps, an earlier one"
                    f" {longest}. Pass steps_per_epoch, and yield the batches of all epochs."
                )
            batches.pass_ended()
        elif batches.steps is not None and self._position == 0:
            batches.pass_ended()
            if not stopped:
                self._iterators.pass_ended()

    def _warn_of_end(self, steps: int) -> None:
        warn(
            f"the data ended after {steps} of the {self._requested} steps requested in this epoch."
            " Request fewer steps, or repeat the data with .repeat()."
        )

    def _read_past(self, epochs: int) -> None:
        """Reads epochs as a training reads them: the order of examples may depend on it."""
        for _ in range(epochs):
            with self.next() as epoch:
                steps = 0
                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    while epoch.steps is None or steps < epoch.steps:
                        next(epoch.iterator)
                        steps += 1
            self.end_epoch(epoch, steps, stopped=False)
