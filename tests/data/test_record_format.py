"""The walk over length fields, against TensorFlow's own files, and against every kind of damage."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.data import record_format
from tfdist_ext.data.record_format import OVERHEAD, is_header, is_record, payloads_of, walk


def masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Bit by bit, from the definition: polynomial 0x1EDC6F41, reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return b"".join(
        [
            length,
            struct.pack("<I", masked(crc32c(length))),
            payload,
            struct.pack("<I", masked(crc32c(payload))),
        ]
    )


class Counted:
    """Bytes as a file, which counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.read, self.looks = data, 0, 0

    def __call__(self, offset: int, count: int) -> bytes:
        self.looks += 1
        self.read += len(self.data[offset : offset + count])
        return self.data[offset : offset + count]

    def walk(self) -> Any:
        return walk(self, len(self.data))


def test_the_record_of_this_test_is_that_of_tensorflow(write_records: Any, tmp_path: Any) -> None:
    payloads = [b"", b"a", b"\0" * 300, bytes(range(256))]
    path = write_records(tmp_path / "a", payloads)
    assert tf.io.gfile.GFile(path, "rb").read() == b"".join(map(record, payloads))


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_offsets_and_payloads(payloads: list[bytes]) -> None:
    data = b"".join(map(record, payloads))
    offsets, damage = Counted(data).walk()
    assert damage is None
    assert np.diff(offsets).tolist() == [len(payload) + OVERHEAD for payload in payloads]
    assert (offsets[0], offsets[-1], offsets.dtype) == (0, len(data), np.int64)
    assert payloads_of(data, np.diff(offsets)) == payloads


@pytest.mark.parametrize("wide", [12, 13, 40, 1000])
@pytest.mark.parametrize("check_every", [1, 3, 10**6])
def test_wherever_a_look_ends(monkeypatch: Any, wide: int, check_every: int) -> None:
    monkeypatch.setattr(record_format, "_WIDE", wide)
    monkeypatch.setattr(record_format, "_CHECK_EVERY", check_every)
    payloads = [b"x" * (n * 7 % 50) for n in range(60)]
    offsets, damage = Counted(b"".join(map(record, payloads))).walk()
    assert damage is None
    assert np.diff(offsets).tolist() == [len(payload) + OVERHEAD for payload in payloads]


def test_large_payloads_are_not_read() -> None:
    length = struct.pack("<Q", 10**6)
    one = length + struct.pack("<I", masked(crc32c(length))) + bytes(10**6 + 4)  # no payload
    file = Counted(one * 50)
    offsets, damage = file.walk()
    assert (len(offsets), damage) == (51, None)
    assert file.read < 2 * 2**20  # of 50 million


@given(st.data())
def test_a_file_cut_anywhere_names_the_record_that_is_not_whole(data: st.DataObject) -> None:
    payloads = data.draw(st.lists(st.binary(max_size=30), min_size=1, max_size=8))
    whole = b"".join(map(record, payloads))
    ends = np.cumsum([len(payload) + OVERHEAD for payload in payloads]).tolist()
    cut = data.draw(st.integers(0, len(whole) - 1))
    offsets, damage = Counted(whole[:cut]).walk()
    complete = [0, *(end for end in ends if end <= cut)]
    assert offsets.tolist() == complete
    if cut == complete[-1]:
        assert damage is None  # between two records: no way to know
    else:
        assert (damage.record, damage.offset) == (len(complete) - 1, complete[-1])
        assert "the file ends inside of" in damage.what


@given(st.integers(0, 9), st.integers(0, 95))
def test_any_flipped_bit_of_a_length_field_is_found(number: int, bit: int) -> None:
    data = bytearray(b"".join(record(bytes([i]) * 20) for i in range(10)))
    data[number * 36 + bit // 8] ^= 1 << bit % 8
    offsets, damage = Counted(bytes(data)).walk()
    assert (damage.record, damage.offset) == (number, number * 36)
    assert "length field is damaged" in damage.what
    assert offsets.tolist() == [36 * i for i in range(number + 1)]


@given(st.integers(0, 8 * 36 - 1))
def test_any_flipped_bit_of_a_record_is_found(bit: int) -> None:
    data = bytearray(record(b"p" * 20))
    data[bit // 8] ^= 1 << bit % 8
    found, *_ = payloads_of(bytes(data), np.array([36]))
    parts = bytes(data[:12]), bytes(data[12:-4]), bytes(data[-4:])
    assert is_record(*parts) == (found is not None)
    if 64 <= bit < 96:  # the checksum of the length: a walk looks at it, a read does not
        assert found == b"p" * 20
    else:
        assert found is None


def test_zeros_are_no_records() -> None:
    """An unwritten part of a file: zeros are a length of 0 with a wrong checksum."""
    _, damage = Counted(record(b"a") + bytes(1000)).walk()
    assert (damage.record, damage.offset) == (1, 17)


@pytest.mark.parametrize(
    ("data", "yes"), [(record(b"ab"), True), (b"", False), (b"#" * 40, False), (bytes(12), False)]
)
def test_what_begins_like_a_record(data: bytes, yes: bool) -> None:
    assert is_header(data[:12]) is yes
