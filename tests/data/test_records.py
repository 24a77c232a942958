"""Any records by number: the right ones, only their bytes, and every damage by its place."""

from __future__ import annotations

import gzip
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.data import DataError, Records, record_index
from tfdist_ext.data import records as records_module
from tfdist_ext.data.record_format import OVERHEAD
from tfdist_ext.data.record_index import index_of

pytestmark = [
    pytest.mark.usefixtures("four_cpus"),
    pytest.mark.filterwarnings("ignore:.* is empty. it has 0 bytes"),
]

Write = Callable[..., str]


def payload(number: int) -> bytes:
    return f"{number:04d}".encode() * (1 + number % 7)


@pytest.fixture(params=["local", "ram"])
def folder(request: Any, folder_of: Callable[[str], str]) -> str:
    return folder_of(request.param)


@pytest.fixture
def files(folder: str, write_records: Write) -> list[str]:
    """100 records in four files; one of them has none."""
    sizes = [30, 0, 50, 20]
    first = np.cumsum([0, *sizes]).tolist()
    return [
        write_records(f"{folder}/{i}.tfrecord", [payload(n) for n in range(a, a + size)])
        for i, (a, size) in enumerate(zip(first, sizes, strict=False))
    ]


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def record_start(path: str, record: int) -> int:
    return int(index_of(path).offsets()[record])


def test_read_any_records(files: list[str]) -> None:
    records = Records(files)
    assert len(records) == 100
    assert records.read(np.arange(100)) == [payload(n) for n in range(100)]
    wanted = [99, 0, 30, 29, 31, 30, 79, 80, 5, 6, 7]
    assert records.read(wanted) == [payload(n) for n in wanted]
    order = np.random.default_rng(0).permutation(100)
    assert records.read(order) == [payload(n) for n in order]
    assert records.read([]) == []


def test_the_index_is_built_once_and_kept_beside_the_data(files: list[str]) -> None:
    Records(files)
    beside = record_index.places_of(files[2])[0]
    assert beside.rpartition("/")[2] == ".2.tfrecord.tfdindex"
    assert tf.io.gfile.exists(beside)
    with tf.io.gfile.GFile(beside, "rb") as file:
        before = file.read()
    # An index that is used is not made: this one says that two records are one.
    index = index_of(files[2])
    merged = np.delete(np.array(index.offsets()), 1)
    assert record_index.store(beside, index.stamp, merged)
    assert index_of(files[2]).records == 49
    assert record_index.store(beside, index.stamp, np.zeros(51, np.int64))
    assert index_of(files[2]).records == 50
    with tf.io.gfile.GFile(beside, "rb") as file:
        assert file.read() == before  # built and written again


def test_nothing_unfinished_is_left(files: list[str], folder: str) -> None:
    Records(files)
    names = tf.io.gfile.listdir(folder)
    assert len([name for name in names if "tfdindex" in name]) == 4
    assert not [name for name in names if "unfinished" in name]


def test_bytes_read_are_those_of_the_records(files: list[str]) -> None:
    records = Records(files)
    wanted = [3, 4, 5, 40, 99]
    records.read(wanted)
    assert records.bytes_read == sum(len(payload(n)) + OVERHEAD for n in wanted)


def test_each_of_four_workers_reads_a_fourth(files: list[str]) -> None:
    from tfdist_ext.data import Order, Shard

    order, total = Order(100, 20, seed=1), sum(len(payload(n)) + OVERHEAD for n in range(100))
    found, read = [], []
    for i in range(4):
        records = Records(files)
        for step in range(order.steps):
            found += records.read(order.indices(step, Shard(i, 4)).numpy())
        read.append(records.bytes_read)
    assert sorted(found) == sorted(payload(n) for n in range(100))
    assert sum(read) == total
    assert max(read) / total == pytest.approx(1 / 4, rel=0.15)


def test_what_is_read_together_does_not_matter(monkeypatch: Any, files: list[str]) -> None:
    for together in (1, 50, 300):
        monkeypatch.setattr(records_module, "_TOGETHER", together)
        assert Records(files).read(np.arange(100)) == [payload(n) for n in range(100)]


