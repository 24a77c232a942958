"""docs/command_line.md lists the options of each command as `--help` prints them."""

from __future__ import annotations

import pytest
from pages import check_of


def test_page_shows_the_help_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_of("command_line.py") == 0, capsys.readouterr().out[-2000:]
