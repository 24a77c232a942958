"""Arguments over flags over the file over the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext import StrategyError
from tfdist_ext.strategies.settings import Settings, read_file

layer = st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers())


@settings(max_examples=25, deadline=None)
@given(st.lists(layer, max_size=4))
def test_the_first_place_with_a_value_wins(layers: list[dict[str, Any]]) -> None:
    found = Settings()
    for number, values in enumerate(layers):
        found.add(f"layer {number}", values)
    for key in "abcd":
        setters = [n for n, values in enumerate(layers) if values.get(key) is not None]
        assert found.values.get(key) == (layers[setters[0]][key] if setters else None)
        assert found.places.get(key) == (f"layer {setters[0]}" if setters else None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[strategy", "cannot be read as TOML"),
        (b"", "must have a [strategy] table, got nothing"),
        (b"[stratgey]\nname = 'mirrored'", "[strategy] table, got stratgey"),
    ],
)
def test_a_file_that_cannot_be_right(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "f.toml"
    file.write_bytes(text)
    with pytest.raises(StrategyError) as error:
        read_file(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "cannot be read"), ("no/such.toml", "cannot be read"), (3, "cannot be read")],
)
def test_a_path_that_cannot_be_right(path: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        read_file(path)
