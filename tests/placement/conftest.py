"""Tests and scripts/figures/placement_report look at the same models."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "scripts" / "figures"), str(ROOT / "docs" / "examples")]