@pytest.mark.parametrize("folder", ["local"], indirect=True)
def test_large_records_among_small_ones(
    monkeypatch: Any, files: list[str], write_records: Write
) -> None:
    """Large ones that are alone are read in parts; of all, only their bytes are read."""
    monkeypatch.setattr(records_module, "_LARGE", 5 * 4 + OVERHEAD)
    records = Records(files)
    order = np.random.default_rng(0).permutation(100)
    for wanted in (order, np.arange(100), np.repeat(order, 2), [4], [5, 2, 4, 11]):
        before = records.bytes_read
        assert records.read(wanted) == [payload(n) for n in wanted]
        total = sum(len(payload(n)) + OVERHEAD for n in wanted)
        assert records.bytes_read - before == total
    for place in (3, 14, -1):  # the length, the payload, the checksum
        write_records(files[0], [payload(n) for n in range(30)])
        records = Records(files)  # the length is right while the index is made
        flip(files[0], record_start(files[0], 12 + (place < 0)) + place)
        with pytest.raises(DataError, match=r"0\.tfrecord: record 12 at byte \d+ is damaged"):
            records.read([12, 40])


def test_neighbors_are_read_together(monkeypatch: Any, files: list[str]) -> None:
    records, looks = Records(files), []

    def counted(file: Any) -> Any:
        read_at = file.read_at

        def read(offset: int, count: int) -> bytes:
            looks.append(count)
            return read_at(offset, count)

        return SimpleNamespace(path=file.path, read_at=read)

    opened = records_module.open_bytes
    monkeypatch.setattr(records_module, "open_bytes", lambda path: counted(opened(path)))
    records.read([33, 31, 32, 29, 30, 60])  # over the end of a file, and one by itself
    assert sorted(looks) == sorted(
        [
            sum(len(payload(n)) + OVERHEAD for n in numbers)
            for numbers in ([29], [30, 31, 32, 33], [60])
        ]
    )


def test_threads_and_few_open_files(files: list[str]) -> None:
    records = Records(files)
    records._most_open = 1
    wrong: list[Any] = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(50):
            wanted = random.integers(0, 100, 8)
            if records.read(wanted) != [payload(n) for n in wanted]:
                wrong.append(wanted)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(records._open) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_descriptors_are_given_back(tmp_path: Path, write_records: Write) -> None:
    paths = [write_records(tmp_path / f"{i}", [payload(i)]) for i in range(40)]
    before = len(os.listdir("/proc/self/fd"))
    records = Records(paths)
    records._most_open = 8
    assert records.read(np.arange(40)) == [payload(i) for i in range(40)]
    assert len(os.listdir("/proc/self/fd")) <= before + 16
    del records
    assert len(os.listdir("/proc/self/fd")) == before


def test_data_that_changed_gets_a_new_index(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"abcd", b"ef"])
    assert Records([path]).read([0, 1]) == [b"abcd", b"ef"]
    write_records(path, [b"ab", b"cdef"])  # as many bytes
    os.utime(path, ns=(0, 5_000_000_000))
    assert Records([path]).read([0, 1]) == [b"ab", b"cdef"]


def test_data_that_changes_while_it_is_read(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"abcd", b"ef", b"g"])
    records = Records([path])
    os.truncate(path, os.path.getsize(path) - 2)
    for wanted in ([0, 1, 2], [0, 2], [2]):
        with pytest.raises(DataError, match=r"/a: record 2 at byte 38: .* become shorter"):
            records.read(wanted)
    os.truncate(path, 21)
    with pytest.raises(DataError, match=r"/a: record 1 at byte 20: .* become shorter"):
        records.read([0, 1, 2])


def test_a_large_record_that_became_shorter(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"a", b"b" * 10**5, b"c"])
    records = Records([path])
    for size in (10**5, 17 + 5, 17):
        os.truncate(path, size)
        with pytest.raises(DataError, match=r"/a: record 1 at byte 17: .* become shorter"):
            records.read([1])
    assert records.read([0]) == [b"a"]


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, own_cache: Path, write_records: Write
) -> None:
    """A name so long that none fits beside it stands for it: root may write to any folder."""
    path = write_records(tmp_path / ("n" * 240), [b"a", b"b"])
    assert Records([path]).read([1]) == [b"b"]
    (kept,) = own_cache.iterdir()
    assert index_of(path).kept_in == str(kept)
    other = write_records(tmp_path / ("n" * 241), [b"c"])  # the same name, when it is cut
    assert Records([other]).read([0]) == [b"c"]
    assert len(list(own_cache.iterdir())) == 2


