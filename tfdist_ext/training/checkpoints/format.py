"""One checkpoint in one file: the safetensors format, with checksums.

    8 bytes             length of the header, little-endian
    header              JSON: name -> dtype, shape and place of each array; `__metadata__`
    arrays              their values, one after another, rows in order
    array `crc32`       checksums of the header and of each array

The header comes first, so a file is written in one pass, a block of rows at a time. The checksums
come last. A changed or missing byte anywhere is detected.

Names are `group/name`. A file holds whole values, and no trace of the strategy.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training import _keras_private as kp
from tfdist_ext.training.checkpoints.paths import open_file, os_errors
from tfdist_ext.training.state.values import block_ranges, blocks, read_rows

__all__ = [
    "CheckpointFile",
    "Content",
    "DamagedCheckpointError",
    "Groups",
    "Progress",
    "SavedArray",
    "encode_checkpoint",
]

_METADATA, _CHECKSUMS, _OURS = "__metadata__", "crc32", "tfdist_ext"

_VERSION = 1

# Group -> name -> variable or array.
Groups: TypeAlias = Mapping[str, Mapping[str, keras.Variable | np.ndarray]]

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "bfloat16": "BF16", "float16": "F16", "float32": "F32",
    "float64": "F64", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: name for name, code in _CODES.items()}


class DamagedCheckpointError(TrainingError):
    """The file can be read, but its bytes are not those of a complete checkpoint."""


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        epoch: completed epochs, and so the number of the next one, counted from 0.
        step: completed global batches, as the optimizer counts them.
        first_epoch: the epoch in which the data was at its beginning.
        seed: where the order of examples starts; 0 if they are not shuffled.
        batches: completed global batches of the next epoch.
        batch_size: examples in each of them, if the data is arrays; else 0.
        data: the state of a ShardedDataset; None with other data.
        trained: the logs of the last epoch's training if its validation is still to be done, else
            None.
    """

    epoch: int = 0
    step: int = 0
    first_epoch: int = 0
    seed: int = 0
    batches: int = 0
    batch_size: int = 0
    data: dict[str, Any] | None = None
    trained: dict[str, Any] | None = None

    def __str__(self) -> str:
        if self.batches:
            return f"batch {self.batches} of epoch {self.epoch + 1} (step {self.step})"
        before = ", before its validation" if self.trained is not None else ""
        return f"epoch {self.epoch}{before} (step {self.step})"


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint.

    Attributes:
        progress: of the training.
        kinds: group -> class, of the groups that only the same class can restore.
        groups: group -> name -> variable or array.
    """

    progress: Progress
    kinds: Mapping[str, str]
    groups: Groups


@dataclass(frozen=True)
class SavedArray:
    """An array in a checkpoint.

    Attributes:
        shape: its shape.
        dtype: name of its dtype, such as "float32".
        begin: its first byte, counted from the start of the file.
    """

    shape: tuple[int, ...]
    dtype: str
    begin: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; a scalar is one row."""
        return math.prod(self.shape[1:]) * tf.as_dtype(self.dtype).size

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


def encode_checkpoint(
    write: Callable[[memoryview], None],
    content: Content,
    wrote: Callable[[], object] = lambda: None,
) -> None:
    """Writes a checkpoint, a block of rows at a time.

    Args:
        write: takes the next bytes of the file.
        wrote: called after each block.
    """
    arrays = {f"{g}/{name}": a for g, named in content.groups.items() for name, a in named.items()}
    header = _header(arrays, content)
    write(memoryview(len(header).to_bytes(8, "little")))
    write(memoryview(header))
    checksums = [zlib.crc32(header)]
    for array in arrays.values():
        checksum = 0
        for rows in _row_blocks(array):
            data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(data, checksum)
            write(data)
            wrote()
        checksums.append(checksum)
    write(memoryview(np.array(checksums, "<u4").tobytes()))


def _header(arrays: Mapping[str, keras.Variable | np.ndarray], content: Content) -> bytes:
    progress = asdict(content.progress)
    text = json.dumps({"version": _VERSION, "progress": progress, "kinds": content.kinds})
    header: dict[str, Any] = {_METADATA: {_OURS: text}}
    begin = 0
    for name, array in arrays.items():
        held = array.dtype if isinstance(array, np.ndarray) else kp.raw_value(array).dtype
        dtype = tf.as_dtype(held)
        if dtype.name not in _CODES:
            raise TrainingError(f"A checkpoint cannot hold {name}, whose dtype is {dtype.name}.")
        end = begin + math.prod(array.shape) * dtype.size
        header[name] = _entry(_CODES[dtype.name], array.shape, begin, end)
        begin = end
    count = len(arrays) + 1
    header[_CHECKSUMS] = _entry("U32", (count,), begin, begin + 4 * count)
    encoded = json.dumps(header).encode()
    return encoded + b" " * (-len(encoded) % 8)  # arrays begin at a multiple of 8


