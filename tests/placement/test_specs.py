"""Bytes of variables and their pieces."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist_ext.placement import PlacementError, VariableSpec


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
        ({"path": ""}, "path must be a text that is not empty"),
        ({"shape": (None, 3)}, "'v' must be an integer of at least 0"),
        ({"shape": (-1,)}, "every dimension of 'v'"),
        ({"dtype": "float31"}, "must be a name of TensorFlow's, as float32, got 'float31'"),
        ({"slots": -1}, "slots of 'v'"),
        ({"load": float("nan")}, "load of 'v'"),
    ],
)
def test_what_is_no_variable(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(PlacementError, match=named):
        VariableSpec(**({"path": "v", "shape": (2, 3)} | arguments))
