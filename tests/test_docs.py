"""The Python blocks of each page run, one after the other; all links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from warm_programs import run_program

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "docs/custom_strategy.md",
    "docs/data.md",
    "docs/placed.md",
    "docs/placement.md",
    "docs/training.md",
    "docs/saving.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    page_as_program = "\n".join(blocks)
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-c", page_as_program]
    run = run_program(command, tmp_path, cwd=here, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    if page == "README.md":
        assert (here / "model.keras").exists()


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
