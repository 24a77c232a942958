"""Where each epoch begins and ends in the data, by Keras's rules."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist_ext.data.pipelines import without_autotune
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.dataset_passes import DatasetPasses
from tfdist_ext.training.global_batches import GlobalBatches
from tfdist_ext.training.inputs import parts_of_dataset

__all__ = ["Epoch", "Epochs", "steps_of_epoch", "validates"]

_EMPTY = "the data holds no batch at all: nothing can be done with it."


def steps_of_epoch(position: int, in_pass: int, asked: int | None) -> tuple[int, int]:
    """(steps of the next epoch, position in the pass after it).

    An epoch of `asked` steps goes on where the last one ended; the epoch in which a pass ends
    is short, and the one after it starts a new pass.
    """
    left = in_pass - position
    steps = left if asked is None else min(asked, left)
    return steps, (position + steps) % in_pass


@dataclass(frozen=True)
class Epoch:
    """One epoch: where to read, and how many global batches.

    Attributes:
        iterator: over the parts of this task's replicas.
        steps: global batches to do; None: until the data ends.
        known_length: whether there are that many for sure.
        agreed: whether the tasks have to agree in each step on what the global batch is.
        going_on: it is the rest of an epoch, whose first batches are in the metrics already.
        done: to be told of the batches that are done, and of the logs, after each execution.
        room: how many may be done before it is to be told; None: any number.
    """

    iterator: Any
    steps: int | None
    known_length: bool
    agreed: bool
    going_on: bool
    done: Callable[[int, dict[str, Any]], None]
    room: Callable[[], int | None]


class Epochs:
    """The epochs of one `fit`, `evaluate` or `predict`."""

    def __init__(
        self,
        batches: GlobalBatches,
        feed: Callable[[GlobalBatches], Any],
        asked: int | None,
        inspect: Callable[[Any], None] | None = None,
    ) -> None:
        """
        Args:
            feed: makes of global batches what the steps iterate over.
            asked: steps of an epoch, where the caller gave a number.
            inspect: see `DatasetPasses`; called only where each task reads whole global batches.
        """
        asked = asked or None  # as Keras: 0 is all there is
        if asked is not None and asked < 0:
            raise TrainingError(f"the steps of an epoch are 1 or more; {asked} arrived.")
        if batches.steps is None and batches.endless and asked is None:
            raise TrainingError(
                "the data is infinite, so an epoch has no end: pass steps_per_epoch (in evaluate"
                " and predict: steps)."
            )
        if batches.steps == 0:
            raise TrainingError(_EMPTY)
        self._batches = batches
        self._asked = asked
        self._feed = feed
        self._passes = None
        if batches.dataset is not None:
            in_steps = asked is not None
            self._passes = DatasetPasses(batches.dataset, in_steps=in_steps, inspect=inspect)
        self._dataset: Any = None if self._passes else feed(batches)
        self._fed_from: Any = None
        self._iterator: Any = None
        self._position = batches.begin
        self._seen: int | None = None
        self._fresh = True
        self._behind = 0  # steps of the next epoch that are done

    @property
    def steps(self) -> int | None:
        """Global batches in an epoch; None until a first one has told."""
        return self._asked or self._batches.steps or self._seen

    @contextlib.contextmanager
    def next(self) -> Iterator[Epoch]:
        """The next epoch, between the data's own hooks."""
        in_pass = self._batches.steps
        known = in_pass is not None or self._batches.endless
        behind, self._behind = self._behind, 0
        asked = steps = None if self._asked is None else max(self._asked - behind, 0)
        if in_pass is not None:
            steps, after = steps_of_epoch(self._position, in_pass, asked)
            if asked is not None and steps < asked:
                self._warn_of_end(steps)
        batches = self._batches
        batches.on_epoch_begin()
        try:
            self._begin(steps, known)
            yield Epoch(
                self._iterator,
                steps,
                known,
                batches.agreed,
                behind > 0,
                batches.done,
                batches.room,
            )
        finally:
            self._batches.on_epoch_end()
            if in_pass is not None:
                self._position = after

    def _begin(self, steps: int | None, known_length: bool) -> None:
        """Make the iterator of an epoch, or keep the one of the epoch before."""
        if self._passes is not None:
            self._fresh = self._passes.begins_a_pass()
            dataset = self._passes.epoch(steps, known_length=known_length)
            self._iterator = iter(self._fed(dataset))
            return
        begins_a_pass = self._position == 0 and (
            self._asked is None or self._batches.steps is not None
        )
        self._fresh = self._iterator is None or (begins_a_pass and not self._batches.endless)
        if self._fresh:
            self._iterator = iter(self._dataset)

    def _fed(self, dataset: tf.data.Dataset) -> Any:
        if dataset is not self._fed_from:
            self._fed_from = dataset
            parts_of = parts_of_dataset(dataset)
            batches = replace(
                self._batches, parts_of=lambda *which: without_autotune(parts_of(*which))
            )
            self._dataset = self._feed(batches)
        return self._dataset

    def begin_after(self, epochs: int, feed: Callable[[GlobalBatches], Any]) -> bool:
        """Pass over epochs, without reading; False, and nothing done, where that cannot be."""
        batches, in_pass = self._batches, self._batches.steps
        if batches.later is None or in_pass is None:
            return False
        passed = 0
        for _ in range(epochs):
            steps, self._position = steps_of_epoch(self._position, in_pass, self._asked)
            passed += steps
        self._dataset = feed(replace(batches, parts_of=batches.later(passed)))
        return True

    def begin_at_position(self, feed: Callable[[GlobalBatches], Any], *, behind: int) -> None:
        """Begin where the data's own position is, `behind` steps of an epoch being done already."""
        assert self._batches.at_position is not None
        batches = self._batches.at_position()
        self._position = batches.begin
        self._batches = replace(self._batches, begin=batches.begin)
        self._behind = behind
        self._dataset = feed(batches)

    def rewind(self) -> None:
        """Begin the next epoch at the start of the data: each validation sees the same steps."""
        if self._passes is not None:
            self._position = 0
            self._passes.restart()
        elif self._position != 0 or (self._asked is not None and self._batches.steps is None):
            self._position = 0
            self._iterator = None

    def is_done(self, epoch: Epoch, steps: int, *, stopped: bool) -> bool:
        """Take note of an epoch's end; whether it was done to its end, or to that of the data.

        Args:
            steps: that were done.
            stopped: somebody told the training to stop while it ran.
        """
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
        """Say that the data ended after this many steps of an epoch of unknown length."""
        if steps == 0 and self._seen is None and self._fresh and self._batches.begin == 0:
            raise TrainingError(_EMPTY)
        if self._asked is not None and steps < self._asked:
            self._warn_of_end(steps)
        self._seen = steps
        self._iterator = None
        if self._passes is not None:
            self._passes.restart()
        self._batches.ended()

    def _warn_of_end(self, steps: int) -> None:
        warnings.warn(
            f"the data ended after {steps} of the {self._asked} steps asked for in this epoch."
            " Ask for fewer steps, or repeat the data with .repeat().",
            stacklevel=7,
        )


def validates(epoch: int, frequency: int | list[int]) -> bool:
    """Whether an epoch, counted from 0, is followed by validation."""
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    if isinstance(frequency, list | tuple | set):
        return epoch + 1 in frequency
    raise TrainingError(
        "validation_freq takes a number of epochs, or a list of epochs counted from 1;"
        f" {frequency!r} arrived."
    )
