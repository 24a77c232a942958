"""Arguments over flags over the file over the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfdist_ext import StrategyError
from tfdist_ext.strategies.settings import Settings, read_file


def test_the_first_place_with_a_value_wins() -> None:
    settings = Settings()
    settings.add("the call", {"a": None, "b": 1})
    settings.add("flags", {"a": 2, "b": 3})
    assert settings.values == {"a": 2, "b": 1}
    assert list(settings.lines()) == ["b = 1 from the call", "a = 2 from flags"]
    assert list(settings.lines(without="flags")) == ["b = 1 from the call"]


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
