"""Iterators over a dataset of global batches, made exactly when Keras makes them.

A seeded `shuffle` draws a new order each time an iterator over it is made: by training, by
validation, by anything that looks at the data. So the iterators that were made before decide the
order of an epoch, and each task must make as many as Keras's EpochIterator does on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.data.pipelines import without_autotune

__all__ = ["DatasetPasses"]


class DatasetPasses:
    """The passes of one `fit`, `evaluate` or `predict` over a dataset, epoch by epoch.

    Args:
        dataset: one pass of global batches, or an infinite dataset.
        in_steps: epochs have a number of steps, and may end in the middle of a pass.
        inspect: called with the first batch of all (None where there is none) before it is used.
            It is the batch that the first step gets: nothing else is read for this.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        in_steps: bool,
        inspect: Callable[[Any], None] | None = None,
    ):
        # Each epoch lets go of an iterator, and would wait for its tuner; see `without_autotune`.
        self._dataset = without_autotune(dataset)
        self._in_steps = in_steps
        self._inspect = inspect
        self._iterator: Any = None
        self._rest: tuple[Any, int | None, Any] = (None, None, None)  # iterator, steps, dataset

    def begins_a_pass(self) -> bool:
        """Whether the next epoch makes an iterator of its own."""
        return self._iterator is None or not self._in_steps

    def epoch(self, steps: int | None, *, known_length: bool) -> tf.data.Dataset:
        """The global batches of the next epoch: each iteration is over those of one more.

        What reads ahead in it stops at its end: reading ahead into another repetition of the
        data would make iterators at a moment that nobody knows.

        Args:
            steps: batches in the epoch; None: all that are left.
            known_length: there are that many for sure.
        """
        if not self._in_steps and self._inspect is None:
            return self._dataset
        if self.begins_a_pass():
            self._iterator = self._new_iterator()
        if self._inspect is None:
            if self._rest[:2] != (self._iterator, steps):  # else iterating again reads on
                rest = _rest_of(self._iterator, steps, known_length)
                self._rest = (self._iterator, steps, rest)
            return self._rest[2]
        inspect, self._inspect = self._inspect, None
        first = next(self._iterator, None)
        inspect(first)
        if first is None:
            return self._dataset
        left = None if steps is None else steps - 1
        rest = _rest_of(self._iterator, left, known_length)
        return tf.data.Dataset.from_tensors(first).concatenate(rest)

    def pass_is_done(self) -> None:
        """Keras's fit makes the iterator of the next pass here, and in epochs without a number of
        steps another one when the next epoch begins.
        """
        self._iterator = self._new_iterator()

    def restart(self) -> None:
        """Begin the next epoch at the start of the data."""
        self._iterator = None

    def _new_iterator(self) -> Any:
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it reads ahead, too
        with tf.device("CPU:0"):
            return iter(self._dataset.with_options(options))


def _rest_of(iterator: Any, steps: int | None, known_length: bool) -> tf.data.Dataset:
    """What an iterator yields from here on, at most `steps` elements."""
    turns = tf.data.Dataset.range(2**62 if steps is None else steps)
    untouched = tf.autograph.experimental.do_not_convert
    if known_length:
        return turns.map(untouched(lambda _: iterator.get_next()))
    options = turns.map(untouched(lambda _: iterator.get_next_as_optional()))
    there = options.take_while(untouched(lambda option: option.has_value()))
    return there.map(untouched(lambda option: option.get_value()))
