"""A fingerprint of data: a few JSON fields that change when the data changes.

It is kept in checkpoints, so that a training resumes only with the data it was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfdist_ext.errors import DataError

__all__ = ["Fingerprint", "difference", "fingerprint_of_arrays", "fingerprint_of_files"]

Fingerprint: TypeAlias = dict[str, Any]  # name of a field -> text or number

_SAMPLE = 1 << 20  # bytes of each array


def fingerprint_of_arrays(arrays: Mapping[str, np.ndarray]) -> Fingerprint:
    """Shape, dtype and a hash of each array.

    The hash is of the whole array up to 1 MiB. Of a larger array it is of rows at even distances,
    the first and the last one among them, so a change of a few rows may go unseen.

    Args:
        arrays: name -> array; the names are those of the fields.

    Raises:
        DataError: an array holds Python objects.
    """
    found: Fingerprint = {"kind": "arrays"}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise DataError(
                f"{name} must have a dtype of fixed size, got Python objects (dtype {array.dtype})."
                " Convert it, for example np.asarray(values, dtype='S20') for short texts."
            )
        sample = array
        if array.nbytes > _SAMPLE:
            count = max(2, _SAMPLE * len(array) // array.nbytes)
            sample = array[np.linspace(0, len(array) - 1, count).astype(np.int64)]
        found[f"{name}: shape"] = list(array.shape)
        found[f"{name}: dtype"] = array.dtype.str
        found[f"{name}: content"] = _digest([sample.tobytes()])
    return found


def fingerprint_of_files(
    files: Sequence[str], stamps: Sequence[tuple[int, int]], records: Sequence[int]
) -> Fingerprint:
    """The numbers of files, bytes and records, and hashes of all names, sizes and times.

    Names are without folders: the same files mounted elsewhere are the same data.

    Args:
        files: the paths, in the order in which their records are numbered.
        stamps: (size, time of the last change) of each file.
        records: number of records in each file.
    """
    return {
        "kind": "files",
        "files": len(files),
        "bytes": sum(size for size, _ in stamps),
        "records": sum(records),
        "names": _digest(path.rpartition("/")[2].encode() for path in files),
        "sizes": _digest(f"{s} {n}".encode() for (s, _), n in zip(stamps, records, strict=True)),
        "time stamps": _digest(str(modified).encode() for _, modified in stamps),
    }


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """The fields that differ, as "records 100 -> 120"; "" if there are none."""
    return ", ".join(
        f"{field} {old.get(field, 'none')} -> {new.get(field, 'none')}"
        for field in {**old, **new}
        if old.get(field) != new.get(field)
    )


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))  # "ab", "c" is not "a", "bc"
        found.update(part)
    return found.hexdigest()
