"""One checkpoint in one file: the safetensors format, with a checksum.

    8 bytes             length of the header, little-endian
    header              JSON: name -> dtype, shape and place of each array; `__metadata__`
    arrays              their values, one after another, rows in order
    array `crc32`       the checksum of all bytes before it

The header comes first, so a file is written in one pass, a block of rows at a time. The checksum
comes last. A changed or missing byte anywhere is detected.

Names are `group/name`. A file holds whole values, and no trace of the strategy. It is complete or
absent, on this machine or in a remote store. Paths are strings, which `tf.io.gfile` opens: `gs://`,
`hdfs://`, and local files. A store without renames in place, such as Google Cloud Storage, copies
and deletes instead.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import posixpath
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist_ext.errors import TrainingError
from tfdist_ext.training.state import BLOCK_BYTES, blocks, read_rows

_VERSION = 1  # of the format; another one when older releases cannot read it
_METADATA, _CHECKSUM, _OURS = "__metadata__", "crc32", "tfdist_ext"

# `group/name` -> variable or array.
Arrays: TypeAlias = Mapping[str, keras.Variable | np.ndarray]

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
        epoch: the number of completed epochs. It is also the index of the next epoch.
        step: the number of completed steps, as the optimizer counts them.
        first_epoch: the epoch in which the reading position of the data was 0.
        seed: the seed of the order of examples; 0 without shuffling.
        batches: the number of completed global batches of the next epoch.
        settings: the batch size, other settings of the data, the loss and the metrics, by name.
        data: the state of a ShardedDataset; None with other data.
        stopped: whether a callback stopped the training.
    """

    epoch: int = 0
    step: int = 0
    first_epoch: int = 0
    seed: int = 0
    batches: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    stopped: bool = False

    def __str__(self) -> str:
        if self.batches:
            return f"batch {self.batches} of epoch {self.epoch + 1} (step {self.step})"
        return f"epoch {self.epoch} (step {self.step})"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each value that differs from the one in a checkpoint."""
    return [
        f"{name} was {saved.get(name, 'missing')} and is {now.get(name, 'missing')}"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]


class SavedArray(NamedTuple):
    """An array in a checkpoint, from the byte `begin` of the file on."""

    shape: tuple[int, ...]
    dtype: str  # such as "float32"
    begin: int


def encode_checkpoint(
    progress: Progress, arrays: Arrays, report: Callable[[], object] = lambda: None
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a checkpoint, a block of rows at a time.

    Args:
        report: called after each block.
    """
    header = _header(progress, arrays)
    start = len(header).to_bytes(8, "little") + header
    yield start
    checksum = zlib.crc32(start)
    for array in arrays.values():
        for block in blocks(array):
            rows = np.ascontiguousarray(read_rows(array, *block))
            data = rows.reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(data, checksum)
            yield data
            report()
    yield checksum.to_bytes(4, "little")


