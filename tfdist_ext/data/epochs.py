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

from tfdist_ext.data.batches import (
    Batches,
    BatchIterator,
    Feed,
    Inspect,
    Position,
    PositionedBatches,
)
from tfdist_ext.errors import TrainingError
from tfdist_ext.user_frames import warn

EMPTY = "The dataset is empty: it produced no batch. Check its filters and steps."


@dataclass
class Epoch:
    """One epoch: its iterator and its number of global batches.

    Attributes:
        epochs: the epochs of the call.
        batches: the data.
        iterator: over the parts of this task's replicas.
        steps: global batches of the epoch; None: until the data ends.
        completed: steps of this epoch that ran before the job resumed.
    """

    epochs: Epochs
    batches: Batches
    iterator: BatchIterator
    steps: int | None
    completed: int


class Epochs:
    """The epochs of one `fit`, `evaluate` or `predict`, and the position in the data.

    The position in a dataset that a training moves follows this position.

    Args:
        feed: returns what the steps iterate over.
        requested: steps of an epoch, if the caller gave a number.
        inspect: called with the first batch of data that all tasks read. Nothing else is read for
            this.

    Raises:
        TrainingError: infinite data without a number of steps, or no data.
    """

    def __init__(
        self, batches: Batches, feed: Feed, requested: int | None, inspect: Inspect = None
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
        self._completed = 0  # steps of the next epoch that ran before the job resumed
        self._longest = 0  # steps of the longest epoch so far
        self._position = self._position_of_data()

    def _position_of_data(self) -> Position:
        data = self._batches.data
        return Position() if data is None else Position(data.position[0], data.steps_done)

    def _move_to(self, in_pass: int, step: int) -> None:
        self._position = Position(in_pass, step)
        if self._batches.data is not None:
            self._batches.data.move_to(in_pass, step)

    def advance(self, steps: int) -> None:
        """Moves the position by a number of global batches that were used."""
        in_pass, step = self._position.in_pass, self._position.step + steps
        self._move_to(*((in_pass + 1, 0) if step == self._batches.steps else (in_pass, step)))

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
        return isinstance(self._batches, PositionedBatches)

    def state(self) -> dict[str, Any] | None:
        """Returns the state of the data, for a checkpoint; None of data without a state."""
        return None if self._batches.data is None else self._batches.data.state()

    def resume(
        self,
        epochs: int,
        completed: int,
        state: dict[str, Any] | None,
        *,
        reads: bool,
        report: Callable[[], object] = lambda: None,
    ) -> None:
        """Begins where a checkpoint was saved.

        Args:
            epochs: completed epochs.
            completed: completed steps of the next epoch.
            state: of the data; None if the job before had data without a state.
            reads: whether to read the epochs of data that can only be read from its start.
            report: called for each batch that is read.
        """
        batches, data = self._batches, self._batches.data
        self._completed = self._longest = completed
        if data is not None and state is not None:
            data.restore(state)
        if data is not None and self.resumes_inside:
            for _ in range(epochs if state is None else 0):
                data.end_epoch()
            self._position = self._position_of_data()
        elif reads and self.resumes_inside:
            assert batches.steps is not None
            assert self.steps is not None
            passes, rest = divmod(epochs, -(-batches.steps // self.steps))  # epochs in a pass
            self._move_to(passes, rest * self.steps + completed)
        elif reads and (batches.has_order or batches.reads_own_shard):
            self._move_to(0, 0)
            self._read_past(epochs, report)

    def reset(self) -> None:
        """Calls the data's `on_epoch_end`, as Keras does before `fit` and `evaluate`."""
        self._batches.on_epoch_end()

    def rewind(self) -> None:
        """Begins the next epoch at the start of the data."""
        self.reset()
        self._iterators.forget()
        self._move_to(0, 0)

    @contextlib.contextmanager
    def next(self) -> Iterator[Epoch]:
        """The next epoch. Calls the data's `on_epoch_begin`; `end_epoch` calls `on_epoch_end`."""
        batches = self._batches
        completed, self._completed = self._completed, 0
        steps = None if self._requested is None else max(self._requested - completed, 0)
        if batches.steps is not None:
            left = batches.steps - self._position.step
            if steps is not None and left < steps:
                self._warn_of_end(left)
            steps = left if steps is None else min(steps, left)
        batches.on_epoch_begin()
        try:
            iterator = self._iterators.of_epoch(steps, self._position)
            yield Epoch(self, batches, iterator, steps, completed)
        except BaseException:
            batches.on_epoch_end()  # stops workers that read ahead
            raise

    def begin_next_pass(self, epoch: Epoch) -> bool:
        """Begins the next pass if an epoch without a step is at the end of a ShardedDataset's pass.

        If only reading tells the length of a pass, it may have ended with the epoch before.
        """
        if self._batches.data is None or epoch.completed or not self._position.step:
            return False
        self._iterators.forget()
        self._move_to(self._position.in_pass + 1, 0)
        epoch.iterator = self._iterators.of_epoch(epoch.steps, self._position)
        return True

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
            self._move_to(self._position.in_pass + 1, 0)
        elif batches.steps is not None and self._position.step == 0 and not stopped:
            self._iterators.pass_ended()

    def _warn_of_end(self, steps: int) -> None:
        warn(
            f"the data ended after {steps} of the {self._requested} steps requested in this epoch."
            " Request fewer steps, or repeat the data with .repeat()."
        )

    def _read_past(self, epochs: int, report: Callable[[], object]) -> None:
        """Reads epochs as a training reads them: the order of examples may depend on it."""
        for _ in range(epochs):
            with self.next() as epoch:
                steps = self._batches.skip(epoch.iterator, epoch.steps, report)
                if not steps and self.begin_next_pass(epoch):
                    steps = self._batches.skip(epoch.iterator, epoch.steps, report)
                self.advance(steps)
            self.end_epoch(epoch, steps, stopped=False)
