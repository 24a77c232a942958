"""Where each record of a TFRecord file begins, so that any of them can be read by its number.

The index is built once, in a pass over the length fields; payloads far apart are skipped, not read.
It is kept beside the data, or else in a cache folder of this machine.

An index file is a line that says what it is, a line of JSON (the size and time stamp of the data,
the number of records), blanks up to a multiple of 8 bytes, and the offsets (int64, little-endian).
It counts only where size and time stamp are still those of the data. It is written under another
name and renamed when it is complete, so that any number of tasks may write it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist_ext.data.file_bytes import Stamp, is_local, open_bytes, stamp_of
from tfdist_ext.data.record_format import Damage, walk
from tfdist_ext.errors import DataError
from tfdist_ext.user_frames import warn

__all__ = ["RecordIndex", "index_of", "indexes_of", "is_index", "load", "places_of", "store"]

_SUFFIX = ".tfdindex"
_MAGIC = b"tfdist record index 1\n"
_HEAD = re.compile(_MAGIC + rb'{"size": (\d+), "modified_ns": (-?\d+), "records": (\d+)}\n')
_AT_ONCE = 8  # files; most of the time of a remote one is waiting


@dataclass(frozen=True)
class RecordIndex:
    """The records of one file.

    Attributes:
        path: of the data.
        stamp: size and time of the data that this describes.
        records: how many there are; with `damage`, those before it.
        damage: what the file ends at, when that is not the end of its last record.
        kept_in: the local file that holds the offsets; "" where they are held in memory.
    """

    path: str
    stamp: Stamp
    records: int
    damage: Damage | None
    kept_in: str
    _held: np.ndarray | None

    def content(self) -> str:
        """A fingerprint of the file's content: its time, or its offsets where it has none."""
        if self.stamp.modified_ns:
            return str(self.stamp.modified_ns)
        return hashlib.blake2b(self.offsets().tobytes(), digest_size=12).hexdigest()

    def offsets(self) -> np.ndarray:
        """Where each record begins, and where the last one ends: int64, `records` + 1, in bytes.

        Mapped from `kept_in` at each call: whoever reads many files holds few of them.

        Raises:
            DataError: the index was removed or written anew meanwhile, for other data.
        """
        if self._held is not None:
            return self._held
        offsets = load(self.kept_in, self.stamp)
        if offsets is None or len(offsets) != self.records + 1:
            raise DataError(
                f"{self.kept_in}, the index of {self.path}, is not there any more, or is that of"
                " other data: the file has changed while it was in use. Start again."
            )
        return offsets

    def damaged(self) -> str:
        """A message on the damage, with the file's name, the record and the offset."""
        assert self.damage is not None
        record, offset, what = self.damage
        return f"{self.path}: record {record} at byte {offset} of {self.stamp.size}: {what}."


def index_of(path: str, *, on_error: str = "raise") -> RecordIndex:
    """The index of a TFRecord file: the one that is kept, or one that is built now, and kept.

    Args:
        path: of an uncompressed TFRecord file, local or whatever `tf.io.gfile` opens.
        on_error: "raise", or "skip": of a damaged file, the records before the damage.

    Raises:
        DataError: the file cannot be read; it is truncated, or a length field is damaged, and
            `on_error` is "raise"; it changes while it is read.
    """
    stamp = stamp_of(path)
    if stamp.size == 0:  # as writers leave it that had no records, or that died at once
        warn(f"{path} is empty: it has 0 bytes, and no records.")
    # Where the file system knows no times, a kept index may be of another file.
    places = places_of(path) if stamp.modified_ns else ()
    for place in places:
        offsets = load(place, stamp)
        if offsets is not None and offsets[0] == 0 and offsets[-1] == stamp.size:
            return _indexed(path, stamp, offsets, place)
    file = open_bytes(path)
    offsets, damage = walk(file.read_at, stamp.size)
    if stamp_of(path) != stamp:
        raise DataError(f"{path} was written to while its records were counted. Start again.")
    if damage is not None:
        # Not kept: when the file is whole again, it may have the same size and time.
        index = _indexed(path, stamp, offsets, damage=damage)
        if on_error == "raise":
            raise DataError(f"{index.damaged()} {_advice(damage, file.read_at(0, 2))}")
        return index
    kept_in = next((place for place in places if store(place, stamp, offsets)), "")
    if places and not kept_in:
        warn(
            f"the index of {path} can be kept neither in {' nor in '.join(places)}: each task"
            " counts the file's records at each start. Make one of the folders writable, or set"
            " XDG_CACHE_HOME."
        )
    return _indexed(path, stamp, offsets, kept_in)


