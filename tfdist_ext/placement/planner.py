"""The planner: every task holds about as many bytes, and as much load, as the others.

Variables are placed largest first, each on the task that is least full. A variable that is larger
than 1/128 of the mean task is cut into equal pieces where it would overflow a task. The rest is
small enough to fill the gaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tfdist_ext.placement.specs import VariableSpec

__all__ = ["Planner"]

_SLACK = (1.005, 1.02)  # bytes and load of a full task over the mean. Loads are guesses.
_SMALL = 1 / 128  # of the mean task: not cut, because each piece costs a message in every step
_MOST_PIECES = 16  # for each task

Floats = NDArray[np.float64]


class Planner:
    """Fills tasks with variables. Bytes are row 0 of each array, load is row 1.

    Attributes:
        held: what each task holds.
        mean: what a task holds on average when everything is placed; 1 where there is nothing.
        full: when a task counts as full.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        filled: Sequence[int],
        loaded: Sequence[float],
        pieces: Mapping[str, int],
    ) -> None:
        """
        Args:
            specs: the variables to place.
            filled: bytes that rules have put on each task.
            loaded: load that rules have put on each task.
            pieces: path -> number of pieces that its rule asks for; for other variables the planner
                decides.
        """
        self._specs, self._pieces = specs, pieces
        self._count = len(filled)
        self.held = np.array([filled, loaded], float)
        added = [sum(spec.bytes for spec in specs), sum(spec.load or 0.0 for spec in specs)]
        total = self.held.sum(axis=1) + added
        self.mean = np.where(total > 0, total / self._count, 1.0)
        self.full = self.mean * _SLACK

    def place_all(self) -> list[Sequence[int]]:
        """Put all variables on tasks.

        Returns:
            For each variable the tasks of its pieces, in the order of rows.
        """
        sizes = [self._size_of(spec) for spec in self._specs]
        placed: list[Sequence[int]] = [()] * len(self._specs)
        for index in np.argsort(np.negative(sizes), kind="stable").tolist():
            placed[index] = self._place(self._specs[index], sizes[index])
        return placed

    def _size_of(self, spec: VariableSpec) -> float:
        """The variable's bytes or load in units of the mean task, whichever is larger."""
        return float(max(np.array([spec.bytes, spec.load or 0.0]) / self.mean))

    def _place(self, spec: VariableSpec, size: float) -> Sequence[int]:
        """Put a variable of this `_size_of` on tasks; returns the tasks of its pieces."""
        asked = self._pieces.get(spec.path)
        if asked is None and (size <= _SMALL or spec.rows < 2):
            return (self._put(self.held, spec.bytes, spec.load or 0.0),)
        where, held = self._tried(spec, asked or 1)
        if asked is None and self._overflow(where, held) > 1:
            where, held = self._cut(spec, where, held)
        self.held = held
        if len(set(where)) == 1 and asked is None:
            return where[:1]
        more = spec.rows % len(where)  # pieces with one more row, which come first
        return (*sorted(where[:more]), *sorted(where[more:]))

    def _cut(self, spec: VariableSpec, where: list[int], held: Floats) -> tuple[list[int], Floats]:
        """The fewest pieces with which no task overflows; else those that overflow least."""
        most = min(spec.rows, _MOST_PIECES * self._count)
        room = float(self.full[0] - self.held[0].min())
        pieces = min(most, max(2, math.ceil(spec.bytes / room) if room > 0 else 2))
        best = self._overflow(where, held)
        while best > 1 and pieces <= most:
            tried = self._tried(spec, pieces)
            if (overflow := self._overflow(*tried)) < best:
                best, (where, held) = overflow, tried
            pieces += max(1, pieces // 8)
        return where, held

    def _tried(self, spec: VariableSpec, pieces: int) -> tuple[list[int], Floats]:
        """Try this number of pieces: the tasks of the pieces, and what all tasks would hold."""
        held = self.held.copy()
        # A rule that asks for four pieces means four tasks.
        apart = spec.path in self._pieces and pieces <= self._count
        where: list[int] = []
        for size, load in zip(spec.piece_bytes(pieces), spec.piece_loads(pieces), strict=True):
            where.append(self._put(held, size, load, where if apart else ()))
        return where, held

    def _put(self, held: Floats, size: int, load: float, taken: Sequence[int] = ()) -> int:
        """Add a piece to the least full task, and return the task.

        Args:
            taken: tasks that are not considered.
        """
        # How full each task would be, weighted by how much the piece brings of bytes and of load.
        after = held[0] + size
        cost = after * (size / self.mean[0] / self.full[0])
        if load:
            cost += (held[1] + load) / self.full[1] * (load / self.mean[1])
        if taken:
            cost[list(taken)] = math.inf
        task = int(cost.argmin())
        if after[task] > self.full[0]:  # a task with room comes first
            with_room = np.where(after > self.full[0], math.inf, cost)
            task = int((with_room if with_room.min() < math.inf else cost).argmin())
        held[0, task] += size
        held[1, task] += load
        return task

    def _overflow(self, where: list[int], held: Floats) -> float:
        """How full the fullest of these tasks would be, to three digits: 1 is full."""
        return round(float((held[:, where] / self.full[:, None]).max()), 3)
