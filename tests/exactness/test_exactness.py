"""The matrix: on every synchronous strategy the same numbers as on one device.

Two strategies train with every optimizer; the others with the one that does most beside its update,
so that the suite stays quick. `scripts/exactness` runs all cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import matrix
import pytest
import table
import train

Cells = dict[matrix.Cell, matrix.Trained | None]

LAST = list(matrix.OPTIMIZERS)[-1:]
OURS = {
    title: list(matrix.OPTIMIZERS) if title in ("mirrored 3", "workers 2") else LAST
    for title, (_, _, by_keras) in table.COLUMNS.items()
    if not by_keras
}


@pytest.fixture(scope="module")
def by_workers() -> Iterator[dict[str, Future[Cells]]]:
    """What real clusters train, meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield {
            title: pool.submit(table.train, *table.COLUMNS[title], OURS[title])
            for title in OURS
            if table.COLUMNS[title][1]
        }


@pytest.fixture(scope="module")
def one_device(four_cpus: None, by_workers: Any) -> Cells:
    return dict(matrix.train_all(lambda build: build()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("title", OURS)
def test_every_cell(one_device: Cells, by_workers: dict[str, Future[Cells]], title: str) -> None:
    if title in by_workers:
        cells = by_workers[title].result()
    else:
        name, _, _ = table.COLUMNS[title]
        cells = dict(matrix.train_all(train.wrapper(name, by_keras=False), OURS[title]))
    found = {cell: matrix.difference(ours, one_device[cell]) for cell, ours in cells.items()}
    assert len(found) == len(matrix.MODELS) * len(OURS[title]) * len(matrix.SIZES)
    assert {cell: value for cell, value in found.items() if not value <= table.BOUND} == {}


def test_the_table_tells_what_is_over_the_bound() -> None:
    cell = matrix.Cell("MLP", "Adam", "even")
    assert table.over_the_bound({"mirrored 2": {cell: 1e-7}}) == []
    for wrong in (2e-6, float("nan"), None):
        assert table.over_the_bound({"mirrored 2": {cell: wrong}}) == [
            f"mirrored 2: MLP, Adam, even: {wrong}"
        ]
        assert table.over_the_bound({"Keras: mirrored 4": {cell: wrong}}) == []
