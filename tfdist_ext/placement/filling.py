"""Tasks while they are being filled: which of them gets the next piece.

Pieces come largest first. With bytes alone the emptiest task is best, which a heap finds. With
loads too, a piece goes where it adds to what there is least of: the smallest inner product of the
piece and the task, each of them (bytes, load) in units of the mean task. Between equals the task's
index decides, so a plan is the same every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from tfdist_ext.placement.policies import Tasks

__all__ = ["ByBytes", "ByBytesAndLoad"]


class ByBytes:
    """The emptiest task that has room.

    Args:
        tasks: what they hold, and their budgets.
        by_room: take the task with the most room left instead of the emptiest; where budgets
            differ and are tight, more fits.
    """

    def __init__(self, tasks: Tasks, *, by_room: bool = False) -> None:
        self._caps: Sequence[float] = tasks.budgets or [math.inf] * tasks.count
        self._held = list(tasks.filled)
        # What counts as empty: 0 bytes, or the whole of the budget.
        self._zero: Sequence[float] = self._caps if by_room else [0] * tasks.count
        self._heap = [(self._held[task] - self._zero[task], task) for task in range(tasks.count)]
        heapify(self._heap)
        # Tasks that had no room for a piece, the most room first. Later pieces are smaller.
        self._waiting: list[tuple[float, int]] = []

    def whole(self, size: int, load: float) -> int | None:
        """The task that takes a variable as a whole; None if none has room."""
        if not self._waiting and self._held[task := self._heap[0][1]] + size <= self._caps[task]:
            self._held[task] += size
            heapreplace(self._heap, (self._held[task] - self._zero[task], task))
            return task
        placed = self.pieces([size], [load], False)
        return placed[0] if placed else None

    def pieces(self, sizes: Sequence[int], loads: Sequence[float], apart: bool) -> list[int] | None:
        """The tasks that take a variable's pieces, all different ones if they are to keep apart."""
        placed: list[int] = []
        for size in sizes:
            task = self._pop(size)
            if task is None:
                return None
            placed.append(task)
            self._held[task] += size
            if not apart:
                self._push(task)
        for task in placed if apart else ():
            self._push(task)
        return placed

    def _push(self, task: int) -> None:
        heappush(self._heap, (self._held[task] - self._zero[task], task))

    def _pop(self, size: int) -> int | None:
        while self._waiting and -self._waiting[0][0] >= size:
            self._push(heappop(self._waiting)[1])
        while self._heap:
            _, task = heappop(self._heap)
            if self._held[task] + size <= self._caps[task]:
                return task
            heappush(self._waiting, (self._held[task] - self._caps[task], task))
        return None


class ByBytesAndLoad:
    """The task that has least of what the piece brings, among those that have room.

    Args:
        tasks: what they hold, and their budgets.
        mean_bytes, mean_load: of a task when all is placed: the units of the comparison.
    """

    def __init__(self, tasks: Tasks, mean_bytes: float, mean_load: float) -> None:
        self._units = (1 / mean_bytes if mean_bytes else 0.0, 1 / mean_load)
        self._held = np.array([tasks.filled, tasks.loaded], float)
        self._held *= np.array(self._units)[:, None]
        self._filled = list(tasks.filled)
        self._caps = tasks.budgets
        # Made once: 100,000 variables are as many inner products.
        self._piece = np.zeros(2)
        self._cost = np.zeros(tasks.count)

    def whole(self, size: int, load: float) -> int | None:
        """The task that takes a variable as a whole; None if none has room."""
        task = self._best(size, load, [])
        if task is not None:
            self._put(task, size, load)
        return task

    def pieces(self, sizes: Sequence[int], loads: Sequence[float], apart: bool) -> list[int] | None:
        """The tasks that take a variable's pieces, all different ones if they are to keep apart."""
        placed: list[int] = []
        for size, load in zip(sizes, loads, strict=True):
            task = self._best(size, load, placed if apart else [])
            if task is None:
                return None
            placed.append(task)
            self._put(task, size, load)
        return placed

    def _put(self, task: int, size: int, load: float) -> None:
        self._filled[task] += size
        self._held[0, task] += size * self._units[0]
        self._held[1, task] += load * self._units[1]

    def _best(self, size: int, load: float, taken: list[int]) -> int | None:
        cost = self._cost
        self._piece[0] = size * self._units[0]
        self._piece[1] = load * self._units[1]
        np.dot(self._piece, self._held, out=cost)
        if taken:
            cost[taken] = math.inf
        task = int(cost.argmin())
        if self._caps is not None and self._filled[task] + size > self._caps[task]:
            cost[np.subtract(self._caps, self._filled) < size] = math.inf
            task = int(cost.argmin())
        return None if cost[task] == math.inf else task
