"""The position of a training in its data, and in which: a few JSON fields, kept in a checkpoint.

A fingerprint identifies data without reading all of it. It is one level of fields, so that a
difference can be named. It does not grow with the data: of many files it has numbers and hashes of
all, not a field for each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from tfdist_ext.data.file_bytes import Stamp
from tfdist_ext.data.shards import check_field
from tfdist_ext.errors import DataError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Fingerprint", "Position", "difference", "fingerprint_of_arrays", "fingerprint_of_files"]

Fingerprint: TypeAlias = dict[str, Any]  # name of a field -> text or number

_BLOCK = 1 << 12  # bytes that are hashed together
_BLOCKS = 256  # of each array at most: with 4 KiB each, 1 MiB of it is read


@filter_traceback
@dataclass(frozen=True)
class Position:
    """A place in the order of examples; it says nothing about workers, so any number can resume.

    Attributes:
        seed: that of the order; None where it is the order of the data.
        epoch: the current one, from 0.
        examples: of this epoch, those behind: in the order, from its start, over all workers.
        fingerprint: of the data (`fingerprint_of_arrays`, `fingerprint_of_files`).

    Raises:
        DataError: a field that is no whole number from 0, or a fingerprint that is no JSON object.
    """

    seed: int | None
    epoch: int
    examples: int
    fingerprint: Fingerprint = field(hash=False)

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_field(self, "seed", "the position's seed", high=2**63 - 1)
        for name in ("epoch", "examples"):
            check_field(self, name, f"the position's {name}")
        if not isinstance(self.fingerprint, Mapping):
            raise DataError(
                "the position's fingerprint must be an object with a field for each property of the"
                f" data, got {shown(self.fingerprint)}."
            )
        # As it comes back from JSON, so that a position equals the one that was saved.
        object.__setattr__(self, "fingerprint", json.loads(json.dumps(dict(self.fingerprint))))

    def to_state(self) -> dict[str, Any]:
        """The fields; `json.dumps` takes them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_state(cls, state: object) -> Position:
        """The position of `to_state()`.

        Raises:
            DataError: not an object of these fields: names those that are missing or unknown.
        """
        if not isinstance(state, Mapping):
            raise DataError(
                f"the state of data must be a JSON object, got {shown(state)}; give what state()"
                " returned."
            )
        names = [one.name for one in fields(cls)]
        missing = [name for name in names if name not in state]
        unknown = [name for name in state if name not in names]
        if missing or unknown:
            said = [f"no {', '.join(missing)}"] if missing else []
            said += [f"unknown: {', '.join(map(shown, unknown))}"] if unknown else []
            raise DataError(
                f"the state of data must have the fields {', '.join(names)}, got {'; '.join(said)}."
                " It was written by another version of tfdist_ext, or is not a state of data."
            )
        return cls(**state)

    def check_data(self, fingerprint: Fingerprint) -> None:
        """Check that this is a position in the data with that fingerprint.

        Raises:
            DataError: the data has changed since the position was saved: names the difference.
        """
        changed = difference(self.fingerprint, json.loads(json.dumps(fingerprint)))
        if changed:
            raise DataError(
                "the data must be the same as when this position was saved, got changed data:"
                f" {changed}. Example {self.examples} of epoch {self.epoch} is in another place"
                " now. Resume with the data as it was, or start again without the saved position."
            )

    def after(self, examples: int, n: int) -> Position:
        """The position when that many more examples, of `n` an epoch, are behind.

        The end of an epoch is the start of the next.

        Raises:
            DataError: a number that is no whole one from 0, or no examples in an epoch.
        """
        more = check_int(examples, "the examples gone past", error=DataError)
        n = check_int(n, "the examples of an epoch", 1, error=DataError)
        epochs, rest = divmod(self.examples + more, n)
        return Position(self.seed, self.epoch + epochs, rest, self.fingerprint)


def fingerprint_of_arrays(arrays: Mapping[str, np.ndarray]) -> Fingerprint:
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


def fingerprint_of_files(
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
