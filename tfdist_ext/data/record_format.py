"""The format of a TFRecord file: records one after the other, nothing else.

A record is its payload's length (uint64), the checksum of these 8 bytes (uint32), the payload, and
the payload's checksum (uint32), all little-endian. A checksum is a CRC-32C, masked: rotated by 15
bits, plus a constant (`tensorflow/core/lib/io/record_writer.h`).

There is no table of records in it, so one is made by a walk from length to length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from tfdist_ext.errors import DataError
from tfdist_ext.messages import optional_module

__all__ = ["HEADER", "OVERHEAD", "TAIL", "Damage", "is_header", "is_record", "payloads_of", "walk"]

HEADER = 12  # bytes before the payload
TAIL = 4  # bytes after the payload
OVERHEAD = 16  # bytes of a record that are not its payload

_LENGTH = Struct("<Q")
_CHECKSUM = Struct("<I")
_HEADERS = np.dtype([("length", "<u8"), ("checksum", "<u4")])
_MASK = 0xA282EAD8

_WIDE = 1 << 20  # bytes of a look at the file: many records
_NARROW = 1 << 12  # bytes of a look where records are far apart: their payloads are not read
_FAR = 1 << 14  # bytes between records from which on they are
_CHECK_EVERY = 1 << 20  # records; until its length is checked, a walk may go astray


class Damage(NamedTuple):
    """The place where a walk had to end.

    Attributes:
        record: the number of the record that is damaged, from 0.
        offset: of its first byte in the file.
        what: is wrong with it, in words.
    """

    record: int
    offset: int
    what: str


def _crc32c() -> Callable[[Any], int]:
    use = "Reading records of TFRecord files by number"
    return optional_module("google_crc32c", "google-crc32c", use, error=DataError).value


@functools.cache
def _checksums_of_bytes() -> tuple[np.uint32, np.ndarray]:
    """The checksum of 8 zeros; for each byte and each value of it, the bits that change in it.

    A CRC is linear over XOR, so the checksums of many lengths are sums of these.
    """
    value = _crc32c()
    zeros = np.uint32(value(bytes(8)))
    single = [[value(bytes(i) + bytes([b]) + bytes(7 - i)) for b in range(256)] for i in range(8)]
    return zeros, zeros ^ np.array(single, np.uint32)


def _checksums_of(lengths: np.ndarray) -> np.ndarray:
    """The masked checksums of length fields (uint64 -> uint32)."""
    digits = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    zeros, changes = _checksums_of_bytes()
    crc = np.full(len(lengths), zeros)
    for i in range(8):
        crc ^= changes[i][digits[:, i]]
    return _masked(crc)


def _masked(crc: Any) -> Any:
    with np.errstate(over="ignore"):  # a single number, unlike an array, warns of it
        return ((crc >> 15) | (crc << 17)) + np.uint32(_MASK)


def is_header(data: bytes) -> bool:
    """Whether these bytes, the first of a file, begin a record."""
    if len(data) < HEADER:
        return False
    field = np.frombuffer(data, _HEADERS, 1)
    return bool(_checksums_of(field["length"])[0] == field["checksum"][0])


def is_record(header: bytes, payload: bytes, tail: bytes) -> bool:
    """Whether these parts are a record: its length and its checksum are right."""
    crc = np.uint32(_crc32c()(payload))
    right = _LENGTH.unpack_from(header)[0] == len(payload)
    return bool(right and _masked(crc) == _CHECKSUM.unpack(tail)[0])


def payloads_of(data: bytes, sizes: np.ndarray) -> list[bytes | None]:
    """The payloads of records that follow one another; None where length or checksum is wrong.

    Args:
        data: the bytes of whole records.
        sizes: bytes of each of them.
    """
    if len(sizes) == 0:
        return []
    ends = np.cumsum(sizes)
    starts = ends - sizes
    cuts = zip((starts + HEADER).tolist(), (ends - TAIL).tolist(), strict=True)
    payloads: list[bytes | None] = [data[start:end] for start, end in cuts]
    checksums = np.fromiter(map(_crc32c(), payloads), np.uint32, len(payloads))
    # Fields at any offset: arrays whose elements overlap.
    lengths = np.ndarray(len(data) - 7, "<u8", data, strides=1)[starts]
    written = np.ndarray(len(data) - 3, "<u4", data, strides=1)[ends - TAIL]
    wrong = (lengths != sizes - OVERHEAD) | (_masked(checksums) != written)
    for i in np.flatnonzero(wrong):
        payloads[i] = None
    return payloads


def walk(read_at: Callable[[int, int], bytes], size: int) -> tuple[np.ndarray, Damage | None]:
    """Go from record to record over `size` bytes, and check every length field.

    Args:
        read_at: `read_at(offset, count)` gives that many bytes.
        size: bytes of the file.

    Returns:
        The offsets of all records and of the end of the last one (int64, one more than there are
        records), and what the walk ended at when that is not the end of the file. Records from
        there on are not in the offsets.
    """
    offsets = [np.zeros(1, np.int64)]
    headers = bytearray()
    at, width = 0, _WIDE

    def checked() -> bool:
        """Take over the headers gone past, up to the first wrong one; True if all are right."""
        fields = np.frombuffer(bytes(headers), _HEADERS)
        wrong = np.flatnonzero(_checksums_of(fields["length"]) != fields["checksum"])
        good = fields["length"][: wrong[0] if wrong.size else None].astype(np.int64)
        offsets.append(offsets[-1][-1] + np.cumsum(good + OVERHEAD))
        headers.clear()
        return not wrong.size

    right = True
    while right and at + HEADER <= size:
        look = read_at(at, min(width, size - at))
        position, last, before = 0, len(look) - HEADER, len(headers)
        while position <= last:
            headers += look[position : position + HEADER]
            position += _LENGTH.unpack_from(look, position)[0] + OVERHEAD
        at += position
        count = (len(headers) - before) // HEADER
        width = _WIDE if position < _FAR * count else _NARROW
        if len(headers) >= _CHECK_EVERY * HEADER:
            right = checked()
    right = right and checked()
    return _ended(np.concatenate(offsets), right, at, size)


def _ended(found: np.ndarray, right: bool, at: int, size: int) -> tuple[np.ndarray, Damage | None]:
    """How a walk ended that found these offsets and stood at byte `at`."""
    records, offset = len(found) - 1, int(found[-1])
    if not right:
        return found, Damage(records, offset, "its length field is damaged (wrong checksum)")
    if at > size:  # the last record is not there as a whole
        start = int(found[-2])
        what = f"the file ends inside of it: {size - start} of its {at - start} bytes are there"
        return found[:-1], Damage(records - 1, start, what)
    if at < size:
        what = f"the file ends inside of its length field: {size - at} of {HEADER} bytes are there"
        return found, Damage(records, offset, what)
    return found, None
