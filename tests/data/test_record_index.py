"""Offsets of records in files that TensorFlow wrote, and every kind of damage."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.data import DataError, files
from tfdist_ext.data.files import indexes_of, masked, scan

Write = Callable[..., str]


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    checksums = [struct.pack("<I", masked(google_crc32c.value(part))) for part in (length, payload)]
    return length + checksums[0] + payload + checksums[1]


class Counted:
    """Bytes as a file, which counts how many are read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.read = data, 0

    def __call__(self, offset: int, count: int) -> bytes:
        content = self.data[offset : offset + count]
        self.read += len(content)
        return content

    def scan(self) -> tuple[list[int], str]:
        offsets, damage = scan(self, len(self.data))
        assert offsets.dtype == np.int64
        return offsets.tolist(), damage


def test_a_record_of_this_test_is_tensorflows(write_records: Write, tmp_path: Path) -> None:
    payloads = [b"", b"a", b"\0" * 300, bytes(range(256))]
    path = write_records(tmp_path / "a", payloads)
    assert Path(path).read_bytes() == b"".join(map(record, payloads))


@pytest.mark.parametrize("at_once", [12, 40])
def test_scan_finds_all_offsets(monkeypatch: Any, at_once: int) -> None:
    monkeypatch.setattr(files, "_BLOCK_BYTES", at_once)
    records = [record(b"x" * (n * 7 % 50)) for n in range(60)]
    expected = np.cumsum([0, *map(len, records)]).tolist()
    assert Counted(b"".join(records)).scan() == (expected, "")


def test_scan_does_not_read_large_payloads() -> None:
    length = struct.pack("<Q", 10**6)
    checksum = struct.pack("<I", masked(google_crc32c.value(length)))
    file = Counted((length + checksum + bytes(10**6 + 4)) * 50)
    offsets, damage = file.scan()
    assert (len(offsets), damage) == (51, "")
    assert file.read < 2 * 2**20  # of 50 million


@given(st.data())
def test_scan_of_a_truncated_file(data: st.DataObject) -> None:
    records = [record(p) for p in data.draw(st.lists(st.binary(max_size=30), min_size=1))]
    whole = b"".join(records)
    cut = data.draw(st.integers(0, len(whole) - 1))
    complete = [end for end in np.cumsum([0, *map(len, records)]).tolist() if end <= cut]
    between_records = cut == complete[-1]  # cannot be noticed
    expected = "" if between_records else "the file ends inside the record"
    assert Counted(whole[:cut]).scan() == (complete, expected)


@given(st.integers(0, 9), st.integers(0, 95))
def test_scan_finds_every_flipped_bit_of_a_length_field(number: int, bit: int) -> None:
    data = bytearray(b"".join(record(bytes([i]) * 20) for i in range(10)))
    data[number * 36 + bit // 8] ^= 1 << bit % 8
    offsets, damage = Counted(bytes(data)).scan()
    assert offsets == [36 * i for i in range(number + 1)]
    assert "length field is damaged" in damage


def test_short_reads_are_not_the_end_of_a_file(
    tmp_path: Path, write_records: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_records(tmp_path / "a", [b"abcd", b"ef"])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, at: pread(file, min(count, 3), at))
    assert indexes_of([path])[0].offsets().tolist() == [0, 20, 38]


def test_the_index_is_kept_beside_the_data(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"ab", b"c", b""])
    (index,) = indexes_of([path])
    assert index.offsets().tolist() == [0, 18, 35, 51]
    kept = tmp_path / ".a.tfdindex"
    assert sorted(os.listdir(tmp_path)) == [".a.tfdindex", "a"]
    # A kept index is used: this one has one record less.
    stored = np.load(kept)
    with kept.open("wb") as file:
        np.save(file, np.delete(stored, 4))
    assert indexes_of([path])[0].records == 2
    good = kept.read_bytes()
    for content in (b"", b"junk", good[:-1], good.replace(b"<i8", b"<f8")):
        kept.write_bytes(content)
        assert indexes_of([path])[0].records == 3
        np.testing.assert_array_equal(np.load(kept), stored)
    kept.unlink()
    with pytest.raises(DataError, match=r"\.a\.tfdindex was removed or changed while"):
        index.offsets()


def test_data_that_changed_gets_a_new_index(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"abcd", b"ef"])
    assert indexes_of([path])[0].offsets().tolist() == [0, 20, 38]
    write_records(path, [b"ab", b"cdef"])  # as many bytes
    os.utime(path, ns=(0, 5_000_000_000))
    assert indexes_of([path])[0].offsets().tolist() == [0, 18, 38]


def test_a_file_system_without_times_keeps_no_index(tmp_path: Path, write_records: Write) -> None:
    tf.io.gfile.makedirs(f"ram://{tmp_path}")
    path = write_records(f"ram://{tmp_path}/a", [b"abcd", b"ef"])
    assert indexes_of([path])[0].offsets().tolist() == [0, 20, 38]
    assert tf.io.gfile.listdir(f"ram://{tmp_path}") == ["a"]


def test_one_warning_names_indexes_that_cannot_be_written(
    tmp_path: Path, write_records: Write
) -> None:
    paths = [write_records(tmp_path / name, [b"abcd"]) for name in "abc"]
    for name in "ab":
        (tmp_path / f".{name}.tfdindex").mkdir()  # as a read-only folder
    with pytest.warns(UserWarning, match="indexes of 2 files cannot be written, such as") as said:
        assert [index.records for index in indexes_of(paths)] == [1, 1, 1]
    assert len(said) == 1
    assert f"{tmp_path}/.a.tfdindex" in str(said[0].message)


def test_damage_is_named_or_skipped(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"abcd", b"ef", b"g"])
    os.truncate(path, os.path.getsize(path) - 2)
    with pytest.raises(DataError, match=r"/a: record 2 at byte 38 of 53: the file ends inside"):
        indexes_of([path])
    with pytest.warns(
        UserWarning, match=r"/a: record 2 at byte 38 .* The rest of the file is skipped"
    ):
        (index,) = indexes_of([path], skip_damaged=True)
    assert index.records == 2
    assert not (tmp_path / ".a.tfdindex").exists()  # the file may be made whole


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(b"x" * 99))
    with pytest.raises(DataError, match="Is it an uncompressed TFRecord"):
        indexes_of([str(tmp_path / "a")])


def test_a_file_of_0_bytes_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.warns(UserWarning, match=r"/a is empty: it has no records"):
        assert indexes_of([str(tmp_path / "a")])[0].records == 0
