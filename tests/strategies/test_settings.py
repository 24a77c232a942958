"""Arguments over flags over the file over the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext import StrategyError
from tfdist_ext.strategies.settings import merge, read_file

layer = st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers())


@given(st.lists(layer, max_size=4))
def test_the_first_layer_with_a_value_wins(layers: list[dict[str, Any]]) -> None:
    settings = merge([(f"layer {place}", values) for place, values in enumerate(layers)])
    for key in "abcd":
        setters = [n for n, values in enumerate(layers) if values.get(key) is not None]
        assert (key in settings.values) == bool(setters)
        if setters:
            assert settings.values[key] == layers[setters[0]][key]
            assert settings.where[key] == f"layer {setters[0]}"
            # Every layer that lost is named, and no other.
            assert settings.origins[key].count("layer ") == len(setters)


def test_a_line_says_what_won_over_what() -> None:
    settings = merge([("flags", {"n": 2}), ("the file f", {"n": 3}), ("the environment", {"n": 4})])
    assert settings.origins == {
        "n": "n = 2 from flags, over the file f (3) and the environment (4)"
    }


def test_an_object_is_shown_by_its_type() -> None:
    assert merge([("the call", {"o": object()})]).origins["o"] == "o = object from the call"


def test_the_table_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('[strategy]\nname = "mirrored"\ndevices = ["CPU:0"]\n[other]\nx = 1\n')
    assert read_file(file) == {"name": "mirrored", "devices": ["CPU:0"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[strategy", "must be valid TOML"),
        ("", "must have a [strategy] table, got nothing"),
        ("[stratgey]\nname = 'mirrored'", "Did you mean [strategy] by [stratgey]?"),
        ("strategy = 'mirrored'", "must be a table of settings, got 'mirrored'"),
        ("[strategy]\nname = 3", "must be a text, got 3"),
        ("[strategy]\nname = ['mirrored']", "must be a text, got ['mirrored']"),
        ("[strategy]\ncluster = 'x'", "strategy.cluster must be left out of "),
    ],
)
def test_a_file_that_cannot_be_right(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(StrategyError) as error:
        read_file(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("path", ["", "no/such.toml", ".", "\0"])
def test_a_file_that_cannot_be_read(path: str) -> None:
    with pytest.raises(StrategyError, match="cannot be read"):
        read_file(path)


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_bytes(b"\xff[strategy]")
    with pytest.raises(StrategyError, match="cannot be read"):
        read_file(file)


@pytest.mark.parametrize("path", [3, True, ["f.toml"]])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(StrategyError, match="config must be the path of a TOML file"):
        read_file(path)
