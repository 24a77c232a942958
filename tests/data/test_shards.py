"""Which rows and files belong to which shard, and which shard belongs to a task."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.data import DataError, Remainder, Shard, ShardRange, shard_files, shard_range
from tfdist_ext.data.shards import assign

Write = Callable[..., str]

KEEP, DROP, PAD = Remainder.KEEP, Remainder.DROP, Remainder.PAD


def all_ranges(n: int, count: int, remainder: Remainder) -> list[ShardRange]:
    return [shard_range(n, Shard(i, count), remainder) for i in range(count)]


@given(st.integers(0, 10**15), st.integers(1, 300))
def test_ranges_of_any_number_of_rows_are_even_and_complete(n: int, count: int) -> None:
    keep, drop, pad = (all_ranges(n, count, remainder) for remainder in (KEEP, DROP, PAD))
    for ranges, end in ((keep, n), (drop, n - n % count)):
        assert (ranges[0].start, ranges[-1].stop) == (0, end)
        assert all(a.stop == b.start for a, b in pairwise(ranges))
        assert not any(r.padding for r in ranges)
    sizes = [r.size for r in keep]
    assert max(sizes) - min(sizes) <= 1
    assert {r.size for r in drop} == {n // count}
    assert {r.size for r in pad} == {(n + count - 1) // count}
    assert [r[:2] for r in pad] == [r[:2] for r in keep]


@pytest.mark.parametrize(
    ("index", "count", "message"),
    [
        pytest.param(2, 2, r"index of a Shard of 2 .* from 0 to 1, got 2", id="beyond"),
        pytest.param(0, 0, r"count of a Shard .* at least 1, got 0", id="no shards"),
        pytest.param(True, 2, r"index of a Shard .*got True", id="a flag is no number"),
    ],
)
def test_a_shard_that_does_not_exist_is_refused(index: Any, count: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Shard(index, count)


def test_arguments_of_another_type_are_refused() -> None:
    with pytest.raises(DataError, match="the number of rows"):
        shard_range(-1, Shard(0, 1))
    with pytest.raises(DataError, match=r"Shard\(index, count\), got \(0, 2\)"):
        shard_range(4, (0, 2))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"Remainder\.DROP or Remainder\.PAD, got 'pad'"):
        shard_range(4, Shard(0, 2), "pad")  # type: ignore[arg-type]


WITH_CHIEF = {"chief": ("a:1",), "worker": ("b:1", "c:1"), "evaluator": ("e:1",)}
WITH_PS = {"chief": ("a:1",), "worker": ("b:1", "c:1"), "ps": ("d:1",)}


@pytest.mark.parametrize(
    ("jobs", "task", "shard"),
    [
        pytest.param({"worker": ("b:1", "c:1")}, Task("worker", 1), (1, 2), id="workers"),
        pytest.param(WITH_CHIEF, Task("chief", 0), (0, 3), id="the chief is first"),
        pytest.param(WITH_CHIEF, Task("worker", 0), (1, 3), id="a worker after the chief"),
        pytest.param(WITH_CHIEF, Task("worker", 1), (2, 3), id="the last worker"),
        pytest.param(WITH_CHIEF, Task("evaluator", 0), (0, 1), id="evaluates on everything"),
        pytest.param(WITH_PS, Task("worker", 1), (1, 2), id="beside parameter servers"),
        pytest.param(WITH_PS, Task("chief", 0), (0, 1), id="a coordinator hands out everything"),
    ],
)
def test_the_shard_of_a_task_of_a_cluster(
    jobs: dict[str, tuple[str, ...]], task: Task, shard: tuple
) -> None:
    assert Shard.of(ClusterConfig(jobs, task)) == Shard(*shard)


def test_a_parameter_server_reads_nothing() -> None:
    with pytest.raises(DataError, match=r"ps:0 reads no data: the readers .* worker:0, worker:1"):
        Shard.of(ClusterConfig(WITH_PS, Task("ps", 0)))


def test_the_shard_of_a_shard_and_of_a_text() -> None:
    assert Shard.of(Shard(1, 2)) == Shard(1, 2)
    with pytest.raises(DataError, match=r"ClusterConfig or a tf.*got 'worker'"):
        Shard.of("worker")


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 20))
def test_shares_are_disjoint_complete_and_even(sizes: list[int], count: int) -> None:
    shares = assign(sizes, count)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in share) for share in shares]
    # What comes last onto the fullest share found it the emptiest of all.
    assert max(sums) <= sum(sizes) / count + max(sizes, default=0)
    assert max(sums) - min(sums) <= max(sizes, default=0)


@pytest.fixture
def ten_files(tmp_path: Path, write_records: Write) -> list[str]:
    return [write_records(tmp_path / f"{i}.tfrecord", [b"x" * 100] * (i + 1)) for i in range(10)]


def size(path: str) -> int:
    return int(tf.io.gfile.stat(path).length)


@pytest.mark.parametrize("count", [3, 10])
def test_every_file_once_and_balanced_by_bytes(
    tmp_path: Path, ten_files: list[str], count: int
) -> None:
    shards = [shard_files(f"{tmp_path}/*.tfrecord", Shard(i, count)) for i in range(count)]
    assert sorted(path for shard in shards for path in shard) == ten_files
    assert all(shard == sorted(shard) for shard in shards)
    sums = [sum(map(size, shard)) for shard in shards]
    assert max(sums) - min(sums) <= max(map(size, ten_files))
    if count == 3:  # the numbers from 1 to 10 come out almost even; files by turns do not
        assert max(sums) * count / sum(sums) < 1.04


def test_fewer_files_than_shards_are_refused(ten_files: list[str]) -> None:
    with pytest.raises(
        DataError, match=r"10 files are not enough for 11 shards\. .*from_tfrecords"
    ):
        shard_files(ten_files, Shard(0, 11))


def test_a_truncated_file_is_an_error_of_its_shard(tmp_path: Path, write_records: Write) -> None:
    for i in range(3):
        write_records(tmp_path / f"{i}", [b"x" * 50] * 4)
    os.truncate(tmp_path / "1", 263)
    files = [f"{tmp_path}/[012]", Shard(0, 1)]
    with pytest.raises(DataError, match="/1: record 3 at byte 198 of 263: the file ends inside"):
        shard_files(*files)
    assert len(shard_files(*files, check=False)) == 3
