"""On every synchronous strategy the same numbers as on one device: the part that the suite runs.

Which part is in `table.COLUMNS` and `table.QUICK`; `scripts/exactness` runs all of it.
"""

from __future__ import annotations

import functools
from pathlib import Path

import matrix
import pytest
import table
import train

Cells = dict[matrix.Cell, matrix.Trained | None]

IN_SUITE = {title: column for title, column in table.COLUMNS.items() if column.in_suite}
PAGE = Path(__file__).parents[2] / "docs" / "exactness_measured.md"


@functools.cache
def one_device(optimizer: str, model: str) -> Cells:
    return dict(matrix.train_all(lambda build: build(), [optimizer], [model]))


@functools.cache
def trained(title: str) -> Cells:
    """Of all models, in processes of their own."""
    return table.train_column(IN_SUITE[title], IN_SUITE[title].in_suite)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("title", "model"),
    [
        pytest.param(title, model, marks=[] if (title, model) in table.QUICK else pytest.mark.long)
        for title in IN_SUITE
        for model in matrix.MODELS
    ],
)
def test_every_cell(four_cpus: None, title: str, model: str) -> None:
    column = IN_SUITE[title]
    if column.workers:
        cells = {cell: found for cell, found in trained(title).items() if cell.model == model}
    else:
        distribute = train.wrapper(column)
        cells = dict(matrix.train_all(distribute, column.in_suite, [model]))
    expected: Cells = {}
    for optimizer in column.in_suite:
        expected |= one_device(optimizer, model)
    found = {cell: matrix.difference(ours, expected[cell]) for cell, ours in cells.items()}
    assert len(found) == len(column.in_suite) * len(matrix.SIZES)
    assert table.over_the_bound({title: found}) == []


def test_the_table_tells_what_is_over_the_bound() -> None:
    cell = matrix.Cell("MLP", "Adam", "even")
    assert table.over_the_bound({"mirrored 2": {cell: 1e-7}}) == []
    for wrong in (2e-6, float("nan"), None):
        assert table.over_the_bound({"mirrored 2": {cell: wrong}}) == [
            f"mirrored 2: MLP, Adam, even: {wrong}"
        ]
        assert table.over_the_bound({"Keras: mirrored 4": {cell: wrong}}) == []


def test_the_page_has_all_columns() -> None:
    """`scripts/exactness`, which runs all of `table.COLUMNS`, prints the tables of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    headers = [line for line in lines if line.startswith("| optimizer | size |")]
    assert headers == [f"| optimizer | size | {' | '.join(table.COLUMNS)} |"] * len(matrix.MODELS)
