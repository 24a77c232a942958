"""A position survives JSON, and does not survive other data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.data import DataError, Position
from tfdist_ext.data.file_bytes import Stamp
from tfdist_ext.data.position import Fingerprint, fingerprint_of_arrays, fingerprint_of_files

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.arange(4)
OF_ARRAYS = fingerprint_of_arrays({"x": X, "y": Y})


@given(st.none() | st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 2**62))
def test_through_json(seed: int | None, epoch: int, examples: int) -> None:
    position = Position(seed, epoch, examples, OF_ARRAYS)
    state = json.loads(json.dumps(position.to_state()))
    assert Position.from_state(state) == position
    assert set(state) == {"seed", "epoch", "examples", "fingerprint"}


def test_the_state_is_small() -> None:
    files = [f"data/{i}.tfrecord" for i in range(10_000)]
    stamps = [Stamp(10**9, i) for i in range(10_000)]
    found = fingerprint_of_files(files, stamps, [10**5] * 10_000, ["1"] * 10_000)
    assert len(json.dumps(Position(1, 2, 3, found).to_state())) < 500


def test_numbers_of_numpy_become_plain() -> None:
    position = Position(np.int64(1), np.int32(2), np.int64(3), {})
    assert json.dumps(position.to_state()) == (
        '{"seed": 1, "epoch": 2, "examples": 3, "fingerprint": {}}'
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"seed": -1}, r"position's seed .* from 0 .*got -1", id="seed"),
        pytest.param({"seed": float("nan")}, r"position's seed .*got nan", id="NaN"),
        pytest.param({"epoch": 1.0}, r"position's epoch .*got 1\.0", id="epoch"),
        pytest.param({"examples": "3"}, r"position's examples .*got '3'", id="examples"),
        pytest.param({"examples": None}, r"position's examples .*got None", id="none"),
        pytest.param({"fingerprint": "abc"}, r"fingerprint must be an object.*'abc'", id="print"),
        pytest.param(
            {"step": 3},
            r"data must have the fields seed, epoch, .*got unknown: 'step'\. It was written",
            id="?",
        ),
    ],
)
def test_states_that_are_wrong(change: dict[str, Any], message: str) -> None:
    state = {**Position(1, 2, 3, OF_ARRAYS).to_state(), **change}
    with pytest.raises(DataError, match=message):
        Position.from_state(state)


def test_states_that_are_none() -> None:
    with pytest.raises(DataError, match=r"a JSON object, got \[1\]; give what state\(\)"):
        Position.from_state([1])
    with pytest.raises(
        DataError,
        match=r"data must have the fields seed, epoch, .*got no epoch, examples; unknown: 'steps'",
    ):
        Position.from_state({"seed": 1, "fingerprint": {}, "steps": 1})


@pytest.mark.parametrize(
    ("behind", "more", "place"),
    [
        pytest.param(0, 4, (0, 4), id="on"),
        pytest.param(6, 3, (0, 9), id="almost"),
        pytest.param(6, 4, (1, 0), id="the end is the start of the next"),
        pytest.param(6, 25, (3, 1), id="over several epochs"),
        pytest.param(6, 0, (0, 6), id="nothing"),
    ],
)
def test_going_on(behind: int, more: int, place: tuple[int, int]) -> None:
    position = Position(1, 0, behind, {}).after(more, 10)
    assert (position.epoch, position.examples) == place
    assert position.seed == 1


def test_data_that_did_not_change() -> None:
    position = Position.from_state(json.loads(json.dumps(Position(1, 0, 0, OF_ARRAYS).to_state())))
    position.check_data(fingerprint_of_arrays({"x": X.copy(), "y": Y.copy()}))
    position.check_data(fingerprint_of_arrays({"x": np.asfortranarray(X), "y": Y}))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({"x": X[:3], "y": Y}, r"x: shape \(4, 3\) -> \(3, 3\)", id="fewer"),
        pytest.param({"x": X.astype("f8"), "y": Y}, "x: dtype <f4 -> <f8", id="dtype"),
        pytest.param({"x": X, "y": Y[::-1]}, r"data: y: content \w+ -> \w+\.", id="values"),
        pytest.param({"x": X}, r"y: shape \(4,\) -> none", id="one is gone"),
        pytest.param({"x": X, "y": Y, "w": Y}, r"w: shape none -> \(4,\)", id="one more"),
    ],
)
def test_arrays_that_changed(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(DataError, match=f"must be the same as when .*{message}"):
        Position(1, 0, 0, OF_ARRAYS).check_data(fingerprint_of_arrays(arrays))


def of_files(**change: Any) -> Fingerprint:
    known = {
        "files": ["/data/a", "/data/b"],
        "stamps": [Stamp(100, 5), Stamp(200, 6)],
        "records": [3, 4],
    }
    given = {**known, **change}
    times = [str(stamp.modified_ns) for stamp in given["stamps"]]
    return fingerprint_of_files(**given, contents=times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"records": [4, 4]}, r"data: records 7 -> 8, sizes \w+ -> ", id="records"),
        pytest.param(
            {"stamps": [Stamp(101, 5), Stamp(200, 6)]}, "bytes 300 -> 301, sizes", id="bytes"
        ),
        pytest.param({"files": ["/data/a", "/data/c"]}, r"data: names \w+ -> \w+\.", id="names"),
        pytest.param({"files": ["/data/b", "/data/a"]}, r"data: names \w+ -> \w+\.", id="order"),
        pytest.param(
            {"stamps": [Stamp(100, 5), Stamp(200, 7)]}, r"data: time stamps \w+ -> ", id="written"
        ),
        pytest.param(
            {"stamps": [Stamp(200, 5), Stamp(100, 6)]}, r"data: sizes \w+ -> ", id="same in sum"
        ),
    ],
)
def test_files_that_changed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Position(1, 0, 0, of_files()).check_data(of_files(**change))


def test_files_mounted_elsewhere_and_data_of_another_kind() -> None:
    position = Position(1, 0, 0, of_files())
    position.check_data(of_files(files=["/mnt/a", "/mnt/b"]))
    with pytest.raises(DataError, match="kind files -> arrays"):
        position.check_data(OF_ARRAYS)


def test_a_sample_of_large_arrays(tmp_path: Path) -> None:
    """Of a memory-mapped array as of one in memory; ends and even parts of it are looked at."""
    array = np.random.default_rng(0).integers(0, 255, (3000, 1001), dtype=np.uint8)
    np.save(tmp_path / "a.npy", array)
    known = fingerprint_of_arrays({"a": array})
    assert fingerprint_of_arrays({"a": np.load(tmp_path / "a.npy", mmap_mode="r")}) == known
    assert fingerprint_of_arrays({"a": np.asfortranarray(array)}) == known
    for place in [(0, 0), (-1, -1)]:
        changed = array.copy()
        changed[place] += 1
        assert fingerprint_of_arrays({"a": changed}) != known
    # A change of as many rows as are between two blocks is seen wherever it is.
    for row in range(0, 2980, 200):
        changed = array.copy()
        changed[row : row + 13] += 1
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


def test_a_position_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Position(1, 0, 0, {}).epoch = 1  # type: ignore[misc]
