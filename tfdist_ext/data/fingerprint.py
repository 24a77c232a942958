"""What identifies data without reading all of it: a few JSON fields for a checkpoint.

A fingerprint is one level of fields, so that a difference can be named. It does not grow with the
data: of many files it has numbers and hashes of all, not a field for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfdist_ext.data.file_bytes import Stamp
from tfdist_ext.errors import DataError

__all__ = ["Fingerprint", "difference", "of_arrays", "of_files"]

Fingerprint: TypeAlias = dict[str, Any]  # name of a field -> text or number

_BLOCK = 1 << 12  # bytes that are hashed together
_BLOCKS = 256  # of each array at most: with 4 KiB each, 1 MiB of it is read


def of_arrays(arrays: Mapping[str, np.ndarray]) -> Fingerprint:
    """Shape, dtype and a hash of each array: of all of it up to 1 MiB, else of a sample.

    The sample is 256 blocks of 4 KiB at even distances, the first and the last one among them: a
    change of a few values in between may go unseen. Of a memory-mapped array only that is read.

    Args:
        arrays: name -> array; the names are those of the fields.

    Raises:
        DataError: an array of Python objects, which have no bytes that could be compared.
    """
    found: Fingerprint = {"kind": "arrays"}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise DataError(
                f"{name} must have a dtype of fixed size, got Python objects (dtype {array.dtype})."
                " Convert it, for example np.asarray(values, dtype='S20') for short texts."
            )
        found[f"{name}: shape"] = list(array.shape)
        found[f"{name}: dtype"] = array.dtype.str
        found[f"{name}: content"] = _hash_of(array)
    return found


def of_files(
    files: Sequence[str], stamps: Sequence[Stamp], records: Sequence[int], contents: Sequence[str]
) -> Fingerprint:
    """How many files, bytes and records, and hashes of all names, sizes and time stamps.

    Names are those without folders: the same files mounted elsewhere are the same data.

    Args:
        files: the paths, in the order in which their records are numbered.
        stamps: of each file, from its index.
        records: in each file.
        contents: what else tells that a file has changed: its time stamp, where it has one.
    """
    return {
        "kind": "files",
        "files": len(files),
        "bytes": sum(stamp.size for stamp in stamps),
        "records": sum(records),
        "names": _digest(*(path.rpartition("/")[2].encode() for path in files)),
        "sizes": _digest(*(f"{s.size} {n}".encode() for s, n in zip(stamps, records, strict=True))),
        "time stamps": _digest(*(content.encode() for content in contents)),
    }


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """The fields in which they differ, in words: "records 100 -> 120"; "" where there are none."""
    return ", ".join(
        f"{field} {_shown(old, field)} -> {_shown(new, field)}"
        for field in {**old, **new}
        if old.get(field) != new.get(field)
    )


def _shown(fingerprint: Fingerprint, field: str) -> str:
    value = fingerprint.get(field, "none")
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _hash_of(array: np.ndarray) -> str:
    if array.nbytes <= _BLOCK * _BLOCKS:
        return _digest(array.tobytes())
    # By elements along the array as it is indexed, so that a copy with other strides, or another
    # kind of memory, has the same hash.
    step = max(1, _BLOCK // array.dtype.itemsize)
    starts = np.linspace(0, array.size - step, _BLOCKS).astype(np.int64)
    return _digest(*(_elements(array, int(start), step) for start in starts))


def _elements(array: np.ndarray, start: int, count: int) -> bytes:
    """The bytes of elements in C order, without a copy of the array."""
    if array.flags.c_contiguous:
        return array.reshape(-1)[start : start + count].tobytes()
    return array[np.unravel_index(np.arange(start, start + count), array.shape)].tobytes()


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))  # "ab", "c" is not "a", "bc"
        found.update(part)
    return found.hexdigest()