def indexes_of(paths: list[str], *, on_error: str = "raise") -> list[RecordIndex]:
    """The indexes of files, in their order, several at a time.

    Raises:
        DataError: as `index_of`, for the first of the files that has an error.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda path: index_of(path, on_error=on_error), paths))


def _indexed(
    path: str, stamp: Stamp, offsets: np.ndarray, place: str = "", damage: Damage | None = None
) -> RecordIndex:
    kept_in = place if is_local(place) else ""
    held = None if kept_in else offsets
    return RecordIndex(path, stamp, len(offsets) - 1, damage, kept_in, held)


def _advice(damage: Damage, start: bytes) -> str:
    if damage.record:
        return 'Write the file again, or read the records before with on_error="skip".'
    if start in (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda"):
        return "It seems to be compressed: records can be read by number only uncompressed."
    return "Is it a TFRecord file?"


def is_index(path: str) -> bool:
    """Whether a file is an index, or an unfinished one, and not data: patterns match them, too."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and _SUFFIX in name


def places_of(path: str) -> tuple[str, str]:
    """The possible paths of a file's index, in the order to try: beside it, and in the cache."""
    folder, slash, name = path.rpartition("/")
    whole = os.path.realpath(path) if is_local(path) else path
    digest = hashlib.blake2b(whole.encode(), digest_size=12).hexdigest()
    # As the XDG base directory specification has it.
    root = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()
    cached = caches / "tfdist_ext" / f".{name[:100]}.{digest}{_SUFFIX}"
    return f"{folder}{slash}.{name}{_SUFFIX}", str(cached)


def load(place: str, stamp: Stamp) -> np.ndarray | None:
    """The offsets kept in a place, if they are those of data with this stamp.

    Returns:
        int64, one more than there are records; of a local index they are mapped, not read, and the
        operating system may take their memory back. None where there is nothing that can be used.
    """
    try:
        data: np.ndarray
        if is_local(place):
            data = np.memmap(place, np.uint8, "r")
        else:
            with tf.io.gfile.GFile(place, "rb") as file:
                data = np.frombuffer(file.read(), np.uint8)
    except (OSError, ValueError, tf.errors.OpError):
        return None
    head = _HEAD.match(data[:1000].tobytes())
    if head is None:
        return None
    size, modified_ns, records = map(int, head.groups())
    start = len(_padded(head[0]))
    if (size, modified_ns) != stamp or len(data) != start + 8 * (records + 1):
        return None
    return data[start:].view("<i8")


def store(place: str, stamp: Stamp, offsets: np.ndarray) -> bool:
    """Keep the offsets there; whether that was possible."""
    head = {"size": stamp.size, "modified_ns": stamp.modified_ns, "records": len(offsets) - 1}
    data = _padded(_MAGIC + json.dumps(head).encode() + b"\n") + offsets.astype("<i8").tobytes()
    unfinished = f"{place}.{uuid.uuid4().hex}.unfinished"
    try:
        if is_local(place):  # the cache folder may not be there yet
            Path(place).parent.mkdir(parents=True, exist_ok=True)
        with tf.io.gfile.GFile(unfinished, "wb") as file:
            file.write(data)
        tf.io.gfile.rename(unfinished, place, overwrite=True)
    except BaseException as error:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(unfinished)
        if isinstance(error, OSError | tf.errors.OpError):
            return False
        raise
    return True


def _padded(head: bytes) -> bytes:
    return head + b" " * (-len(head) % 8)