def _header(progress: Progress, arrays: Arrays) -> bytes:
    text = json.dumps({"version": _VERSION, "progress": asdict(progress)})
    header: dict[str, Any] = {_METADATA: {_OURS: text}}
    begin = 0
    for name, array in {**arrays, _CHECKSUM: np.zeros(1, np.uint32)}.items():
        dtype = tf.as_dtype(array.dtype)
        if dtype.name not in _CODES:
            raise TrainingError(
                f"A checkpoint cannot hold {name}: its dtype is {dtype.name}. Use one of"
                f" {', '.join(_CODES)}."
            )
        end = begin + math.prod(array.shape) * dtype.size
        places = {"shape": list(array.shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": _CODES[dtype.name], **places}
        begin = end
    encoded = json.dumps(header).encode()
    return encoded + b" " * (-len(encoded) % 8)  # arrays begin at a multiple of 8


@contextlib.contextmanager
def open_checkpoint(
    path: str, report: Callable[[], object] = lambda: None
) -> Iterator[CheckpointFile]:
    """Scope with a complete checkpoint to read from.

    Args:
        report: called for each block that is read.

    Raises:
        TrainingError: there is no such file, or it cannot be read.
        DamagedCheckpointError: not a checkpoint, or one with a changed or missing byte.
    """
    try:
        with open_file(path) as file:
            if not _is_complete(file, report):
                raise DamagedCheckpointError(
                    f"{path} is not a complete checkpoint: the checksum at its end is wrong. Copy"
                    " it again, or use another checkpoint."
                )
            yield CheckpointFile(file, path, report)
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be read: {error.strerror or error}. Check the path, or use another"
            " checkpoint."
        ) from error


def _is_complete(file: IO[bytes], report: Callable[[], object]) -> bool:
    """Reads every byte once, a block at a time, and compares the checksum."""
    file.seek(0, 2)
    end, checksum = file.tell() - 4, 0
    file.seek(0)
    while data := file.read(min(BLOCK_BYTES, max(0, end - file.tell()))):
        checksum = zlib.crc32(data, checksum)
        report()
    return end >= 8 and checksum.to_bytes(4, "little") == file.read(4)


class CheckpointFile:
    """A complete checkpoint to read from.

    Attributes:
        progress: of the training.
        arrays: `group/name` -> array.
    """

    def __init__(self, file: IO[bytes], path: str, report: Callable[[], object] = lambda: None):
        self._file = file
        self._report = report
        length = int.from_bytes(self._read(0, 8), "little")
        header = json.loads(self._read(8, length))
        ours = json.loads(header.pop(_METADATA)[_OURS])
        if ours["version"] != _VERSION:
            raise TrainingError(
                f"{path} has format {ours['version']}, and this tfdist_ext reads format"
                f" {_VERSION}. Install the version of tfdist_ext that wrote it."
            )
        self.progress = Progress(**ours["progress"])
        del header[_CHECKSUM]
        begin = 8 + length
        self.arrays = {
            name: SavedArray(
                tuple(entry["shape"]), _DTYPES[entry["dtype"]], begin + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }

    def read_rows(self, array: SavedArray, start: int, stop: int) -> np.ndarray:
        """Returns rows of an array; of a scalar, an array of one value."""
        dtype, row = tf.as_dtype(array.dtype), array.shape[1:]
        size = math.prod(row) * dtype.size
        data = self._read(array.begin + start * size, (stop - start) * size)
        return np.frombuffer(data, dtype.as_numpy_dtype).reshape(stop - start, *row)

    def read(self, array: SavedArray) -> np.ndarray:
        """Returns a whole array."""
        rows = array.shape[0] if array.shape else 1
        return np.array(self.read_rows(array, 0, rows)).reshape(array.shape)

    def _read(self, begin: int, count: int) -> bytes:
        self._report()
        self._file.seek(begin)
        return self._file.read(count)


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Scope of file operations: TensorFlow's errors become OSErrors."""
    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(None, error.message) from error
    except tf.errors.OpError as error:
        raise OSError(None, error.message) from error


@contextlib.contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Scope in which an OSError becomes a TrainingError that names the path."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror or error}. Free disk space, correct its"
            " permissions, or use another folder."
        ) from error


@os_errors()
def names_in(folder: str) -> list[str]:
    """Returns the names in a folder; an empty list if there is no such folder."""
    return list(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []


def remove(path: str) -> None:
    """Removes a file, if it exists."""
    with contextlib.suppress(FileNotFoundError), os_errors():
        tf.io.gfile.remove(path)


class _RemoteFile(tf.io.gfile.GFile):
    """A file that TensorFlow opens; its errors are OSErrors."""

    read = os_errors()(tf.io.gfile.GFile.read)
    seek = os_errors()(tf.io.gfile.GFile.seek)
    close = os_errors()(tf.io.gfile.GFile.close)

    @os_errors()
    def write(self, data: bytes | memoryview) -> None:
        super().write(bytes(data))


def open_file(path: str, mode: str = "rb") -> Any:
    """Opens a file in a binary mode.

    Python opens local files: it reads them three times as fast as TensorFlow.
    """
    return _RemoteFile(path, mode) if "://" in path else open(path, mode)


def write_atomically(
    path: str,
    blocks: Iterable[bytes | memoryview],
    *,
    writer: str = "",
    before_rename: Callable[[], object] = lambda: None,
) -> None:
    """Writes a new file under another name, and renames it when all data is on disk.

    The other name is `.<name><writer>.unfinished`. An error removes the unfinished file. A crash
    leaves it, and the file that was there before. The folder is made if there is none.

    Raises:
        TrainingError: the file cannot be written, for example because the disk is full.
    """
    folder, name = posixpath.split(path)
    unfinished = posixpath.join(folder, f".{name}{writer}.unfinished")
    with write_errors(path):
        try:
            with os_errors():
                tf.io.gfile.makedirs(folder or ".")
            with open_file(unfinished, "wb") as file:
                for data in blocks:
                    file.write(data)
                if not isinstance(file, _RemoteFile):
                    file.flush()
                    os.fsync(file.fileno())
            before_rename()
            with os_errors():
                tf.io.gfile.rename(unfinished, path, overwrite=True)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                remove(unfinished)
            raise
