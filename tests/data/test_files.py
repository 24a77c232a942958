"""Files of shards: each file once, balanced by bytes; errors name the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.data import DataError, Shard, shard_files
from tfdist_ext.data.files import assign, files_of

Write = Callable[..., str]


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 20))
def test_shares_are_disjoint_complete_and_even(sizes: list[int], count: int) -> None:
    shares = assign(sizes, count)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in share) for share in shares]
    # What comes last onto the fullest share found it the emptiest of all.
    assert max(sums) <= sum(sizes) / count + max(sizes, default=0)
    assert max(sums) - min(sums) <= max(sizes, default=0)


@pytest.fixture(params=["local", "ram"])
def folder(request: Any, tmp_path: Path) -> str:
    """On this machine, or on another file system."""
    return str(tmp_path) if request.param == "local" else f"ram://{tmp_path}"


@pytest.fixture
def ten_files(folder: str, write_records: Write) -> list[str]:
    return [write_records(f"{folder}/{i}.tfrecord", [b"x" * 100] * (i + 1)) for i in range(10)]


def size(path: str) -> int:
    return int(tf.io.gfile.stat(path).length)


@pytest.mark.parametrize("count", [3, 10])
def test_every_file_once_and_balanced_by_bytes(
    folder: str, ten_files: list[str], count: int
) -> None:
    shards = [shard_files(f"{folder}/*.tfrecord", Shard(i, count)) for i in range(count)]
    assert sorted(path for shard in shards for path in shard) == ten_files
    assert all(shard == sorted(shard) for shard in shards)
    sums = [sum(map(size, shard)) for shard in shards]
    assert max(sums) - min(sums) <= max(map(size, ten_files))
    if count == 3:  # the numbers from 1 to 10 come out almost even; files by turns do not
        assert max(sums) * count / sum(sums) < 1.04


def test_indexes_beside_the_data_are_no_data(tmp_path: Path, write_records: Write) -> None:
    paths = [write_records(tmp_path / f"{i}.tfrecord", [b"x"]) for i in range(2)]
    assert shard_files(f"{tmp_path}/*", Shard(0, 1)) == paths
    # TensorFlow's own patterns match hidden files.
    assert f"{tmp_path}/.1.tfrecord.tfdindex" in tf.io.gfile.glob(f"{tmp_path}/*")
    assert shard_files(f"{tmp_path}/*", Shard(0, 1)) == paths


def test_patterns(tmp_path: Path, write_records: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a-1", "a-2", "b-1", "odd[1]"]
    paths = [write_records(tmp_path / name, [b"x"]) for name in names]
    assert files_of([tmp_path / "a-*", f"{tmp_path}/*-1"]) == paths[:3]  # a-1 is there once
    assert files_of(f"{tmp_path}/odd[1]") == [paths[3]]
    assert files_of(tmp_path / "[ab]-1") == [paths[0], paths[2]]
    monkeypatch.chdir(tmp_path)
    assert len(files_of(["a-1", "./a-1", paths[0], "a-1*"])) == 1  # one file, four spellings


def test_other_files_than_records(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.csv").write_text("a,b\n" * i)
    shards = [shard_files(f"{tmp_path}/*.csv", Shard(i, 2)) for i in range(2)]
    assert shards == [[f"{tmp_path}/2.csv"], [f"{tmp_path}/0.csv", f"{tmp_path}/1.csv"]]
    assert sorted(os.listdir(tmp_path)) == ["0.csv", "1.csv", "2.csv"]  # no index is built


def test_fewer_files_than_shards(ten_files: list[str]) -> None:
    with pytest.raises(
        DataError, match=r"10 files are not enough for 11 shards\. .*from_tfrecords"
    ):
        shard_files(ten_files, Shard(0, 11))


def test_a_truncated_file_is_an_error_of_its_shard(folder: str, write_records: Write) -> None:
    for i in range(3):
        write_records(f"{folder}/{i}", [b"x" * 50] * 4)
    with tf.io.gfile.GFile(f"{folder}/1", "rb") as file:
        content = file.read()
    tf.io.gfile.remove(f"{folder}/1")  # in memory, what is written is added to what is there
    with tf.io.gfile.GFile(f"{folder}/1", "wb") as file:
        file.write(content[:-1])
    files = [f"{folder}/[012]", Shard(0, 1)]
    with pytest.raises(DataError, match="/1: record 3 at byte 198 of 263: the file ends inside"):
        shard_files(*files)
    assert len(shard_files(*files, check=False)) == 3


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        pytest.param("{}/*.nothing", r"no file matches '.*/\*\.nothing'\. Check", id="empty"),
        pytest.param("nothing-*", r"no file matches 'nothing-\*' \(from /", id="relative"),
        pytest.param("{}/*", "sub must be a file, got a folder", id="a folder among files"),
        pytest.param("{}/gone*", "gone cannot be read: .*No such file", id="a link to nothing"),
        pytest.param("nosuch://a/*", "'nosuch://.*' cannot be searched: .*scheme", id="scheme"),
        pytest.param(["{}/a", 3], r"or a list of them, got \[.*3\]", id="a number"),
    ],
)
def test_files_that_are_not_there(tmp_path: Path, pattern: Any, message: str) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "sub").mkdir()
    if "gone" in str(pattern):
        (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    if isinstance(pattern, str):
        pattern = pattern.format(tmp_path)
    elif isinstance(pattern, list):
        pattern = [p.format(tmp_path) if isinstance(p, str) else p for p in pattern]
    with pytest.raises(DataError, match=message):
        shard_files(pattern, Shard(0, 1))
