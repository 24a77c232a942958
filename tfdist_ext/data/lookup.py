"""Examples of whatever has a length and looks batches up by their numbers, in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data import fingerprint
from tfdist_ext.data.fingerprint import Fingerprint
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

__all__ = ["Lookup"]


class Lookup:
    """A source made of `len(source)` and `source[numbers]`.

    Args:
        source: `source[numbers]`, with int64 numbers of shape [n] that rise, gives their examples
            as a batch: an array, or a tuple or dict of arrays, with n rows each, always of the same
            kinds. HDF5 files (h5py) and Hugging Face's data sets do. It is called by several
            threads.

    Raises:
        DataError: it has none of these two, no examples, or its first one cannot be had.
    """

    def __init__(self, source: Any):
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise DataError(
                "source must have len(source) and source[numbers], or the members of"
                f" tfdist_ext.data.sources.Source, got {shown(source)}."
            )
        self._source = source
        self._length = len(source)
        if self._length == 0:
            raise DataError("the source must have at least 1 example, got 0; check what it reads.")
        try:
            first = source[np.zeros(1, np.int64)]
        except Exception as error:
            raise DataError(
                f"source[numbers] must take an int64 array of shape [1], got {type(error).__name__}"
                f" from the source: {error}"
            ) from error
        self._structure = _without_lists(first)
        self._first = [np.asarray(part) for part in tf.nest.flatten(self._structure)]
        for part in self._first:
            if part.shape[:1] != (1,) or (part.dtype.hasobject and not _is_text(part)):
                raise DataError(
                    "source[numbers] must give arrays with a row for each number, got shape"
                    f" {part.shape} and dtype {part.dtype} for one number."
                )

    def __len__(self) -> int:
        return self._length

    @property
    def element_spec(self) -> Any:
        specs = [
            tf.TensorSpec(
                [None, *part.shape[1:]], tf.string if _is_text(part) else tf.as_dtype(part.dtype)
            )
            for part in self._first
        ]
        return tf.nest.pack_sequence_as(self._structure, specs)

    def take(self, indices: tf.Tensor) -> Any:
        specs = tf.nest.flatten(self.element_spec)
        dtypes = [spec.dtype for spec in specs]
        parts = tf.numpy_function(self._rows, [indices], dtypes, stateful=False)
        shaped = [tf.ensure_shape(p, spec.shape) for p, spec in zip(parts, specs, strict=True)]
        return tf.nest.pack_sequence_as(self._structure, shaped)

    def fingerprint(self) -> Fingerprint:
        """Type, length, and the first example: not every change of the data can be told by it."""
        first = fingerprint.of_arrays(
            {
                f"first {i}": np.asarray(list(map(str, part.flat))) if _is_text(part) else part
                for i, part in enumerate(self._first)
            }
        )
        return {**first, "kind": type(self._source).__name__, "examples": self._length}

    def _rows(self, numbers: np.ndarray) -> list[np.ndarray]:
        rising, back = np.unique(numbers, return_inverse=True)
        if rising.size == 0:
            return [_rows_like(part[:0], part) for part in self._first]
        try:
            found = tf.nest.flatten(_without_lists(self._source[rising]))
        except Exception as error:
            raise DataError(
                f"source[numbers] must give the examples {shown(rising)}, got"
                f" {type(error).__name__} from the source: {error}"
            ) from error
        rows = []
        for part, first in zip(found, self._first, strict=True):
            array = np.asarray(part)
            if len(array) != len(rising):
                raise DataError(
                    f"source[numbers] must give a row for each of {len(rising)} numbers, got"
                    f" {len(array)} rows for {rising}."
                )
            rows.append(_rows_like(array[back], first))
        return rows


def _is_text(array: np.ndarray) -> bool:
    """Text has a width in NumPy, and other examples may be longer than the first one."""
    if array.dtype.hasobject:
        return array.size > 0 and all(isinstance(value, str | bytes) for value in array.flat)
    return array.dtype.kind in "US"


def _rows_like(rows: np.ndarray, first: np.ndarray) -> np.ndarray:
    """
    Raises:
        DataError: rows of another kind: what does not fit would be lost.
    """
    if _is_text(first):
        return rows.astype(object)
    if not np.can_cast(rows.dtype, first.dtype, "same_kind"):
        raise DataError(
            f"source[numbers] must always give one dtype, got {rows.dtype} after {first.dtype} for"
            " the first example."
        )
    return rows.astype(first.dtype.newbyteorder("="), copy=False)


def _without_lists(found: Any) -> Any:
    """A list is an array here, and no structure, as Hugging Face's columns are lists."""
    if isinstance(found, dict):
        return {name: _without_lists(part) for name, part in found.items()}
    if isinstance(found, tuple):
        return tuple(_without_lists(part) for part in found)
    return np.asarray(found)
