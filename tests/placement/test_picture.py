"""A plan as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from placement_models import criteo_tables

from tfdist_ext.placement import Owned, PlacementError, VariableSpec, plan


def test_the_picture(tmp_path: Path) -> None:
    specs = [*criteo_tables(), VariableSpec("odd$x_{/$<k>&", (2_000_000, 16), slots=2)]
    made = plan(specs, 2, rules={"table_2/embeddings": "sharded(2)"})
    made.save_picture(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert "table_2/embeddings  1.81 GiB" in text
    assert "odd$x_{/$&lt;k&gt;&amp;" in text
    for word in (">ps 0<", ">ps 1<", "GiB of variables and slots"):
        assert word in text
    plan(specs, 64).save_picture(tmp_path / "plan.PNG")
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")
    plan(specs[:3], devices=["CPU:0", "GPU:0"], default=lambda _: Owned()).save_picture(
        tmp_path / "d.svg"
    )
    assert ">GPU:0<" in (tmp_path / "d.svg").read_text(encoding="utf-8")
    with pytest.raises(PlacementError, match=r"a \.svg or a \.png file, got .*plan.pdf"):
        made.save_picture(tmp_path / "plan.pdf")
    with pytest.raises(PlacementError, match="cannot be written"):
        made.save_picture(tmp_path / "no" / "plan.svg")


def test_a_picture_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlacementError, match=r"Install matplotlib\.$"):
        plan([VariableSpec("a", (4, 4))], 2).save_picture(tmp_path / "plan.svg")
    assert not (tmp_path / "plan.svg").exists()
