"""The matrix: on every synchronous strategy the same numbers as on one device.

Two strategies train with every optimizer; the others with the one that does most beside its update,
so that the suite stays quick. `scripts/exactness` runs all cells.
"""

from __future__ import annotations

from typing import Any

import matrix
import pytest
import table

LAST = list(matrix.OPTIMIZERS)[-1:]
OURS = {
    title: list(matrix.OPTIMIZERS) if title in ("mirrored 3", "workers 2") else LAST
    for title, (_, _, by_keras) in table.COLUMNS.items()
    if not by_keras
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return table.figures(OURS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", OURS)
def test_every_cell(found: dict[str, Any], title: str) -> None:
    cells = found[title]
    assert len(cells) == len(matrix.MODELS) * len(OURS[title]) * len(matrix.SIZES)
    assert {cell: value for cell, value in cells.items() if not value <= table.BOUND} == {}


def test_the_table_tells_what_is_over_the_bound() -> None:
    cell = matrix.Cell("MLP", "Adam", "even")
    assert table.over_the_bound({"mirrored 2": {cell: 1e-7}}) == []
    for wrong in (2e-6, float("nan"), None):
        assert table.over_the_bound({"mirrored 2": {cell: wrong}}) == [
            f"mirrored 2: MLP, Adam, even: {wrong}"
        ]
        assert table.over_the_bound({"Keras: mirrored 4": {cell: wrong}}) == []
