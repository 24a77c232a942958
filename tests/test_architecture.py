"""docs/architecture.md says what is: its tables, and the path of a fit, come from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(240)
def test_the_page_is_up_to_date_and_a_fit_passes_few_modules() -> None:
    script = ROOT / "scripts" / "figures" / "architecture.py"
    command = [sys.executable, str(script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
