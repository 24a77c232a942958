"""Errors that arise while tf.data reads: in its threads a DataError becomes one of TensorFlow's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tfdist_ext.errors import DataError

__all__ = ["data_errors_as_raised"]


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
