"""Errors that arise while tf.data reads: in its threads a DataError becomes one of TensorFlow's."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.errors import DataError

__all__ = ["data_errors_as_raised", "with_data_errors"]


@contextlib.contextmanager
def data_errors_as_raised() -> Iterator[None]:
    """In this scope, a TensorFlow error around a DataError is raised as the DataError it was."""
    try:
        yield
    except tf.errors.OpError as error:
        # What TensorFlow makes of it begins with its own words, and goes on with the traceback.
        found = re.search(r"\bDataError: (.*?)\n+Traceback", error.message, re.DOTALL)
        if found is None:
            raise
        raise DataError(found[1]) from error


def with_data_errors(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set; where it is iterated in Python, a damaged record is a DataError.

    A public data set has no way to say what its iterators are. So this one, and each of its
    iterators, gets a subclass of its own class, which TensorFlow takes for that class.
    """
    dataset.__class__ = _reporting_dataset(type(dataset))  # type: ignore[arg-type]  # a class has a hash
    return dataset


@functools.cache
def _reporting_dataset(base: type) -> type:
    def iterate(self: tf.data.Dataset) -> Iterator[Any]:
        iterator = base.__iter__(self)  # type: ignore[attr-defined]
        if tf.executing_eagerly():
            iterator.__class__ = _reporting_iterator(type(iterator))  # type: ignore[arg-type]
        return iterator

    return type(base.__name__, (base,), {"__iter__": iterate})


@functools.cache
def _reporting_iterator(base: type) -> type:
    def take(self: Iterator[Any]) -> Any:
        with data_errors_as_raised():
            return base.__next__(self)  # type: ignore[attr-defined]

    return type(base.__name__, (base,), {"__next__": take})
