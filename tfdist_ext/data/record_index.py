"""Where each record of a TFRecord file begins, so that any record can be read by its number.

A TFRecord file is a sequence of records. A record is the length of its payload (uint64), a checksum
of the length (uint32), the payload, and a checksum of the payload (uint32), all little-endian. A
checksum is a masked CRC-32C (`tensorflow/core/lib/io/record_writer.h`).

The offsets of the file `name` are found once, in one pass over the length fields, and kept beside
it in `.name.tfdindex`: a NumPy array (int64) of the size and the time stamp of the data, and then
the offsets. An index is valid only while size and time stamp are those of the data. It is written
under another name and renamed, so that several tasks may write it at once.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.files import INDEX_SUFFIX, FileReader, is_local, stamp_of
from tfdist_ext.errors import DataError
from tfdist_ext.messages import optional_module
from tfdist_ext.user_frames import warn

__all__ = [
    "FILES_AT_ONCE",
    "HEADER",
    "TAIL",
    "RecordIndex",
    "begins_with_record",
    "crc32c",
    "indexes_of",
    "masked",
    "scan",
]

HEADER, TAIL = 12, 4  # bytes before and after a payload

_HEADER = Struct("<QI")
_MANY, _FAR = 1 << 20, 1 << 14  # bytes to read at once; longer records are read one by one
FILES_AT_ONCE = 16  # files; opening a remote file mostly waits


@dataclass(frozen=True)
class RecordIndex:
    """The records of one file.

    Attributes:
        path: path of the data.
        stamp: (size, time of the last change) of the data; see `stamp_of`.
        records: number of records before the first damage.
        held: the offsets, if they are not kept in a file.
    """

    path: str
    stamp: tuple[int, int]
    records: int
    held: np.ndarray | None = None

    def offsets(self) -> np.ndarray:
        """Where each record begins, and where the last one ends: int64 [records + 1], in bytes.

        Raises:
            DataError: the index was removed, or describes other data now.
        """
        offsets = _load(self.path, self.stamp) if self.held is None else self.held
        if offsets is None or len(offsets) != self.records + 1:
            place = _place_of(self.path)
            raise DataError(f"{place} was removed or changed while it was in use. Start again.")
        return offsets


def indexes_of(paths: list[str], *, skip_damaged: bool = False) -> list[RecordIndex]:
    """The indexes of TFRecord files, loaded, or built and kept.

    Args:
        paths: paths of uncompressed files.
        skip_damaged: if a file is damaged, warn and index the records before the damage.

    Raises:
        DataError: a file cannot be read, is damaged or truncated, or changes while it is read.
    """
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return list(pool.map(lambda path: _index_of(path, skip_damaged), paths))


def _index_of(path: str, skip_damaged: bool) -> RecordIndex:
    stamp = stamp_of(path)
    size, modified = stamp
    if size == 0:  # a writer wrote no records, or was killed
        warn(f"{path} is empty: it has 0 bytes, and no records.")
    offsets = _load(path, stamp)
    if offsets is not None:
        return RecordIndex(path, stamp, len(offsets) - 1)
    offsets, damage = scan(FileReader(path).read_at, size)
    if stamp_of(path) != stamp:
        raise DataError(f"{path} was written to while its records were counted. Start again.")
    index = RecordIndex(path, stamp, len(offsets) - 1, offsets)
    if damage:
        where = f"{path}: record {index.records} at byte {offsets[-1]} of {size}: {damage}."
        if not skip_damaged:
            raise DataError(
                f"{where} Is it an uncompressed TFRecord file? If it is damaged, write it again, or"
                ' read the records before with on_error="skip".'
            )
        warn(f"{where} The file's records from there on are skipped.")
    elif modified:  # without a time, an index could not be checked against the data
        if _keep(path, stamp, offsets):
            return RecordIndex(path, stamp, index.records)
        warn(
            f"{_place_of(path)} cannot be written, so each task counts the records of {path} at"
            " each start. Make the folder writable, at least once."
        )
    return index


def begins_with_record(path: str) -> bool:
    """Whether the first bytes of a file are those of a record."""
    start = FileReader(path).read_at(0, HEADER)
    return len(start) == HEADER and masked(crc32c()(start[:8])) == _HEADER.unpack(start)[1]


def crc32c() -> Callable[[bytes], int]:
    """The checksum function.

    Raises:
        DataError: google-crc32c is not installed.
    """
    use = "Reading records of TFRecord files by number"
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
            start, block = at, read_at(at, HEADER if length > _FAR else _MANY)
        if at + HEADER > start + len(block):
            damage = "the file ends inside of it"
            break
        length, written = _HEADER.unpack_from(block, at - start)
        if masked(checksum(block[at - start : at - start + 8])) != written:
            damage = "its length field is damaged (wrong checksum)"
        elif at + HEADER + length + TAIL > size:
            damage = "the file ends inside of it"
        else:
            at += HEADER + length + TAIL
            offsets.append(at)
    return np.array(offsets), damage


def _place_of(path: str) -> str:
    """The path of a file's index."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}{INDEX_SUFFIX}"


def _load(path: str, stamp: tuple[int, int]) -> np.ndarray | None:
    """The offsets of a file, memory-mapped, if there is an index of data with this stamp."""
    place = _place_of(path)
    try:
        if is_local(place):
            found = np.load(place, mmap_mode="r")
        else:
            found = np.load(io.BytesIO(tf.io.gfile.GFile(place, "rb").read()))
    except (OSError, ValueError, EOFError, tf.errors.OpError):
        return None
    if found.dtype != np.int64 or found.ndim != 1 or len(found) < 3:
        return None
    right = tuple(found[:2]) == stamp and (found[2], found[-1]) == (0, stamp[0])
    return found[2:] if right else None


def _keep(path: str, stamp: tuple[int, int], offsets: np.ndarray) -> bool:
    """Write the index. Returns whether this was possible."""
    unfinished = f"{_place_of(path)}.{uuid.uuid4().hex}.unfinished"
    try:
        with tf.io.gfile.GFile(unfinished, "wb") as file:
            np.save(file, np.concatenate([np.array(stamp, np.int64), offsets]))
        tf.io.gfile.rename(unfinished, _place_of(path), overwrite=True)
    except (OSError, tf.errors.OpError):
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(unfinished)
        return False
    return True
