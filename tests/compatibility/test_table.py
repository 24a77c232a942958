"""The table of real models: what it lists, how a line comes about, and what CI runs of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
import model_table as table
from model_rows import rows
from two_steps import OnReplicas, Trained, difference


def trained(*values: float) -> Trained:
    return Trained([np.array(values), np.array([7])], 2.0, 11)


def test_the_rows() -> None:
    titles = list(rows())
    of_hub = [title for title in titles if title.startswith("KerasHub:")]
    assert len(of_hub) >= 25
    assert len([title for title in titles if title.startswith("keras.applications:")]) >= 38
    assert set(table.TENTH) < set(titles)
    assert len(table.TENTH) >= len(titles) / 10
    assert table.titles_with(["KerasRS:", "ViT"])[0] == "KerasHub: ViT"


def test_a_difference_is_relative_to_the_largest_number() -> None:
    assert difference(trained(1.0, -4.0), trained(1.0, -4.0)) == 0
    assert difference(trained(1.0, -3.0), trained(1.0, -4.0)) == 0.25
    assert difference(trained(0.0, 1e-6), trained(0.0, 0.0)) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("title", "differences", "rounding", "line", "explained"),
    [
        ("guides: GAN", [1e-15, 0.0], 0, "| 1e-15 | 0 |  |  | 1.5 |  |", True),
        ("guides: GAN", [1e-15, 0.1], 0, "| 1e-15 | 1e-01 |  |  | 1.5 |  |", False),
        ("guides: GAN", [1e-15, 0.1], 2e-3, "bit of the inputs makes 2e-03 in Keras", True),
        ("KerasHub: XLNet", [0.1, 0.0], 0, "| 1e-01 | 0 |  |  | 1.5 | KerasHub reshapes", True),
    ],
)
def test_a_line(
    monkeypatch, title: str, differences: list, rounding: float, line: str, explained: bool
) -> None:
    found = {"process": OnReplicas(trained(1.0), differences, 3.0, rounding)}
    monkeypatch.setattr(table, "run_tasks", lambda *_, **__: found)
    monkeypatch.setattr(table, "CLUSTERS", dict.fromkeys(("workers 2", "parameter server")))
    monkeypatch.setattr(table, "_on", lambda *_: None)
    measured = table.measure(title)
    assert measured.line.startswith(f"| {title} | 11 | 1 | ")
    assert line in measured.line
    assert measured.is_explained == explained


def test_the_page_has_a_line_of_each_model_that_ci_runs() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert [title for title in table.TENTH if f"| {title} |" not in text] == []
