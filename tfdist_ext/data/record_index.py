"""Where each record of a TFRecord file begins, so that any of them can be read by its number.

The index is built once, in a pass over the length fields; payloads far apart are skipped, not read.
It is kept beside the data, or in a cache folder: `index_files.py`.
"""

from __future__ import annotations

import hashlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from tfdist_ext.data import index_files
from tfdist_ext.data.file_bytes import FileBytes, Stamp, is_local, open_bytes, stamp_of
from tfdist_ext.data.record_format import Damage, walk
from tfdist_ext.errors import DataError

__all__ = ["RecordIndex", "index_of", "indexes_of"]

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
        """What tells whether the file has changed: its time, or its offsets where it has none."""
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
        offsets = index_files.load(self.kept_in, self.stamp)
        if offsets is None or len(offsets) != self.records + 1:
            raise DataError(
                f"{self.kept_in}, the index of {self.path}, is not there any more, or is that of"
                " other data: the file has changed while it was in use. Start again."
            )
        return offsets

    def damaged(self) -> str:
        """What is wrong with the file, with its name, the record and the offset."""
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
        warnings.warn(f"{path} is empty: it has 0 bytes, and no records.", stacklevel=2)
    # Where the file system knows no times, nobody can tell whether a kept index is of this file.
    places = index_files.places_of(path) if stamp.modified_ns else ()
    for place in places:
        offsets = index_files.load(place, stamp)
        if offsets is not None and offsets[0] == 0 and offsets[-1] == stamp.size:
            return _indexed(path, stamp, offsets, place)
    file = open_bytes(path)
    offsets, damage = walk(file.read_at, stamp.size)
    if stamp_of(path) != stamp:
        raise DataError(f"{path} was written to while its records were counted. Start again.")
    if damage is not None:
        # Not kept: when the file is whole again, it may have the same size and time.
        index = RecordIndex(path, stamp, len(offsets) - 1, damage, "", offsets)
        if on_error == "raise":
            _refuse(index, file)
        return index
    if not places:
        return _indexed(path, stamp, offsets, "")
    beside, cached = places
    if index_files.store(beside, stamp, offsets):
        return _indexed(path, stamp, offsets, beside)
    if index_files.store_in_cache(cached, stamp, offsets):
        return _indexed(path, stamp, offsets, cached)
    warnings.warn(
        f"the index of {path} can be kept neither in {beside} nor in {cached}: each task counts the"
        " file's records at each start. Make one of the folders writable, or set XDG_CACHE_HOME.",
        stacklevel=2,
    )
    return _indexed(path, stamp, offsets, "")


def indexes_of(paths: list[str], *, on_error: str = "raise") -> list[RecordIndex]:
    """The indexes of files, in their order, several at a time.

    Raises:
        DataError: as `index_of`, for the first of the files that has an error.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda path: index_of(path, on_error=on_error), paths))


def _indexed(path: str, stamp: Stamp, offsets: np.ndarray, place: str) -> RecordIndex:
    local = bool(place) and is_local(place)
    records = len(offsets) - 1
    return RecordIndex(
        path, stamp, records, None, place if local else "", None if local else offsets
    )


def _refuse(index: RecordIndex, file: FileBytes) -> NoReturn:
    assert index.damage is not None
    if index.damage.record:
        advice = 'Write the file again, or read the records before with on_error="skip".'
    elif file.read_at(0, 2) in (b"\x1f\x8b", b"\x78\x9c", b"\x78\x01", b"\x78\xda"):
        advice = "It seems to be compressed: records can be read by number only uncompressed."
    else:
        advice = "Is it a TFRecord file?"
    raise DataError(f"{index.damaged()} {advice}")
