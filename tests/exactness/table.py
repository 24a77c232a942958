"""The columns of the exactness matrix: strategies, each compared with one device in every cell.

`scripts/exactness` runs all columns with all optimizers; the suite runs the optimizers that a
column lists for it.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import matrix
from task_programs import results_of
from train import Column, train_cells

from tfdist_ext.testing import TaskError, run_tasks

BOUND = 1e-6  # float32
# Of models with more operations one after another, each of which rounds.
BOUNDS = {"transformer with dropout": 5e-6, "VAE": 5e-6}
LIMIT = 1500  # seconds for one column
WORKERS = "multi_worker_mirrored"
ONE_PROCESS = "one process"  # Keras without a strategy
FIRST, *_, LAST = matrix.OPTIMIZERS
ALL_CELLS = [
    matrix.Cell(*names)
    for names in itertools.product(matrix.MODELS, matrix.OPTIMIZERS, matrix.SIZES)
]


# The suite runs one optimizer whose update depends on the size of the gradient (FIRST), and the one
# that does most beside its update (LAST). The tests of PlacedStrategy have columns of their own.
COLUMNS = {
    "default": Column("default"),
    "one device": Column("one_device"),
    "mirrored 1": Column("mirrored", 1),
    "mirrored 2": Column("mirrored", 2),
    "mirrored 3": Column("mirrored", 3, in_suite=(LAST,)),
    "mirrored 4": Column("mirrored", 4),
    "central 3": Column("central_storage", 3, in_suite=(FIRST,)),
    # Each rule matches in each model.
    "placed 3: owned": Column("placed", 3, {".*": "owned"}),
    "placed 4: mixed": Column("placed", 4, {".*/kernel": "owned", ".*/bias": "device CPU:1"}),
    "placed 3: in pieces": Column("placed", 3, {".*/kernel": "sharded(2)", ".*/bias": "sharded"}),
    "workers 2": Column(WORKERS, workers=2),
    "workers 3": Column(WORKERS, workers=3, in_suite=(FIRST,)),
    "Keras: mirrored 4": Column("mirrored", 4, by_keras=True),
    "Keras: central 3": Column("central_storage", 3, by_keras=True),
    "Keras: workers 2": Column(WORKERS, workers=2, by_keras=True),
}
# What the suite runs without --long; with workers: training/synchronous/test_exact_workers.py; with
# steps of the user's own: training/steps/test_custom_steps.py.
QUICK = [("mirrored 3", "CNN with BN"), ("mirrored 3", "VAE")]


def train_column(
    column: Column, optimizers: Sequence[str] = tuple(matrix.OPTIMIZERS)
) -> dict[matrix.Cell, matrix.Trained | None]:
    """Train the cells of a column in processes of their own; the first worker's results."""
    arguments = (column, tuple(optimizers))
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    results = run_tasks(train_cells, column.workers or None, LIMIT, args=arguments, env=env)
    return next(iter(results.values()))


def figures() -> dict[str, dict[matrix.Cell, float | None]]:
    """Title of a column -> the difference to one device in each cell; None where it failed.

    A column of plain Keras may fail as a whole, or hang.
    """
    started = time.monotonic()

    def trained(title: str) -> dict[matrix.Cell, matrix.Trained | None]:
        column, ended = COLUMNS.get(title, Column()), ""
        try:
            cells = train_column(column)
        except TaskError as error:
            if not column.by_keras:
                raise
            cells, ended = dict.fromkeys(ALL_CELLS), f": {error}"
        print(f"{time.monotonic() - started:4.0f} s: {title}{ended}", file=sys.stderr, flush=True)
        return cells

    # Those with several processes first: none of them runs alone at the end.
    titles = [ONE_PROCESS, *sorted(COLUMNS, key=lambda title: -COLUMNS[title].workers)]
    # Two at a time: building graphs keeps one core busy each.
    with ThreadPoolExecutor(2) as pool:
        columns = dict(zip(titles, pool.map(trained, titles), strict=True))
    one_device = columns[ONE_PROCESS]
    return {
        title: {
            cell: None if result is None else matrix.difference(result, one_device[cell])
            for cell, result in columns[title].items()
        }
        for title in COLUMNS
    }


def of_every_optimizer() -> dict[str, dict[str, float]]:
    """Optimizer -> the difference of weights to one device, by title, of a shared optimizer."""
    found: dict[str, dict[str, float]] = {}
    for workers in (2, 3):
        first, *_ = results_of("sharded_optimizer.py", cluster=workers, timeout=LIMIT)
        for name, figures in first["optimizers"].items():
            found.setdefault(name, {})[f"shared {workers}"] = figures["weights"]
    return found


def markdown_of_optimizers(found: dict[str, dict[str, float]]) -> str:
    titles = list(next(iter(found.values())))
    lines = [f"| optimizer | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, figures in found.items():
        lines.append(f"| {name} | {' | '.join(f'{value:.0e}' for value in figures.values())} |")
    return "\n".join(["### Every optimizer, shared by workers", "", *lines, ""])


def markdown(found: dict[str, dict[matrix.Cell, float | None]]) -> str:
    """A table for each model."""

    def shown(value: float | None) -> str:
        return "fails" if value is None else "0" if value == 0 else f"{value:.0e}"

    lines = []
    for model, cells in itertools.groupby(ALL_CELLS, lambda cell: cell.model):
        lines += [f"### {model}", "", "| optimizer | size | " + " | ".join(found) + " |"]
        lines.append("|---" * (len(found) + 2) + "|")
        for cell in cells:
            values = " | ".join(shown(column[cell]) for column in found.values())
            lines.append(f"| {cell.optimizer} | {cell.size} | {values} |")
        lines.append("")
    return "\n".join(lines)


def over_the_bound(found: dict[str, dict[matrix.Cell, float | None]]) -> list[str]:
    """What is not as promised, in words; plain Keras's columns promise nothing."""
    return [
        f"{title}: {', '.join(cell)}: {value}"
        for title, column in found.items()
        if not COLUMNS[title].by_keras
        for cell, value in column.items()
        if value is None or not value <= BOUNDS.get(cell.model, BOUND)
    ]
