"""Files: which ones a pattern matches, where each record begins, and reading their bytes.

A TFRecord file is a sequence of records. A record is the length of its payload (uint64), a checksum
of the length (uint32), the payload, and a checksum of the payload (uint32), all little-endian. A
checksum is a masked CRC-32C (`tensorflow/core/lib/io/record_writer.h`).

The offsets of the file `name` are found once, in one pass over the length fields, and kept beside
it in `.name.tfdindex`: a NumPy array (int64) of the size and time stamp of the data, the checksum
of the last payload, and the offsets. An index is valid only while size and time stamp are those of
the data. It is written under another name and renamed, so that several tasks may write it at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import uuid
import weakref
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist_ext.errors import DataError
from tfdist_ext.messages import counted, optional_module, shown
from tfdist_ext.user_frames import warn

INDEX_SUFFIX = ".tfdindex"  # the index of the file `name` is the file `.name.tfdindex` beside it

Patterns: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

HEADER, TAIL = 12, 4  # bytes before and after a payload

_HEADER = Struct("<QI")
_BLOCK_BYTES = 1 << 20  # read at once, to find the records in a block
_SEEK_BYTES = 1 << 14  # of longer records only the header is read
_LONGEST = 1 << 36  # bytes of a record; the first 8 bytes of a text are a larger number
FILES_AT_ONCE = 16  # files; opening a remote file mostly waits


def files_of(patterns: Patterns) -> list[str]:
    """All files that patterns match, each once, sorted; without index files of this package.

    Raises:
        DataError: there are no patterns, or a pattern matches no file.
    """
    if isinstance(patterns, str | bytes | os.PathLike) or not isinstance(patterns, Iterable):
        patterns = [patterns]
    listed = list(patterns)
    if not listed or not all(isinstance(pattern, str | os.PathLike) for pattern in listed):
        raise DataError(f"files must be a pattern or path, or a list of them, got {shown(listed)}.")
    paths = set().union(*(_matches(os.fspath(pattern)) for pattern in listed))
    # One file may be given in several spellings: "a", "./a".
    one_each = {os.path.abspath(path) if is_local(path) else path: path for path in sorted(paths)}
    return sorted(one_each.values())


def _matches(pattern: str) -> set[str]:
    try:
        if tf.io.gfile.exists(pattern):  # a name with "[1]" in it is itself, not a pattern
            return {pattern}
        paths = {path for path in tf.io.gfile.glob(pattern) if not _is_index(path)}
    except tf.errors.OpError as error:
        raise DataError(f"{pattern!r} cannot be searched: {error.message}.") from None
    if not paths:
        where = f" (from {os.getcwd()})" if is_local(pattern) and not os.path.isabs(pattern) else ""
        raise DataError(
            f"no file matches {pattern!r}{where}. Check that the folder exists on this machine."
        )
    return paths


def _is_index(path: str) -> bool:
    """Whether a file is an index or an unfinished one, which patterns for data match, too."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and INDEX_SUFFIX in name


def is_local(path: str) -> bool:
    """Whether a path is one of the operating system's, and not for example `gs://`."""
    return "://" not in path


def stamp_of(path: str) -> tuple[int, int]:
    """The size of a file, and its modification time in nanoseconds (0 if unknown).

    Raises:
        DataError: the file does not exist, cannot be read, or is a folder.
    """
    try:
        status = tf.io.gfile.stat(path)
    except tf.errors.OpError as error:
        raise DataError(f"{path} cannot be read: {error.message}.") from None
    if status.is_directory:
        raise DataError(f"{path} is a folder. Give a pattern for the files in it.")
    return status.length, status.mtime_nsec


class FileReader:
    """An open file, which is closed when the last reference to the reader is gone.

    A local file is read with `os.pread`, by any number of threads. Any other file is read through
    `tf.io.gfile`, by one thread at a time.

    Raises:
        DataError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: Any = None if is_local(path) else tf.io.gfile.GFile(path, "rb")
        try:
            if self._file is not None:
                self._file.read(0)  # opens the file
            else:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._descriptor)
        except (OSError, tf.errors.OpError) as error:
            raise DataError(f"{path} cannot be read: {error}.") from None

    def read_at(self, offset: int, count: int) -> bytes:
        """The bytes from an offset on; fewer than `count` only at the end of the file.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            if self._file is None:
                parts = []
                # One call may return fewer bytes: at most 2 GiB, and less on some file systems.
                while count and (part := os.pread(self._descriptor, count, offset)):
                    parts.append(part)
                    offset, count = offset + len(part), count - len(part)
                return b"".join(parts)
            with self._lock:
                self._file.seek(offset)
                return self._file.read(count)
        except (OSError, tf.errors.OpError) as error:
            raise DataError(f"{self._path} cannot be read: {error}.") from None


@dataclass(frozen=True)
class RecordIndex:
    """The records of one file.

    Attributes:
        path: path of the data.
        stamp: (size, time of the last change) of the data; see `stamp_of`.
        records: number of records before the first damage.
        checksum: the stored checksum of the last of these records.
        held: the offsets, if they are not kept in a file.
    """

    path: str
    stamp: tuple[int, int]
    records: int
    checksum: int
    held: np.ndarray | None = None

    def offsets(self) -> np.ndarray:
        """Where each record begins, and where the last one ends: int64 [records + 1], in bytes.

        Raises:
            DataError: the index was removed, or describes other data now.
        """
        if self.held is not None:
            return self.held
        numbers = _load(self.path, self.stamp)
        if numbers is None or len(numbers) != self.records + 2:
            place = _place_of(self.path)
            raise DataError(f"{place} was removed or changed while it was in use. Start again.")
        return numbers[1:]


