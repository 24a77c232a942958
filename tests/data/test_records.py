"""Records read by number: only their bytes are read, and errors name the damaged record."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.data import DataError, Shard, from_tfrecords
from tfdist_ext.data.records import RecordFiles
from tfdist_ext.data.sources import difference

pytestmark = pytest.mark.filterwarnings("ignore:.* is empty. it has no records")

Write = Callable[..., str]


def payload(number: int) -> bytes:
    return f"{number:04d}".encode() * (1 + number % 7)


PAYLOADS = [payload(n) for n in range(100)]


@pytest.fixture
def files(tmp_path: Path, write_records: Write) -> list[str]:
    """100 records in four files; one of them has none."""
    parts = [PAYLOADS[:30], [], PAYLOADS[30:80], PAYLOADS[80:]]
    return [write_records(tmp_path / f"{i}.tfrecord", part) for i, part in enumerate(parts)]


def records_of(files: Any, **options: Any) -> RecordFiles:
    return RecordFiles(files, tf.strings.length, **options)


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def test_read_reads_only_the_bytes_of_the_records_asked_for(
    files: list[str], tmp_path: Path
) -> None:
    for path in files:
        tf.io.gfile.copy(path, f"ram://{path}", overwrite=True)
    order = np.random.default_rng(0).permutation(100)
    for records in (records_of(files), records_of([f"ram://{path}" for path in files])):
        assert len(records) == 100
        for wanted in (np.arange(100), order, np.repeat(order, 2), order[:1], order[:0]):
            before = records.bytes_read
            assert records.read(wanted).tolist() == [PAYLOADS[n] for n in wanted]
            read = records.bytes_read - before
            assert read == sum(len(PAYLOADS[n]) + 16 for n in wanted)


def test_a_fingerprint_changes_with_the_files(tmp_path: Path, write_records: Write) -> None:
    def fingerprint(name: str, folder: str, payloads: list[bytes], time: int = 1) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        path = write_records(tmp_path / folder / name, payloads)
        os.utime(path, ns=(0, time * 10**9))
        return records_of([path]).fingerprint()

    known = fingerprint("a", "one", [b"abc", b"d"])
    # A copy on another machine is the same data, whatever its time stamp.
    assert fingerprint("a", "elsewhere", [b"abc", b"d"], time=2) == known
    for other, message in (
        (fingerprint("a", "two", [b"abc"]), r"^bytes 36 -> 19, records 2 -> 1, sizes \w+ -> \w+"),
        (fingerprint("b", "two", [b"abc", b"d"]), r"^names \w+ -> \w+$"),
        (fingerprint("a", "three", [b"abc", b"e"]), r"^last records \w+ -> \w+$"),
    ):
        assert re.search(message, difference(known, other))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='on_error must be "raise" or "skip"'):
        records_of(["a"], on_error="ignore")
    (tmp_path / "a").touch()
    with pytest.raises(DataError, match="there are no records in the files"):
        records_of([str(tmp_path / "a")])
    for path in (f"{tmp_path}/missing", f"ram://missing{tmp_path}"):
        with pytest.raises(DataError, match="cannot be read: "):
            records_of([path])


def numbers(records: tf.Tensor) -> dict[str, tf.Tensor]:
    """`parse` of many records, or of one."""
    texts = tf.strings.substr(records, 0, 4)
    if tf.size(records) > 10**6:  # autograph
        texts = records
    return {"number": tf.strings.to_number(texts, tf.int64), "text": records}


def test_a_batch_of_records_is_parsed_at_once(files: list[str]) -> None:
    one = from_tfrecords(files, numbers, global_batch_size=33, seed=3)
    many = from_tfrecords(files, numbers, global_batch_size=33, seed=3, batched=True)
    assert many.element_spec == one.element_spec
    sizes = []
    for i in range(4):  # the last batch has 1 row: three parts have none
        for a, b in zip(one.dataset(Shard(i, 4)), many.dataset(Shard(i, 4)), strict=True):
            np.testing.assert_array_equal(b["number"], a["number"])
            np.testing.assert_array_equal(b["text"], [PAYLOADS[n] for n in b["number"]])
            sizes.append(len(b["number"]))
    assert (sum(sizes), min(sizes)) == (100, 0)
    many.restore(one.state())  # the same data in the same order


@pytest.mark.parametrize(
    ("parse", "batched", "message"),
    [
        (lambda records: tf.size(records), True, r"one row per record, of shape \[None, \.\.\.\]"),
        (lambda record: tf.strings.split([record]).to_sparse(), False, "must return dense tensors"),
    ],
)
def test_parse_must_give_a_row_of_each_record(
    files: list[str], parse: Any, batched: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        from_tfrecords(files, parse, global_batch_size=4, batched=batched)


def test_parse_that_fails_is_named(files: list[str]) -> None:
    def wrong(record: tf.Tensor) -> tf.Tensor:
        raise ValueError("no such feature")

    with pytest.raises(DataError, match=r"(?s)parse fails .*no such feature"):
        from_tfrecords(files, wrong, global_batch_size=4)
    with pytest.raises(DataError, match=r"parse must be a function of a .*got 'parse'"):
        from_tfrecords(files, "parse", global_batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "batched"), [(14, False), (19, True)], ids=["payload", "checksum"]
)
def test_a_damaged_record_is_named_or_skipped(files: list[str], batched: bool, place: int) -> None:
    flip(files[0], place)  # of record 0
    options: Any = {"global_batch_size": 30, "batched": batched}
    broken = from_tfrecords(files, numbers, **options)
    where = r"0\.tfrecord: record 0 at byte 0 is damaged"
    with pytest.raises(DataError, match=rf"^/.*{where}: .*use on_error=\"skip\""):
        list(broken)
    with pytest.raises(tf.errors.InvalidArgumentError, match=where):
        list(broken.dataset())
    data = from_tfrecords(files, numbers, **options, on_error="skip")
    with pytest.warns(UserWarning, match=rf"{where}.*skipped so far: 1"):
        rows = [batch["number"].numpy().tolist() for batch in data.dataset()]
    assert rows == [[*range(1, 30)], [*range(30, 60)], [*range(60, 90)], [*range(90, 100)]]
    assert len(list(data.dataset())) == 4  # without another warning


def test_a_batch_of_skipped_records_alone_is_empty(files: list[str]) -> None:
    flip(files[0], 14)
    data = from_tfrecords(files, numbers, global_batch_size=1, on_error="skip", batched=True)
    with pytest.warns(UserWarning, match="skipped so far: 1"):
        assert next(iter(data.dataset()))["number"].shape == (0,)
