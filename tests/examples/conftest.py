"""Examples are imported by name, as a reader runs them: from their folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))


@pytest.fixture(autouse=True)
def _tensorflow(four_cpus: None) -> None:
    """Examples in this process have the devices of all other tests in it, whichever run first."""