def indexes_of(paths: list[str], *, skip_damaged: bool = False) -> list[RecordIndex]:
    """The indexes of TFRecord files, loaded, or built and kept.

    Args:
        paths: paths of uncompressed files.
        skip_damaged: if a file is damaged, warn and index the records before the damage.

    Raises:
        DataError: a file cannot be read, is damaged or truncated, or changes while it is read.
    """
    unwritable: list[str] = []
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        indexes = list(pool.map(lambda path: _index_of(path, skip_damaged, unwritable), paths))
    if unwritable:
        warn(
            f"the indexes of {counted(len(unwritable), 'file')} cannot be written, such as"
            f" {_place_of(min(unwritable))}, so each task counts the records at each start. Make"
            " the folder writable for one run."
        )
    return indexes


def _index_of(path: str, skip_damaged: bool, unwritable: list[str]) -> RecordIndex:
    stamp = stamp_of(path)
    size, modified = stamp
    if size == 0:  # a writer wrote no records, or was killed
        warn(f"{path} is empty: it has no records.")
    numbers = _load(path, stamp)
    if numbers is not None:
        return RecordIndex(path, stamp, len(numbers) - 2, int(numbers[0]))
    read_at = FileReader(path).read_at
    offsets, damage = scan(read_at, size)
    checksum = int.from_bytes(read_at(max(int(offsets[-1]) - TAIL, 0), TAIL), "little")
    if stamp_of(path) != stamp:
        raise DataError(f"{path} was written to while its records were counted. Start again.")
    index = RecordIndex(path, stamp, len(offsets) - 1, checksum, offsets)
    if damage:
        where = f"{path}: record {index.records} at byte {offsets[-1]} of {size}: {damage}."
        if not skip_damaged:
            raise DataError(
                f"{where} Is it an uncompressed TFRecord file? If it is damaged, write it again, or"
                ' read only the records before with on_error="skip".'
            )
        warn(f"{where} The rest of the file is skipped.")
    elif modified:  # without a time, an index could not be checked against the data
        if _keep(index, offsets):
            return replace(index, held=None)
        unwritable.append(path)
    return index


def begins_with_record(path: str) -> bool:
    """Whether the first bytes of a file are those of a record."""
    start = FileReader(path).read_at(0, HEADER)
    if len(start) < HEADER or _HEADER.unpack(start)[0] > _LONGEST:
        return False
    return masked(crc32c()(start[:8])) == _HEADER.unpack(start)[1]


def crc32c() -> Callable[[bytes], int]:
    """The checksum function.

    Raises:
        DataError: google-crc32c is not installed.
    """
    use = "Reading or checking records of TFRecord files by number"
    return optional_module("google_crc32c", "google-crc32c", use, error=DataError).value


def masked(crc: Any) -> Any:
    """The masked form of a checksum, or of an array (uint64) of checksums."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def scan(read_at: Callable[[int, int], bytes], size: int) -> tuple[np.ndarray, str]:
    """Go from record to record over `size` bytes, and check every length field.

    Payloads of large records are not read.

    Returns:
        The offset of each record and of the end of the last one (int64), and a description of the
        damage there; "" without damage.
    """
    checksum, offsets = crc32c(), array("q", [0])
    block, start, length = b"", 0, 0
    at, damage = 0, ""
    while at < size and not damage:
        if at + HEADER > start + len(block):
            start, block = at, read_at(at, HEADER if length > _SEEK_BYTES else _BLOCK_BYTES)
        if at + HEADER > start + len(block):
            damage = "the file ends inside the record"
            break
        length, written = _HEADER.unpack_from(block, at - start)
        if masked(checksum(block[at - start : at - start + 8])) != written:
            damage = "its length field is damaged (wrong checksum)"
        elif at + HEADER + length + TAIL > size:
            damage = "the file ends inside the record"
        else:
            at += HEADER + length + TAIL
            offsets.append(at)
    return np.array(offsets), damage


def _place_of(path: str) -> str:
    """The path of a file's index."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}{INDEX_SUFFIX}"


def _load(path: str, stamp: tuple[int, int]) -> np.ndarray | None:
    """The checksum and offsets of a file, memory-mapped, if an index has this stamp."""
    place = _place_of(path)
    try:
        if is_local(place):
            numbers = np.load(place, mmap_mode="r")
        else:
            numbers = np.load(io.BytesIO(tf.io.gfile.GFile(place, "rb").read()))
    except (OSError, ValueError, EOFError, tf.errors.OpError):
        return None
    if numbers.dtype != np.int64 or numbers.ndim != 1 or len(numbers) < 4:
        return None
    right = tuple(numbers[:2]) == stamp and (numbers[3], numbers[-1]) == (0, stamp[0])
    return numbers[2:] if right else None


def _keep(index: RecordIndex, offsets: np.ndarray) -> bool:
    """Write the index. Returns whether this was possible."""
    place = _place_of(index.path)
    unfinished = f"{place}.{uuid.uuid4().hex}.unfinished"
    try:
        with tf.io.gfile.GFile(unfinished, "wb") as file:
            np.save(file, np.concatenate([[*index.stamp, index.checksum], offsets]))
        tf.io.gfile.rename(unfinished, place, overwrite=True)
    except (OSError, tf.errors.OpError):
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(unfinished)
        return False
    return True