def test_no_folder_that_can_be_written(
    tmp_path: Path, monkeypatch: Any, write_records: Write
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = write_records(tmp_path / ("n" * 240), [b"a", b"b"])
    with pytest.warns(UserWarning, match=r"can be kept neither in .* set XDG_CACHE_HOME"):
        records = Records([path])
    assert records.read([1]) == [b"b"]


def test_an_index_that_is_no_index(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"a", b"b"])
    place = Path(record_index.places_of(path)[0])
    Records([path])
    good = place.read_bytes()
    bad = [
        b"",
        b"junk",
        good[:-1],
        good + b"\0" * 8,
        good.replace(b'"records": 2', b'"records": 3'),
    ]
    bad += [good.replace(b"{", b"["), good.replace(b"index 1", b"index 2")]
    for content in bad:
        place.write_bytes(content)
        assert Records([path]).read([0, 1]) == [b"a", b"b"]
        assert place.read_bytes() == good


def test_a_truncated_file(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [b"abcd", b"ef", b"g"])
    os.truncate(path, os.path.getsize(path) - 2)
    with pytest.raises(
        DataError,
        match=r"/a: record 2 at byte 38 of 53: the file ends inside of it: 15 of its 17 bytes are",
    ):
        Records([path])
    with pytest.warns(UserWarning, match=r"/a: record 2 at byte 38 .* from there on are skipped"):
        records = Records([path], on_error="skip")
    assert (len(records), records.read([0, 1])) == (2, [b"abcd", b"ef"])
    assert len(records.left_out) == 1
    assert not (tmp_path / ".a.tfdindex").exists()  # the file may be made whole


def test_a_damaged_length_field(tmp_path: Path, write_records: Write) -> None:
    path = write_records(tmp_path / "a", [payload(n) for n in range(10)])
    start = record_start(path, 6)
    flip(path, start + 1)
    with pytest.raises(DataError, match=rf"/a: record 6 at byte {start} of .*length field is dama"):
        Records([path])


@pytest.mark.parametrize("folder", ["local"], indirect=True)
def test_a_damaged_record(files: list[str]) -> None:
    start = record_start(files[2], 7)  # record 37 of all
    flip(files[2], start + 14)
    where = rf"2\.tfrecord: record 7 at byte {start} is damaged"
    with pytest.raises(DataError, match=where):
        Records(files).read([1, 37])
    records = Records(files, on_error="skip")
    assert records.read([36, 38]) == [payload(36), payload(38)]
    assert records.skipped == {}
    with pytest.warns(UserWarning, match=where + r".* skipped so far: 1"):
        assert records.read([36, 37, 38]) == [payload(36), None, payload(38)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert records.read([37]) == [None]
    assert list(records.skipped) == [37]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"a,b\n1,2\n3,4\n", r"length field is damaged.*TFRecord file\?", id="text"),
        pytest.param(gzip.compress(b"x" * 99), "record 0 .* seems to be compressed", id="gzip"),
        pytest.param(b"abc", r"ends inside of its length field: 3 of 12 .*file\?", id="short"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message):
        Records([str(tmp_path / "a")])


@pytest.mark.parametrize("place", ["{}/missing", "ram://missing{}", "nosuch://{}/a"])
def test_files_that_cannot_be_read(tmp_path: Path, place: str) -> None:
    with pytest.raises(DataError, match="cannot be read: "):
        Records([place.format(tmp_path)])


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match="must be a file, got a folder",
    ):
        Records([str(tmp_path)])


@pytest.mark.parametrize("wanted", [[-1], [0, 100], [2**40]])
def test_records_that_are_not_there(files: list[str], wanted: list[int]) -> None:
    with pytest.raises(DataError, match=r"indices must be below 100, the number of records"):
        Records(files).read(wanted)


@pytest.mark.parametrize("wanted", [[0.5], [[1, 2]], ["a"]])
def test_numbers_that_are_none(files: list[str], wanted: Any) -> None:
    with pytest.raises(DataError, match=r"integers of shape \[n\]"):
        Records(files).read(wanted)


def test_calls_that_cannot_be_right(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='on_error must be "raise" or "skip"'):
        Records(["a"], on_error="ignore")
    with pytest.raises(DataError, match=r"a list of paths, got 'a'"):
        Records("a")
    with pytest.raises(DataError, match="files must be a list of paths"):
        Records([])
