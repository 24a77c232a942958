"""Fingerprints notice other data, and only other data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfdist_ext.data import DataError
from tfdist_ext.data.fingerprint import (
    Fingerprint,
    difference,
    fingerprint_of_arrays,
    fingerprint_of_files,
)

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.arange(4)
OF_ARRAYS = fingerprint_of_arrays({"x": X, "y": Y})


def test_a_fingerprint_is_small() -> None:
    files = [f"data/{i}.tfrecord" for i in range(10_000)]
    found = fingerprint_of_files(files, [(10**9, i) for i in range(10_000)], [10**5] * 10_000)
    assert len(json.dumps(found)) < 400


def test_data_that_did_not_change() -> None:
    for x in (X.copy(), np.asfortranarray(X)):
        assert fingerprint_of_arrays({"x": x, "y": Y.copy()}) == OF_ARRAYS


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({"x": X[:3], "y": Y}, r"x: shape \[4, 3\] -> \[3, 3\]", id="fewer"),
        pytest.param({"x": X.astype("f8"), "y": Y}, "x: dtype <f4 -> <f8", id="dtype"),
        pytest.param({"x": X, "y": Y[::-1]}, r"^y: content \w+ -> \w+$", id="values"),
        pytest.param({"x": X, "y": Y, "w": Y}, r"w: shape none -> \[4\]", id="one more"),
    ],
)
def test_arrays_that_changed(arrays: dict[str, np.ndarray], message: str) -> None:
    assert re.search(message, difference(OF_ARRAYS, fingerprint_of_arrays(arrays)))


def of_files(**change: Any) -> Fingerprint:
    known = {
        "files": ["/data/a", "/data/b"],
        "stamps": [(100, 5), (200, 6)],
        "records": [3, 4],
    }
    return fingerprint_of_files(**{**known, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"records": [4, 4]}, r"^records 7 -> 8, sizes \w+ -> ", id="records"),
        pytest.param({"stamps": [(101, 5), (200, 6)]}, "bytes 300 -> 301, sizes", id="bytes"),
        pytest.param({"files": ["/data/a", "/data/c"]}, r"^names \w+ -> \w+$", id="names"),
        pytest.param({"stamps": [(100, 5), (200, 7)]}, r"^time stamps \w+ -> ", id="written"),
        pytest.param({"files": ["/mnt/a", "/mnt/b"]}, "^$", id="mounted elsewhere"),
    ],
)
def test_files_that_changed(change: dict[str, Any], message: str) -> None:
    assert re.search(message, difference(of_files(), of_files(**change)))


def test_a_sample_of_large_arrays(tmp_path: Path) -> None:
    """The sample of a memory-mapped array is that of one in memory."""
    array = np.random.default_rng(0).integers(0, 255, (3000, 1001), dtype=np.uint8)
    np.save(tmp_path / "a.npy", array)
    known = fingerprint_of_arrays({"a": array})
    assert fingerprint_of_arrays({"a": np.load(tmp_path / "a.npy", mmap_mode="r")}) == known
    assert fingerprint_of_arrays({"a": np.asfortranarray(array)}) == known
    for rows in (slice(0, 1), slice(-1, None), slice(1000, 1004)):
        changed = array.copy()
        changed[rows] += 1
        assert fingerprint_of_arrays({"a": changed}) != known


def test_little_is_read_of_a_huge_array(tmp_path: Path) -> None:
    """8 GB, of which the disk has nothing: reading it all would take seconds and memory."""
    huge = np.memmap(tmp_path / "huge", np.float64, "w+", shape=(1000, 1_000_000))
    before = fingerprint_of_arrays({"huge": huge})
    assert before["huge: shape"] == [1000, 1_000_000]
    huge[-1, -1] = 1.0
    assert fingerprint_of_arrays({"huge": huge}) != before
    maps = Path("/proc/self/smaps")
    if maps.exists():
        lines = maps.read_text().split("/huge\n")[1].splitlines()
        resident = next(int(line.split()[1]) for line in lines if line.startswith("Rss"))
        assert resident < 64 * 1024  # KiB


def test_objects_have_no_fingerprint() -> None:
    with pytest.raises(
        DataError,
        match=r"x must have a dtype of fixed .*got Python objects \(dtype object\)\. Convert",
    ):
        fingerprint_of_arrays({"x": np.array(["a", None])})