def _entry(code: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}


def _row_blocks(array: keras.Variable | np.ndarray) -> Iterator[np.ndarray]:
    if not isinstance(array, np.ndarray):
        yield from (read_rows(array, start, stop) for start, stop in blocks(array))
        return
    rows = np.atleast_1d(array)
    yield from (rows[start:stop] for start, stop in block_ranges(rows.shape, array.itemsize))


class CheckpointFile(contextlib.AbstractContextManager["CheckpointFile"]):
    """A checkpoint to read from.

    Attributes:
        progress: of the training.
        kinds: group -> class, of the groups that only the same class can restore.
        arrays: `group/name` -> array.

    Raises:
        TrainingError: no such file, or one that cannot be read; a file of a newer version of this
            package.
        DamagedCheckpointError: not a checkpoint, a part of one, or one whose header is damaged.
    """

    def __init__(self, path: str):
        self._path = path
        with self._system_errors():
            self._file = open_file(path)
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_rows(self, array: SavedArray, start: int, stop: int) -> np.ndarray:
        """Returns rows of an array; of a scalar, an array of one value."""
        size = array.row_bytes
        data = self._read(array.begin + start * size, (stop - start) * size)
        dtype = tf.as_dtype(array.dtype).as_numpy_dtype
        return np.frombuffer(data, dtype).reshape(stop - start, *array.shape[1:])

    def read(self, array: SavedArray) -> np.ndarray:
        """Returns a whole array."""
        return np.array(self.read_rows(array, 0, array.rows)).reshape(array.shape)

    def verify(self) -> None:
        """Reads every value once, a block at a time, and compares the checksums.

        Raises:
            DamagedCheckpointError: names the array whose checksum is wrong.
        """
        for (name, array), expected in zip(self.arrays.items(), self._checksums, strict=True):
            checksum = 0
            for start, stop in block_ranges((array.rows * array.row_bytes,), 1):
                checksum = zlib.crc32(self._read(array.begin + start, stop - start), checksum)
            if checksum != expected:
                raise self._damaged(f"the checksum of {name} is wrong")

    def _read_header(self) -> None:
        with self._system_errors():
            size = tf.io.gfile.stat(self._path).length
        length = int.from_bytes(self._read(0, min(size, 8)), "little")
        if not 2 <= length <= size - 8:
            raise self._damaged("it is not a complete safetensors file")
        encoded = self._read(8, length)
        try:
            header = json.loads(encoded)
            metadata = json.loads(header.pop(_METADATA)[_OURS])
            self.arrays = {name: _saved_array(entry, 8 + length) for name, entry in header.items()}
            checksums = self.arrays.pop(_CHECKSUMS)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged("save_checkpoint() has not written it") from error
        if checksums.begin < 0 or size != checksums.begin + 4 * checksums.rows:
            raise self._damaged("a part of it is missing")
        own, *self._checksums = np.frombuffer(
            self._read(checksums.begin, 4 * checksums.rows), "<u4"
        ).tolist()
        if own != zlib.crc32(encoded) or len(self._checksums) != len(self.arrays):
            raise self._damaged("the checksum of its header is wrong")
        if metadata["version"] > _VERSION:
            raise TrainingError(
                f"{self._path} has version {metadata['version']} of the format, and this"
                f" package reads version {_VERSION}. Install a newer version of the package."
            )
        self.progress = Progress(**metadata["progress"])
        self.kinds: dict[str, str] = metadata["kinds"]

    def _read(self, begin: int, count: int) -> bytes:
        with self._system_errors():
            self._file.seek(begin)
            data = self._file.read(count)
        if len(data) != count:
            raise self._damaged("a part of it is missing")
        return data

    @contextlib.contextmanager
    def _system_errors(self) -> Iterator[None]:
        try:
            with os_errors(self._path):
                yield
        except OSError as error:
            raise TrainingError(f"{self._path} cannot be read: {error.strerror}.") from error

    def _damaged(self, reason: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self._path} is not a complete checkpoint: {reason}. Copy it again, or use another"
            " checkpoint."
        )


def _saved_array(entry: Mapping[str, Any], data_begin: int) -> SavedArray:
    begin, _ = entry["data_offsets"]
    return SavedArray(tuple(map(int, entry["shape"])), _DTYPES[entry["dtype"]], data_begin + begin)
