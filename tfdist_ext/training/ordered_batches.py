"""The batches of a PyDataset in an order that every task computes alike.

Keras shuffles them with Python's own random numbers, which are others on each worker: each would
take its part of another batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.training import _keras_private as kp

__all__ = ["OrderedBatches", "order_of_pass"]


def order_of_pass(batches: int, seed: int, number: int) -> list[int]:
    """The indices of all batches, permuted, for the pass of a number over the data, from 0."""
    return np.random.default_rng([seed, number]).permutation(batches).tolist()


class OrderedBatches:
    """One pass after another over a PyDataset, each in an order of its own.

    Args:
        source: a dataset of a known number of batches. Its `workers`, `use_multiprocessing` and
            `max_queue_size` are used as Keras uses them.
        seed: where the orders start, the same on every task.
        class_weight: as in `fit`.
    """

    def __init__(self, source: keras.utils.PyDataset, seed: int, class_weight: Any = None):
        self._source = source
        self._seed = seed
        self._class_weight = class_weight
        self._passes = 0

    def dataset(self, spec: Any) -> tf.data.Dataset:
        """Each iterator over it is the next pass.

        Args:
            spec: tf.TypeSpecs of a batch, batch dimension unknown.
        """
        return tf.data.Dataset.from_generator(self._next_pass, output_signature=spec)

    def _next_pass(self) -> Iterator[Any]:
        order = order_of_pass(self._source.num_batches, self._seed, self._passes)
        self._passes += 1
        batches = _Permuted(self._source, order)
        adapter = kp.get_data_adapter(batches, class_weight=self._class_weight)
        try:
            yield from kp.batches_of(adapter)
        finally:
            adapter.on_epoch_end()  # stops workers that read ahead


class _Permuted(keras.utils.PyDataset):
    """Another order of the batches of `source`; the hooks of epochs are not passed on."""

    def __init__(self, source: keras.utils.PyDataset, order: Sequence[int]):
        super().__init__(
            workers=source.workers,
            use_multiprocessing=source.use_multiprocessing,
            max_queue_size=source.max_queue_size,
        )
        self._source = source
        self._order = order

    @property
    def num_batches(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._source[self._order[index]]
