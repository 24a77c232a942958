"""What examples are read from, by number: arrays, or whatever has a length and looks them up."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist_ext.data.position import Fingerprint, fingerprint_of_arrays
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

__all__ = ["Arrays", "Lookup", "Source"]


class Source(Protocol):
    """Examples that can be had by their numbers, in any order.

    A custom source needs no base class, only these members.
    """

    def __len__(self) -> int:
        """How many examples there are."""

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, a `tf.TypeSpec` for each tensor, batch dimension None."""

    def take(self, indices: tf.Tensor) -> Any:
        """The examples of these numbers (int64, shape [n]), as a batch of n; also inside of
        tf.data, where it is called once to be traced."""

    def fingerprint(self) -> Fingerprint:
        """A few JSON fields that are others when the data has changed."""

    # Where `take` may give fewer than it was asked for, a member `loses_examples` is true.


class Arrays:
    """Rows of arrays: of one, or of a tuple or a dict of them, nested as one likes.

    Memory-mapped arrays (`np.load(path, mmap_mode="r")`) stay on disk; of these only the rows of
    a batch are read.

    Raises:
        DataError: no arrays, arrays of different lengths or without an axis 0, or no rows.
    """

    def __init__(self, arrays: Any):
        self._arrays = tf.nest.map_structure(_as_array, _without_lists(arrays))
        self._named = {
            "/".join(map(str, path)) or "x": array for path, array in _with_paths(self._arrays)
        }
        if not self._named:
            raise DataError("arrays must hold at least one array, got an empty structure.")
        for name, array in self._named.items():
            if array.ndim == 0:
                raise DataError(
                    f"{name} must be an array of rows, got the single value {shown(array)}."
                )
        lengths = {name: len(array) for name, array in self._named.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
            raise DataError(f"all arrays must have the same number of rows, got {said}.")
        self._rows = next(iter(lengths.values()))
        if self._rows == 0:
            raise DataError("the arrays must have at least 1 row, got 0.")
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )
        self._tensors: Any = None

    def __len__(self) -> int:
        return self._rows

    def take(self, indices: tf.Tensor) -> Any:
        if self._tensors is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._tensors = tf.nest.map_structure(
                    lambda array: None if _on_disk(array) else tf.constant(array), self._arrays
                )

        def rows(array: np.ndarray, tensor: tf.Tensor | None) -> tf.Tensor:
            if tensor is not None:
                return tf.gather(tensor, indices)
            read = tf.numpy_function(
                lambda numbers: _read(array, numbers),
                [indices],
                tf.as_dtype(array.dtype),
                stateful=False,
            )
            return tf.ensure_shape(read, [None, *array.shape[1:]])

        return tf.nest.map_structure(rows, self._arrays, self._tensors)

    def fingerprint(self) -> Fingerprint:
        return fingerprint_of_arrays(self._named)


def _without_lists(value: Any) -> Any:
    """The same structure; a list of arrays is a tuple of them, any other list is one array."""
    if isinstance(value, dict):
        return {name: _without_lists(part) for name, part in value.items()}
    if isinstance(value, tuple) or (
        isinstance(value, list) and any(hasattr(part, "__array__") for part in value)
    ):
        return tuple(_without_lists(part) for part in value)
    return np.asarray(value) if isinstance(value, list) else value


def _as_array(value: Any) -> np.ndarray:
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype.hasobject:
        raise DataError(
            f"an array must have a dtype of fixed size, got Python objects: {shown(value)}. Convert"
            " it."
        )
    try:
        tf.as_dtype(array.dtype)
    except TypeError:
        raise DataError(
            f"an array must have a dtype that tensors have, got {array.dtype}: {shown(value)}."
            " Convert it, for example to float32 or int64."
        ) from None
    return array


def _on_disk(array: np.ndarray) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


def _read(array: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Rows of a mapped array, read in the order in which they are on disk."""
    order = np.argsort(numbers, kind="stable")
    # TensorFlow takes the bytes as this machine's, whatever the dtype says of their order.
    rows = np.empty((len(numbers), *array.shape[1:]), array.dtype.newbyteorder("="))
    rows[order] = array[numbers[order]]
    return rows


def _with_paths(structure: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    if isinstance(structure, dict):
        items = [(key, structure[key]) for key in sorted(structure)]
    elif isinstance(structure, tuple | list):
        items = list(enumerate(structure))
    else:
        return [(path, structure)]
    return [found for key, inner in items for found in _with_paths(inner, (*path, key))]


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
        self._structure = _as_arrays(first)
        self._first = [np.asarray(part) for part in tf.nest.flatten(self._structure)]
        for part in self._first:
            if part.shape[:1] != (1,) or (part.dtype.hasobject and not _is_text(part)):
                raise DataError(
                    "source[numbers] must give arrays with a row for each number, got shape"
                    f" {part.shape} and dtype {part.dtype} for one number."
                )

        self.element_spec = tf.nest.pack_sequence_as(
            self._structure, [_spec_of(part) for part in self._first]
        )

    def __len__(self) -> int:
        return self._length

    def take(self, indices: tf.Tensor) -> Any:
        specs = tf.nest.flatten(self.element_spec)
        dtypes = [spec.dtype for spec in specs]
        parts = tf.numpy_function(self._rows, [indices], dtypes, stateful=False)
        shaped = [tf.ensure_shape(p, spec.shape) for p, spec in zip(parts, specs, strict=True)]
        return tf.nest.pack_sequence_as(self._structure, shaped)

    def fingerprint(self) -> Fingerprint:
        """Type, length, and the first example: not every change of the data can be told by it."""
        first = fingerprint_of_arrays(
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
            found = tf.nest.flatten(_as_arrays(self._source[rising]))
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


def _spec_of(rows: np.ndarray) -> tf.TensorSpec:
    dtype = tf.string if _is_text(rows) else tf.as_dtype(rows.dtype)
    return tf.TensorSpec([None, *rows.shape[1:]], dtype)


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


def _as_arrays(found: Any) -> Any:
    """A list is an array here, and no structure, as Hugging Face's columns are lists."""
    if isinstance(found, dict):
        return {name: _as_arrays(part) for name, part in found.items()}
    if isinstance(found, tuple):
        return tuple(_as_arrays(part) for part in found)
    return np.asarray(found)
