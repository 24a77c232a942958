"""On every synchronous strategy the same numbers as on one device: the part that the suite runs.

Which part is in `table.COLUMNS`; `scripts/exactness` runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matrix
import pytest
import table
import train

Cells = dict[matrix.Cell, matrix.Trained | None]

IN_SUITE = {title: column for title, column in table.COLUMNS.items() if column.in_suite}
# Those of clusters are trained in other processes meanwhile.
ELSEWHERE = [title for title, column in IN_SUITE.items() if column.workers]
PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[dict[str, Future[Cells]]]:
    with ThreadPoolExecutor(1) as pool:
        yield {
            title: pool.submit(table.train_column, IN_SUITE[title], IN_SUITE[title].in_suite)
            for title in ELSEWHERE
        }


@pytest.fixture(scope="module")
def one_device(four_cpus: None, elsewhere: Any) -> Cells:
    used = {optimizer for column in IN_SUITE.values() for optimizer in column.in_suite}
    optimizers = [optimizer for optimizer in matrix.OPTIMIZERS if optimizer in used]
    return dict(matrix.train_all(lambda build: build(), optimizers))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("title", sorted(IN_SUITE, key=ELSEWHERE.__contains__))
def test_every_cell(one_device: Cells, elsewhere: dict[str, Future[Cells]], title: str) -> None:
    column = IN_SUITE[title]
    if title in elsewhere:
        cells = elsewhere[title].result()
    else:
        distribute = train.wrapper(column.strategy, by_keras=False)
        cells = dict(matrix.train_all(distribute, column.in_suite))
    found = {cell: matrix.difference(ours, one_device[cell]) for cell, ours in cells.items()}
    assert len(found) == len(column.in_suite) * len(matrix.MODELS) * len(matrix.SIZES)
    assert table.over_the_bound({title: found}) == []


def test_the_table_tells_what_is_over_the_bound() -> None:
    cell = matrix.Cell("MLP", "Adam", "even")
    assert table.over_the_bound({"mirrored 2": {cell: 1e-7}}) == []
    for wrong in (2e-6, float("nan"), None):
        assert table.over_the_bound({"mirrored 2": {cell: wrong}}) == [
            f"mirrored 2: MLP, Adam, even: {wrong}"
        ]
        assert table.over_the_bound({"Keras: mirrored 4": {cell: wrong}}) == []


def test_the_page_says_which_part_the_suite_runs() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert table.suite_sentence() in text


def test_the_page_has_all_columns() -> None:
    """`scripts/exactness`, which runs all of `table.COLUMNS`, prints the tables of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    headers = [line for line in lines if line.startswith("| optimizer | size |")]
    assert headers == [f"| optimizer | size | {' | '.join(table.COLUMNS)} |"] * len(matrix.MODELS)
