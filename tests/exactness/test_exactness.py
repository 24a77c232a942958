"""The matrix: on every synchronous strategy the same numbers as on one device.

So that the suite stays quick it has three columns, each with one optimizer: on devices of one
process one that heeds the size of gradients, and the one that does most beside its update; on
workers the first of them (rules of placement: tests/strategies/test_placed_training.py).
`scripts/exactness` runs all cells.
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
from warm_programs import run_together

from tfdist_ext.launch import LaunchPlan

Cells = dict[matrix.Cell, matrix.Trained | None]

FIRST, *_, LAST = matrix.OPTIMIZERS
OURS = {"mirrored 3": LAST, "central 3": FIRST, "workers 3": FIRST}

# Trained in other processes meanwhile: real clusters.
ELSEWHERE = ["workers 3"]


def run_workers(plan: LaunchPlan, folder: Path, env: dict[str, str]) -> str:
    statuses, logs = run_together(plan, folder, env, timeout=500)
    return "\n".join(log[-3000:] for log in logs.values()) if any(statuses.values()) else ""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[dict[str, Future[Cells]]]:
    with ThreadPoolExecutor(1) as pool:
        yield {
            title: pool.submit(table.train, *table.COLUMNS[title], [OURS[title]], run_workers)
            for title in ELSEWHERE
        }


@pytest.fixture(scope="module")
def one_device(four_cpus: None, elsewhere: Any) -> Cells:
    return dict(matrix.train_all(lambda build: build(), [FIRST, LAST]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("title", sorted(OURS, key=ELSEWHERE.__contains__))
def test_every_cell(one_device: Cells, elsewhere: dict[str, Future[Cells]], title: str) -> None:
    if title in elsewhere:
        cells = elsewhere[title].result()
    else:
        name, _, _ = table.COLUMNS[title]
        cells = dict(matrix.train_all(train.wrapper(name, by_keras=False), [OURS[title]]))
    found = {cell: matrix.difference(ours, one_device[cell]) for cell, ours in cells.items()}
    assert len(found) == len(matrix.MODELS) * len(matrix.SIZES)
    assert {cell: value for cell, value in found.items() if not value <= table.BOUND} == {}


def test_the_table_tells_what_is_over_the_bound() -> None:
    cell = matrix.Cell("MLP", "Adam", "even")
    assert table.over_the_bound({"mirrored 2": {cell: 1e-7}}) == []
    for wrong in (2e-6, float("nan"), None):
        assert table.over_the_bound({"mirrored 2": {cell: wrong}}) == [
            f"mirrored 2: MLP, Adam, even: {wrong}"
        ]
        assert table.over_the_bound({"Keras: mirrored 4": {cell: wrong}}) == []
