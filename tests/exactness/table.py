"""Every cell of the matrix on every strategy against one device, beside plain Keras."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matrix

from tfdist_ext.launch import LaunchPlan, addresses_needed, plan_local, reserve_ports, run_plan

BOUND = 1e-6  # float32
LIMIT = 1500  # seconds for one column
PROGRAM = Path(__file__).with_name("train.py")
ONE_PROCESS = "one process"
WORKERS = "multi_worker_mirrored"

# Title -> (name of the strategy for train.py, worker processes, trained by Keras's own fit).
COLUMNS = {
    "default": ("default", 0, False),
    "one device": ("one_device", 0, False),
    "mirrored 1": ("mirrored_1", 0, False),
    "mirrored 2": ("mirrored_2", 0, False),
    "mirrored 3": ("mirrored_3", 0, False),
    "mirrored 4": ("mirrored_4", 0, False),
    "central 3": ("central_storage_3", 0, False),
    "placed 3: owned": ("placed-owned_3", 0, False),
    "placed 4: mixed": ("placed-mixed_4", 0, False),
    "placed 3: in pieces": ("placed-pieces_3", 0, False),
    "workers 2": (WORKERS, 2, False),
    "workers 3": (WORKERS, 3, False),
    "Keras: mirrored 4": ("mirrored_4", 0, True),
    "Keras: central 3": ("central_storage_3", 0, True),
    "Keras: workers 2": (WORKERS, 2, True),
}


def launched(plan: LaunchPlan, folder: Path, env: dict[str, str]) -> str:
    """What tells of the failure of a run of the plan, if it failed."""
    with open(os.devnull, "w") as nowhere:
        result = run_plan(plan, env=env, stream=nowhere, timeout=LIMIT)
    return "\n".join(result.last_lines) if result.exit_status else ""


def train(
    name: str,
    workers: int,
    by_keras: bool,
    optimizers: Iterable[str] = matrix.OPTIMIZERS,
    run_workers: Callable[[LaunchPlan, Path, dict[str, str]], str] = launched,
) -> dict[matrix.Cell, matrix.Trained | None]:
    """Run train.py, in a process of its own or as the workers of a cluster."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    env.pop("TF_CONFIG", None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells"
        command = [sys.executable, str(PROGRAM), name, str(out), *["--keras"] * by_keras]
        command += ["--optimizers", *optimizers]
        if workers:
            with reserve_ports(addresses_needed(workers=workers)) as ports:
                plan = plan_local(command, workers=workers, ports=ports, env=env)
                failure = run_workers(plan, Path(folder), env)
        else:
            run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
            failure = run.stderr[-3000:] if run.returncode else ""
        if failure:
            raise RuntimeError(f"training on {name} failed:\n{failure}")
        return dict(pickle.loads(out.read_bytes()))


def figures() -> dict[str, dict[matrix.Cell, float | None]]:
    """Title of a column -> the difference to one device in each cell; None where it failed."""
    started = time.monotonic()

    def trained(*column: Any) -> dict[matrix.Cell, matrix.Trained | None]:
        cells = train(*column)
        words = [column[0], f"{column[1]} processes" if column[1] else "", "Keras" * column[2]]
        print(
            f"{time.monotonic() - started:4.0f} s: {' '.join(words)}", file=sys.stderr, flush=True
        )
        return cells

    # Two at a time: building graphs keeps one core busy each.
    with ThreadPoolExecutor(2) as pool:
        wanted = [(ONE_PROCESS, 0, False), *COLUMNS.values()]
        one_device, *others = pool.map(lambda column: trained(*column), wanted)
    return {
        title: {
            cell: None if result is None else matrix.difference(result, one_device[cell])
            for cell, result in cells.items()
        }
        for title, cells in zip(COLUMNS, others, strict=True)
    }


def markdown(found: dict[str, dict[matrix.Cell, float | None]]) -> str:
    """A table for each model."""

    def shown(value: float | None) -> str:
        return "fails" if value is None else "0" if value == 0 else f"{value:.0e}"

    lines = []
    for model in matrix.MODELS:
        lines += [f"### {model}", "", "| optimizer | size | " + " | ".join(found) + " |"]
        lines.append("|---" * (len(found) + 2) + "|")
        for optimizer in matrix.OPTIMIZERS:
            for size in matrix.SIZES:
                cell = matrix.Cell(model, optimizer, size)
                values = " | ".join(shown(column[cell]) for column in found.values())
                lines.append(f"| {optimizer} | {size} | {values} |")
        lines.append("")
    return "\n".join(lines)


def over_the_bound(found: dict[str, dict[matrix.Cell, float | None]]) -> list[str]:
    """What is not as promised, in words; plain Keras's columns promise nothing."""
    return [
        f"{title}: {', '.join(cell)}: {value}"
        for title, column in found.items()
        if not COLUMNS[title][2]
        for cell, value in column.items()
        if value is None or not value <= BOUND
    ]
