"""Sources of examples, which are read by their number, and fingerprints of the data.

A fingerprint is kept in checkpoints, so that a training resumes only with the data it was trained
on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

Fingerprint: TypeAlias = dict[str, Any]  # name of a field -> text or number

_SAMPLE = 1 << 20  # bytes of each array that are hashed


class Source(Protocol):
    """The interface of a source with random access to examples. It need not be subclassed.

    If `take` can return fewer examples than requested, define a member `loses_examples = True`.
    """

    def __len__(self) -> int:
        """The number of examples."""

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, with a `tf.TypeSpec` of batch dimension None per tensor."""

    def take(self, indices: tf.Tensor) -> Any:
        """Returns the batch of examples with these indices (int64 [n]). `tf.data` traces it."""

    def fingerprint(self) -> Fingerprint:
        """Returns a dict for JSON, which must change when the data changes."""


class Arrays:
    """Rows of one array, or of a nested tuple or dict of arrays.

    Memory-mapped arrays (`np.load(path, mmap_mode="r")`) stay on disk: only the rows of a batch
    are read.

    Raises:
        DataError: no arrays, arrays of different lengths or without an axis 0, or no rows.
    """

    def __init__(self, arrays: Any):
        self._arrays = tf.nest.map_structure(_as_array, _without_lists(arrays))
        self._named = {
            "/".join(map(str, path)) or "x": array
            for path, array in keras.tree.flatten_with_path(self._arrays)
        }
        if not self._named:
            raise DataError("arrays is an empty structure. It needs at least one array.")
        for name, array in self._named.items():
            if array.ndim == 0:
                raise DataError(
                    f"{name} must be an array of rows, got the single value {shown(array)}."
                )
        lengths = {name: len(array) for name, array in self._named.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
            raise DataError(f"the arrays have different numbers of rows: {listed}.")
        self._rows = next(iter(lengths.values()))
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
        """Shape, dtype and a hash of each array.

        The hash is of the whole array up to 1 MiB. Of a larger array it is of rows at even
        distances, the first and the last one among them, so a change of a few rows may go unseen.
        """
        fields: Fingerprint = {"kind": "arrays"}
        for name, array in self._named.items():
            sample = array
            if array.nbytes > _SAMPLE:
                count = max(2, _SAMPLE * len(array) // array.nbytes)
                sample = array[np.linspace(0, len(array) - 1, count).astype(np.int64)]
            fields[f"{name}: shape"] = list(array.shape)
            fields[f"{name}: dtype"] = array.dtype.str
            fields[f"{name}: content"] = digest([sample.tobytes()])
        return fields


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """The fields that differ, as "records 100 -> 120"; "" if there are none."""
    return ", ".join(
        f"{field} {old.get(field, 'none')} -> {new.get(field, 'none')}"
        for field in {**old, **new}
        if old.get(field) != new.get(field)
    )


def digest(parts: Iterable[bytes]) -> str:
    """A short hash of bytes that come in parts."""
    checksum = hashlib.blake2b(digest_size=12)
    for part in parts:
        checksum.update(len(part).to_bytes(8, "little"))  # "ab", "c" is not "a", "bc"
        checksum.update(part)
    return checksum.hexdigest()


def _without_lists(value: Any) -> Any:
    """The same structure; a list of arrays becomes a tuple, any other list an array."""
    if isinstance(value, dict):
        return {name: _without_lists(part) for name, part in value.items()}
    if isinstance(value, tuple) or (
        isinstance(value, list) and any(hasattr(part, "__array__") for part in value)
    ):
        return tuple(_without_lists(part) for part in value)
    return np.asarray(value) if isinstance(value, list) else value


def _as_array(value: Any) -> np.ndarray:
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    try:
        if not array.dtype.hasobject:
            tf.as_dtype(array.dtype)
            return array
    except TypeError:
        pass
    raise DataError(
        f"an array must have a dtype that tensors have, got {array.dtype}: {shown(value)}. Convert"
        " it, for example to float32, int64 or S20 (strings)."
    )


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
