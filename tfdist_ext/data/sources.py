"""What examples are read from, by number: arrays, or records of files and their parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist_ext.cluster.wording import shown
from tfdist_ext.data import fingerprint
from tfdist_ext.data.fingerprint import Fingerprint
from tfdist_ext.data.records import Records
from tfdist_ext.errors import DataError

__all__ = ["Arrays", "RecordFiles", "Source"]

_BLOCK = 16 << 20  # bytes; glibc heeds blocks of up to 32 MiB


class Source(Protocol):
    """Examples that can be had by their numbers, in any order.

    A source of one's own needs no base class: what has these members is one.
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
        # tf.nest takes lists for structures, and people pass lists of numbers.
        self._arrays = tf.nest.map_structure(_as_array, arrays)
        self._named = {
            "/".join(map(str, path)) or "x": array for path, array in _with_paths(self._arrays)
        }
        if not self._named:
            raise DataError("there are no arrays to read from: an empty structure arrived.")
        for name, array in self._named.items():
            if array.ndim == 0:
                raise DataError(f"{name} is a single value, {shown(array)}, and has no rows.")
        lengths = {name: len(array) for name, array in self._named.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
            raise DataError(f"all arrays must have the same number of rows: {said}.")
        self._rows = next(iter(lengths.values()))
        if self._rows == 0:
            raise DataError("the arrays have 0 rows: there is nothing to train on.")
        self._tensors: Any = None

    def __len__(self) -> int:
        return self._rows

    @property
    def element_spec(self) -> Any:
        return tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )

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
                lambda numbers: _read(array, numbers), [indices], array.dtype, stateful=False
            )
            return tf.ensure_shape(read, [None, *array.shape[1:]])

        tensors = tf.nest.flatten(self._tensors, expand_composites=False)
        arrays = tf.nest.flatten(self._arrays)
        taken = [rows(array, tensor) for array, tensor in zip(arrays, tensors, strict=True)]
        return tf.nest.pack_sequence_as(self._arrays, taken)

    def fingerprint(self) -> Fingerprint:
        return fingerprint.of_arrays(self._named)


class RecordFiles:
    """Records of TFRecord files, made examples by `parse`.

    Args:
        files: paths, in the order in which their records are numbered.
        parse: (one record, a scalar string tensor) -> the example, a structure of tensors; traced.
        on_error: "raise", or "skip" for going on without damaged records.
        batched: `parse` takes many records, a string tensor of shape [n], and each tensor that it
            returns has a row for each of them.

    Raises:
        DataError: a file that cannot be read or is damaged, no records, or `parse` fails or
            returns tensors without rows.
    """

    def __init__(
        self,
        files: Sequence[str],
        parse: Callable[[tf.Tensor], Any],
        *,
        on_error: str = "raise",
        batched: bool = False,
    ):
        if not callable(parse):
            raise DataError(f"parse is a function of a record. Received: {shown(parse)}.")
        self.records = Records(files, on_error=on_error)
        if len(self.records) == 0:
            raise DataError(f"the files {shown(list(files))} have no records at all.")
        self._parse = parse
        self._batched = batched
        _keep_freed_memory()
        try:
            traced = tf.function(parse, autograph=True).get_concrete_function(
                tf.TensorSpec([None] if batched else [], tf.string)
            )
        except (TypeError, ValueError, tf.errors.OpError) as error:
            many = "many records" if batched else "a record"
            raise DataError(f"parse fails when it is traced for {many}: {error}") from error
        self._spec = tf.nest.map_structure(
            _row_spec if batched else lambda output: tf.TensorSpec(output.shape, output.dtype),
            traced.structured_outputs,
        )

    def __len__(self) -> int:
        return len(self.records)

    @property
    def element_spec(self) -> Any:
        return tf.nest.map_structure(
            lambda spec: tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype),
            self._spec,
        )

    def take(self, indices: tf.Tensor) -> Any:
        payloads = tf.numpy_function(self._payloads, [indices], tf.string, stateful=False)
        payloads.set_shape([None])
        if not self._batched:
            return tf.map_fn(self._parse, payloads, fn_output_signature=self._spec)
        # Few operations give what parse expects of no records: decode_raw has rows of 0 bytes.
        return tf.cond(tf.size(payloads) > 0, lambda: self._rows(payloads), self._no_rows)

    def _rows(self, payloads: tf.Tensor) -> Any:
        """What `parse` returns for many records, a row for each: no one could tell otherwise."""

        def checked(output: tf.Tensor) -> tf.Tensor:
            message = "parse with batched=True returned more or fewer rows than there are records"
            rows = tf.debugging.assert_equal(tf.shape(output)[0], tf.size(payloads), message)
            with tf.control_dependencies([rows]):
                return tf.identity(output)

        return tf.nest.map_structure(checked, self._parse(payloads))

    def _no_rows(self) -> Any:
        def none(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([0, *(size or 0 for size in spec.shape.as_list())], spec.dtype)

        return tf.nest.map_structure(none, self._spec)

    @property
    def loses_examples(self) -> bool:
        """Whether `take` may give fewer examples than it was asked for."""
        return self.records.skips

    def fingerprint(self) -> Fingerprint:
        indexes = self.records.indexes
        return fingerprint.of_files(
            self.records.files,
            [index.stamp for index in indexes],
            [index.records for index in indexes],
        )

    def _payloads(self, indices: np.ndarray) -> np.ndarray:
        found = self.records.read_array(indices)
        # None stands for a damaged record.
        return found[[one is not None for one in found]] if self.records.skipped else found


def _keep_freed_memory() -> None:
    """Have the C library keep some of what a batch gives back, for the next one.

    At first glibc returns the end of its heap to the system as soon as 128 KiB there are free, and
    each page of each batch is faulted in anew: half of the time of reading large records. When a
    block that was mapped by itself is freed, it raises that limit to twice the block (mallopt(3),
    M_MMAP_THRESHOLD). The block is never written to, so it costs nothing. Other C libraries do
    not mind.
    """
    bytes(_BLOCK)


def _row_spec(output: Any) -> tf.TensorSpec:
    """Of one row of what `parse` returned for many records."""
    # A structure's leaf may be anything; sparse tensors and ragged ones have no rows to cut.
    dense = isinstance(output, tf.Tensor | tf.TensorSpec) and output.shape.rank is not None
    if not dense or output.shape.rank == 0 or output.shape[0] is not None:
        raise DataError(
            "parse with batched=True returns dense tensors with a row for each record, of shape"
            f" [n, ...] where n is not known when it is traced. It returned {shown(output)}."
        )
    return tf.TensorSpec(output.shape[1:], output.dtype)


def _as_array(value: Any) -> np.ndarray:
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype.hasobject:
        raise DataError(
            f"an array of Python objects arrived: {shown(value)}. Give it a dtype of fixed size."
        )
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
    rows = np.empty((len(numbers), *array.shape[1:]), array.dtype)
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
