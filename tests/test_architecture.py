"""docs/architecture.md shows the code as it is: its rooms, and the modules that a fit passes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "figures" / "architecture.py"


@pytest.mark.timeout(240)
def test_the_page_is_up_to_date_and_a_fit_passes_few_modules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("architecture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--check"]) == 0, capsys.readouterr().out[-2000:]
