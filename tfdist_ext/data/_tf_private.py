"""The private names of TensorFlow that the data room uses, each with the reason."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from tfdist_ext.data.reading_errors import data_errors_as_raised

__all__ = ["with_data_errors"]


def with_data_errors(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set; where it is iterated in Python, a damaged record is a DataError.

    Private because a public data set has no way to say what its iterators are.
    """
    return _Dataset(dataset)


class _Iterator(iterator_ops.OwnedIterator):
    def __next__(self) -> Any:
        with data_errors_as_raised():
            return super().__next__()


class _Dataset(tf.data.Dataset):
    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            return super().__iter__()
        return _Iterator(self)
