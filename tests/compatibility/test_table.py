"""The table of real models: what it lists, how a line comes about, and what CI runs of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import model_table as table
from model_rows import rows
from two_steps import Compared


def test_the_rows() -> None:
    titles = list(rows())
    of_hub = [title for title in titles if title.startswith("KerasHub:")]
    assert len(of_hub) >= 25
    assert len([title for title in titles if title.startswith("keras.applications:")]) >= 38
    assert set(table.TENTH) < set(titles)
    assert len(table.TENTH) >= len(titles) / 10
    assert table.titles_with(["KerasRS:", "ViT"])[0] == "KerasHub: ViT"


@pytest.mark.parametrize(
    ("title", "differences", "rounding", "line", "explained"),
    [
        ("guides: GAN", [1e-15, 0.0], 0, "| 1e-15 | 0 |  |  | 1.5 |  |", True),
        ("guides: GAN", [1e-15, 0.1], 0, "| 1e-15 | 1e-01 |  |  | 1.5 |  |", False),
        ("guides: GAN", [1e-15, 0.1], 2e-3, "changed last bits make 2e-03 in Keras", True),
        ("KerasHub: XLNet", [0.1, 0.0], 0, "| 1e-01 | 0 |  |  | 1.5 | KerasHub reshapes", True),
    ],
)
def test_a_line(
    monkeypatch, title: str, differences: list, rounding: float, line: str, explained: bool
) -> None:
    found = Compared(11, differences, [2.0, 3.0], rounding)
    monkeypatch.setattr(table, "_run", lambda *_: {title: found})
    monkeypatch.setattr(table, "CLUSTERS", {})
    measured = table.measure([title])[title]
    assert measured.line.startswith(f"| {title} | 11 | 1 | ")
    assert line in measured.line
    assert measured.is_explained == explained


def test_the_cells_of_clusters(monkeypatch) -> None:
    title = next(iter(rows()))  # every third model is trained on clusters
    on_replicas = Compared(1, [0.0, 0.0], [2.0, 3.0], 0.0)
    results = iter([on_replicas, Compared(1, [0.2], [2.0, 3.0], 0.0), "worker:0 hung"])
    monkeypatch.setattr(table, "_run", lambda *_: {title: next(results)})
    measured = table.measure([title])[title]
    assert "| 0 | 0 | 2e-01 | fails: worker:0 hung | 1.5 |" in measured.line
    assert not measured.is_explained


def test_the_page_has_a_line_of_each_model_that_ci_runs() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert [title for title in table.TENTH if f"| {title} |" not in text] == []
