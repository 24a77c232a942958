"""Records of TFRecord files as examples, each read by its number over all files.

Only the bytes of the wanted records are read. Records that follow each other in a file are read
together.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.files import HEADER, TAIL, FileReader, crc32c, files_of, indexes_of, masked
from tfdist_ext.data.ordered import OrderedDataset
from tfdist_ext.data.sources import Fingerprint, digest
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback, warn

_MOST_OPEN = 256  # files; on most systems a process may open 1,024


@filter_traceback
def from_tfrecords(
    files: str | Sequence[str],
    parse: Callable[[tf.Tensor], Any],
    *,
    global_batch_size: int,
    seed: int | None = None,
    on_error: str = "raise",
    batched: bool = False,
) -> OrderedDataset:
    """Creates a dataset from TFRecord files, with random access to the records.

    An index of the records is built once, by reading the length fields of each file. The index is
    saved next to the file.

    Args:
        files: a path, a pattern, or a list of them, on any file system of `tf.io.gfile`. The files
            must not be compressed. They are sorted, so that all tasks use the same order.
        parse: a function from a record (a scalar string tensor) to an example (a structure of dense
            tensors). TensorFlow traces the function.
        global_batch_size: the number of examples of one step, over all workers.
        seed: the seed of the order. None keeps the order of the files.
        on_error: "raise", or "skip" to skip damaged records with a warning.
        batched: if True, `parse` takes a string tensor of shape [n] and returns tensors of shape
            [n, ...], as `tf.io.parse_example` does. This is about twice as fast for small records.

    Raises:
        DataError: a file does not exist or is damaged, `parse` fails, or the batch is larger than
            the data.
    """
    if not callable(parse):
        raise DataError(f"parse must be a function of a record, got {shown(parse)}.")
    source = RecordFiles(files_of(files), parse, on_error=on_error, batched=batched)
    return OrderedDataset(source, global_batch_size=global_batch_size, seed=seed)


class RecordFiles:
    """A source of examples (`tfdist_ext.data.sources.Source`) in TFRecord files. Thread-safe.

    Attributes:
        files: the paths, in the order in which records are numbered.
        bytes_read: bytes of records that this process has read, checksums and lengths included.
        skipped: numbers of the damaged records that were skipped.
    """

    def __init__(
        self,
        files: Sequence[str],
        parse: Callable[[tf.Tensor], Any],
        *,
        on_error: str = "raise",
        batched: bool = False,
    ) -> None:
        """Arguments and errors are those of `from_tfrecords`."""
        if on_error not in ("raise", "skip"):
            raise DataError(f'on_error must be "raise" or "skip", got {shown(on_error)}.')
        self.files = list(files)
        self.bytes_read = 0
        self.skipped: set[int] = set()
        self.loses_examples = on_error == "skip"
        self._indexes = indexes_of(self.files, skip_damaged=self.loses_examples)
        # The number of the first record of each file, and the number of all records.
        self._first = np.cumsum([0, *(index.records for index in self._indexes)], dtype=np.int64)
        if len(self) == 0:
            raise DataError(f"there are no records in the files: {shown(files)}.")
        self._open = functools.lru_cache(_MOST_OPEN)(self._opened)
        self._lock = threading.Lock()
        self._parse = parse
        self._batched = batched
        self._spec = _spec_of_example(parse, batched)
        self.element_spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype),
            self._spec,
        )
        # Freeing a block of 16 MiB makes glibc keep the memory of later batches (mallopt(3),
        # M_MMAP_THRESHOLD). Otherwise glibc returns it to the system each time, which takes half of
        # the time of reading large records.
        bytes(16 << 20)

    def __len__(self) -> int:
        return int(self._first[-1])

    def fingerprint(self) -> Fingerprint:
        """The numbers of files, bytes and records; hashes of names, sizes and last records.

        Names are without folders, and nothing depends on time stamps: a copy is the same data.
        """
        indexes = self._indexes
        return {
            "kind": "files",
            "files": len(indexes),
            "bytes": sum(index.stamp[0] for index in indexes),
            "records": len(self),
            "names": digest(path.rpartition("/")[2].encode() for path in self.files),
            "sizes": digest(f"{index.stamp[0]} {index.records}".encode() for index in indexes),
            "last records": digest(str(index.checksum).encode() for index in indexes),
        }

    def take(self, indices: tf.Tensor) -> Any:
        payloads = tf.numpy_function(self.read, [indices], tf.string, stateful=False)
        payloads.set_shape([None])
        if not self._batched:
            return tf.map_fn(self._parse, payloads, fn_output_signature=self._spec)
        # Without records, most operations fail or return rows of another size.
        return tf.cond(tf.size(payloads) > 0, lambda: self._rows(payloads), self._no_rows)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The payloads of records, in the order of their numbers.

        Args:
            numbers: in [0, len(self)), int64 of shape [n].

        Returns:
            An array of bytes objects, without the damaged records that are skipped.

        Raises:
            DataError: a record is damaged, and damaged records are not skipped.
        """
        order = np.argsort(numbers, kind="stable")
        rising = numbers[order]
        files, begins = np.unique(
            np.searchsorted(self._first, rising, side="right") - 1, return_index=True
        )
        payloads: list[bytes] = []
        checksums: list[bytes] = []
        for file, numbers_in_file in zip(files, np.split(rising, begins)[1:], strict=True):
            of_file = self._read_file(int(file), numbers_in_file - self._first[file])
            payloads += of_file[0]
            checksums += of_file[1]
        computed = np.fromiter(map(crc32c(), payloads), np.uint64, len(payloads))
        right = masked(computed) == np.frombuffer(b"".join(checksums), "<u4")
        for number in rising[~right]:
            self._skip_damaged(int(number))
        rows, kept = np.empty(len(payloads), object), np.empty(len(payloads), bool)
        rows[order], kept[order] = np.fromiter(payloads, object, len(payloads)), right
        return rows if right.all() else rows[kept]

    def _read_file(self, file: int, rows: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """The payloads and checksums of records of a file. `rows` are sorted."""
        reader, offsets = self._open(file)
        starts, ends = offsets[rows], offsets[rows + 1]
        cuts = [0, *(np.flatnonzero(starts[1:] != ends[:-1]) + 1).tolist(), len(rows)]
        starts, ends = starts.tolist(), ends.tolist()
        payloads, checksums = [], []
        for first, stop in pairwise(cuts):
            at, size = starts[first], ends[stop - 1] - starts[first]
            block = reader.read_at(at, size)
            if len(block) < size:
                raise DataError(
                    f"{self.files[file]}: record {rows[first]} at byte {at} cannot be read: the"
                    " file became shorter while it was in use."
                )
            for row in range(first, stop):
                end = ends[row] - at - TAIL
                payloads.append(block[starts[row] - at + HEADER : end])
                checksums.append(block[end : end + TAIL])
        with self._lock:
            self.bytes_read += sum(ends) - sum(starts)
        return payloads, checksums

    def _skip_damaged(self, number: int) -> None:
        """Warn of a damaged record and count it, or raise the error."""
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        record = number - int(self._first[file])
        message = (
            f"{self.files[file]}: record {record} at byte {self._open(file)[1][record]} is damaged:"
            " its checksum is wrong."
        )
        if not self.loses_examples:
            raise DataError(f'{message} Write the file again, or use on_error="skip" to skip it.')
        with self._lock:
            seen = number in self.skipped
            self.skipped.add(number)
        if not seen:
            warn(f"{message} The record is skipped (skipped so far: {len(self.skipped)}).")

    def _opened(self, file: int) -> tuple[FileReader, np.ndarray]:
        # A plain view of a memory-mapped array is faster to index.
        return FileReader(self.files[file]), np.asarray(self._indexes[file].offsets())

    def _rows(self, payloads: tf.Tensor) -> Any:
        """The output of `parse` for many records, checked to have a row for each."""

        def checked(output: tf.Tensor) -> tf.Tensor:
            message = "parse with batched=True returned more or fewer rows than records"
            rows = tf.debugging.assert_equal(tf.shape(output)[0], tf.size(payloads), message)
            with tf.control_dependencies([rows]):
                return tf.identity(output)

        return tf.nest.map_structure(checked, self._parse(payloads))

    def _no_rows(self) -> Any:
        return tf.nest.map_structure(
            lambda spec: tf.zeros([0, *(size or 0 for size in spec.shape.as_list())], spec.dtype),
            self._spec,
        )


def _spec_of_example(parse: Callable[[tf.Tensor], Any], batched: bool) -> Any:
    """The structure of one example, found by tracing `parse`."""
    try:
        traced = tf.function(parse).get_concrete_function(
            tf.TensorSpec([None] if batched else [], tf.string)
        )
    except (TypeError, ValueError, tf.errors.OpError) as error:
        many = "many records" if batched else "a record"
        raise DataError(f"parse fails when it is traced for {many}: {error}") from error

    def spec_of(output: Any) -> tf.TensorSpec:
        if not isinstance(output, tf.Tensor | tf.TensorSpec):
            raise DataError(
                f"parse must return dense tensors, which can be batched, got {shown(output)}. Use"
                " tf.sparse.to_dense(...), or .to_tensor(shape=...) of a ragged tensor."
            )
        if not batched:
            return tf.TensorSpec(output.shape, output.dtype)
        if not output.shape.rank or output.shape[0] is not None:
            raise DataError(
                "parse with batched=True must return tensors with one row per record, of shape"
                f" [None, ...] when it is traced, got {shown(output)}."
            )
        return tf.TensorSpec(output.shape[1:], output.dtype)

    return tf.nest.map_structure(spec_of, traced.structured_outputs)
