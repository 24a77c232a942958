"""Pages that scripts write show the code as it is: its rooms and modules, and all options."""

from __future__ import annotations

import pytest
from pages import check_of


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", ["architecture.py", "command_line.py"])
def test_the_page_of_the_script_is_up_to_date(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of architecture.py also checks that a fit passes few modules."""
    assert check_of(script) == 0, capsys.readouterr().out[-2000:]
