"""Files that patterns match; errors name the file or the pattern."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfdist_ext.data import DataError, Shard, shard_files
from tfdist_ext.data.files import files_of

Write = Callable[..., str]


def test_indexes_beside_the_data_match_no_pattern(tmp_path: Path, write_records: Write) -> None:
    paths = [write_records(tmp_path / f"{i}.tfrecord", [b"x"]) for i in range(2)]
    assert shard_files(f"{tmp_path}/*", Shard(0, 1)) == paths
    # TensorFlow's own patterns match hidden files.
    assert f"{tmp_path}/.1.tfrecord.tfdindex" in tf.io.gfile.glob(f"{tmp_path}/*")
    assert shard_files(f"{tmp_path}/*", Shard(0, 1)) == paths


def test_patterns_give_each_file_once_in_order(
    tmp_path: Path, write_records: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a-1", "a-2", "b-1", "odd[1]"]
    paths = [write_records(tmp_path / name, [b"x"]) for name in names]
    assert files_of([tmp_path / "a-*", f"{tmp_path}/*-1"]) == paths[:3]  # a-1 is there once
    assert files_of(f"{tmp_path}/odd[1]") == [paths[3]]
    assert files_of(tmp_path / "[ab]-1") == [paths[0], paths[2]]
    monkeypatch.chdir(tmp_path)
    assert len(files_of(["a-1", "./a-1", paths[0], "a-1*"])) == 1  # one file, four spellings


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        pytest.param("{}/*.nothing", r"no file matches '.*/\*\.nothing'\. Check", id="empty"),
        pytest.param("nothing-*", r"no file matches 'nothing-\*' \(from /", id="relative"),
        pytest.param("{}/*", "sub is a folder", id="a folder among files"),
        pytest.param("{}/gone*", "gone cannot be read: .*No such file", id="a link to nothing"),
        pytest.param("nosuch://a/*", "'nosuch://.*' cannot be searched: .*scheme", id="scheme"),
        pytest.param(["{}/a", 3], r"or a list of them, got \[.*3\]", id="a number"),
    ],
)
def test_missing_and_unreadable_files_are_named(tmp_path: Path, pattern: Any, message: str) -> None:
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
