"""Bytes of variables and their pieces, and sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.placement import PlacementError, VariableSpec
from tfdist_ext.placement.specs import parse_size, size_text

QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def test_bytes_of_a_variable() -> None:
    spec = VariableSpec("table", (10, 3), "bfloat16", slots=2)
    assert (spec.bytes, spec.weight_bytes, spec.row_bytes) == (3 * 60, 60, 18)
    # Ten rows in four pieces are 3, 3, 2, 2: as TensorFlow's embedding_lookup computes.
    assert spec.piece_bytes(4) == [3 * 18, 3 * 18, 2 * 18, 2 * 18]
    assert VariableSpec("step", (), "int64").bytes == 8
    assert VariableSpec("words", (4,), "string").bytes == 64
    assert VariableSpec("small", (4,), "float8_e4m3fn").bytes == 4
    assert VariableSpec("none", (0, 5)).bytes == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"path": ""}, "path must be a non-empty string"),
        ({"shape": (None, 3)}, "'v' must be an integer of at least 0"),
        ({"shape": (-1,)}, "every dimension of 'v'"),
        ({"dtype": "float31"}, "must be a TensorFlow dtype name such as float32, got 'float31'"),
        ({"slots": -1}, "slots of 'v'"),
        ({"load": float("nan")}, "load of 'v'"),
    ],
)
def test_wrong_variables_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(PlacementError, match=named):
        VariableSpec(**({"path": "v", "shape": (2, 3)} | arguments))


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0),
        ("4096", 4096),
        ("1 B", 1),
        (" 8 gib ", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5TiB", 3 * 2**39),
        ("0.3KiB", 307),  # a part of a byte is dropped
    ],
)
def test_sizes_are_read(written: int | str, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written",
    ["", "8G", "-1GB", "1.5", "٣GB", "9" * 30, -1, True, 2.5],
)
def test_other_texts_than_sizes_are_refused(written: Any) -> None:
    with pytest.raises(PlacementError, match="budget must be a size") as error:
        parse_size(written)
    assert len(str(error.value)) < 300


@QUICK
@given(st.integers(0, 2**60))
def test_a_size_for_people_reads_back_to_half_a_percent(size: int) -> None:
    assert abs(parse_size(size_text(size)) - size) <= 0.005 * size
    assert parse_size(f"{size} B") == size
    assert size_text(5 * 2**29) == "2.50 GiB"
