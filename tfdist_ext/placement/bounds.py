"""Lower bounds of the fullest task's bytes, which no placement can beat."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tfdist_ext.placement.policies import Tasks
from tfdist_ext.placement.specs import VariableSpec

__all__ = ["min_max_bytes_bound", "min_max_load_bound", "water_level"]

Floats = NDArray[np.float64]

_CROWDS = 1000  # how many smallest pieces may have to share a task, at most, in the counting


def water_level(
    filled: Sequence[float], amount: float, caps: Sequence[float] | None = None
) -> float:
    """How high an amount that can be cut anywhere stands on tasks that hold something already.

    Args:
        filled: what each task holds.
        amount: what is poured over them.
        caps: what each may hold; None for no limit.

    Returns:
        The level; infinite where the amount does not fit.
    """
    events = [(level, 1) for level in filled]
    if caps is not None:
        events += [(max(cap, level), -1) for cap, level in zip(caps, filled, strict=True)]
    events.sort()
    at, width = events[0][0], 0
    for level, change in events:
        if amount <= width * (level - at):
            break
        amount -= width * (level - at)
        at, width = level, width + change
    if amount <= 0:
        return at
    return at + amount / width if width else math.inf


def min_max_bytes_bound(specs: Sequence[VariableSpec], tasks: Tasks) -> float:
    """Bytes that the fullest task holds at least, however the variables are cut and placed."""
    extra = _array(spec.slot_bytes for spec in specs)
    whole = _array(spec.bytes for spec in specs) - extra
    return _bound(whole, extra, _divisions(specs, tasks), tasks.filled, tasks.budgets)


def min_max_load_bound(specs: Sequence[VariableSpec], tasks: Tasks) -> float:
    """The load that the busiest task has at least."""
    loads = _array(spec.load or 0.0 for spec in specs)
    return _bound(loads, 0.0 * loads, _divisions(specs, tasks), tasks.loaded, None)


def _array(values: Iterable[float]) -> Floats:
    return np.fromiter(values, float)


def _divisions(specs: Sequence[VariableSpec], tasks: Tasks) -> tuple[Floats, Floats]:
    """Rows of each variable, and the most pieces that it can be cut into."""
    rows = np.maximum(_array(spec.rows for spec in specs), 1)
    if not tasks.pieces:
        return rows, rows
    asked = _array(tasks.pieces.get(spec.path, 0) for spec in specs)
    return rows, np.where(asked > 0, asked, rows)


def _bound(
    whole: Floats,
    extra: Floats,
    divisions: tuple[Floats, Floats],
    filled: Sequence[float],
    caps: Sequence[float] | None,
) -> float:
    """From the smallest pieces that each variable can be cut into.

    Among the largest k * tasks + 1 of them, some task holds k + 1 or more: at least as much as the
    k + 1 smallest of these. It already held what the emptiest task did.

    Args:
        whole: size of each variable, shared evenly by its rows.
        extra: what the first piece of each holds more.
        divisions: rows of each variable, and the pieces.
        filled: what each task holds already.
        caps: what each may hold.
    """
    total = float(whole.sum() + extra.sum())
    bound = float(max(filled))
    if total <= 0:
        return bound
    bound = max(bound, water_level(filled, total, caps))
    rows, pieces = divisions
    row, least, more = whole / rows, np.floor(rows / pieces), rows % pieces
    first = (least + (more > 0)) * row
    # Of each variable: its first piece, others with a row more, and the rest.
    sizes = np.concatenate([first + extra, first, least * row])
    counts = np.concatenate(
        [np.ones(len(rows)), np.maximum(more - 1, 0), pieces - np.maximum(more, 1)]
    )
    kept = (sizes > 0) & (counts > 0)
    sizes, counts = sizes[kept], counts[kept]
    order = np.argsort(-sizes)
    sizes, counts = sizes[order], counts[order]
    numbers = np.cumsum(counts)  # pieces so far, and their sum below
    sums = np.cumsum(sizes * counts)
    count = len(filled)
    k = np.arange(min(_CROWDS, int(numbers[-1] - 1) // count) + 1)
    at = np.stack([k * count + 1, k * count - k])
    place = np.searchsorted(numbers, at)
    largest = sums[place] - (numbers[place] - at) * sizes[place]
    return max(bound, min(filled) + float((largest[0] - largest[1]).max()))
