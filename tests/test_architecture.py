"""docs/architecture.md shows the code as it is: its rooms, and the modules that a fit passes."""

from __future__ import annotations

import pytest
from pages import check_of


@pytest.mark.timeout(240)
def test_the_page_is_up_to_date_and_a_fit_passes_few_modules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check_of("architecture.py") == 0, capsys.readouterr().out[-2000:]
