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
        assert found.place_of(key) == (f"layer {setters[0]}" if setters else None)


def test_a_line_says_what_won_over_what() -> None:
    settings = Settings()
    settings.add("flags", {"n": 2, "o": object()})
    settings.add("the file f", {"n": 3})
    settings.add("the environment", {"n": 4})
    line = "n = 2 from flags, over the file f (3) and the environment (4)"
    assert list(settings.lines()) == [line, "o = object from flags"]
    assert list(settings.lines(without=["flags"])) == []


def test_the_table_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('[strategy]\nname = "mirrored"\ndevices = ["CPU:0"]\n[other]\nx = 1\n')
    assert read_file(file) == {"name": "mirrored", "devices": ["CPU:0"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[strategy", "cannot be read as TOML"),
        (b"", "must have a [strategy] table, got nothing"),
        (b"[stratgey]\nname = 'mirrored'", "[strategy] table, got stratgey"),
        (b"[strategy]\ncluster = 'x'", "strategy.cluster must be left out of "),
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
    [("", "cannot be read"), ("no/such.toml", "cannot be read"), (3, "must be the path of a TOML")],
)
def test_a_path_that_cannot_be_right(path: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        read_file(path)
