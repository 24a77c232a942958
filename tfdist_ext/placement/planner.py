"""The planner: variables cut and placed so that the fullest task holds hardly more than the mean.

Coarse first: what is larger than a fair share is cut into fair shares, and the pieces are placed
largest first. While that does not balance, they are cut finer. A piece costs a message in every
step, so of the first division that balances only as many variables are cut finely as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tfdist_ext.placement.bounds import min_max_bytes_bound, min_max_load_bound, water_level
from tfdist_ext.placement.filling import ByBytes, ByBytesAndLoad
from tfdist_ext.placement.policies import Tasks
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.user_frames import filter_traceback

__all__ = ["balanced", "min_max_bytes"]

# Over what no placement can beat; within these it is not cut finer. Bytes are known, loads guessed.
_BALANCED_BYTES, _BALANCED_LOAD = 1.01, 1.05
_SHARES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # pieces of a fair share
# Placed over all divisions that are tried, and then to save pieces: what bounds the time.
_MOST_PIECES, _MOST_TO_SAVE = 400_000, 100_000

Counts = NDArray[np.int64]


@filter_traceback
def balanced(specs: Sequence[VariableSpec], tasks: Tasks) -> list[Sequence[int]]:
    """The planner as a policy: for each variable the tasks of its pieces.

    Where the variables do not fit in the budgets, they are placed as flat as without: `plan` sees
    that it is too much, and says so.
    """
    search = _Search(specs, tasks)
    if search.may_fit():
        placed = search.best() or search.fitting()
        if placed is not None:
            return placed
    return _Search(specs, replace(tasks, budgets=None)).flattest()[0]


def min_max_bytes(specs: Sequence[VariableSpec], tasks: Tasks, enough: int = 0) -> int:
    """Bytes on the fullest task in the flattest plan that the planner can make without budgets.

    With a budget of so many bytes for each task the planner does find a plan; with one byte less
    it finds none.

    Args:
        enough: any plan with no more than these bytes will do.
    """
    return _Search(specs, replace(tasks, budgets=None)).flattest(enough)[1]


class _Search:
    """The divisions of some variables over some tasks, from coarse to fine."""

    def __init__(self, specs: Sequence[VariableSpec], tasks: Tasks) -> None:
        self._specs = specs
        self._tasks = tasks
        self._bytes = [spec.bytes for spec in specs]
        self._loads = [spec.load or 0.0 for spec in specs]
        self._total = sum(self._bytes)
        self._total_load = sum(self._loads)
        # A floor that a plan stands on must not be above it by the last digit of a division.
        self.floor = min_max_bytes_bound(specs, tasks) * (1 - 1e-12)
        # Rules may have made the start uneven, or budgets the end.
        self._equal_budgets = len(set(tasks.budgets or ())) <= 1
        self._even = self._equal_budgets and len(set(tasks.filled)) == 1

    def may_fit(self) -> bool:
        """Whether a plan within the budgets is to be looked for."""
        budgets = self._tasks.budgets
        if budgets is None or self.floor > max(budgets):
            return budgets is None
        if not (self._equal_budgets and self._total_load):
            return True
        # What is placed by loads too may fit, or not, with a byte less: of this no smallest budget
        # could be named. So bytes alone decide.
        return min_max_bytes(self._specs, self._tasks, budgets[0]) <= budgets[0]

    def best(self) -> list[Sequence[int]] | None:
        """The first division that balances, else the most balanced; None if none fits."""
        bounds = (self.floor, min_max_load_bound(self._specs, self._tasks))
        found: list[Sequence[int]] | None = None
        coarse: Counts | None = None
        rank = (0.0, 0)
        for counts, apart in self._divisions(with_loads=True):
            coarse = counts if coarse is None else coarse
            placed = self._place(counts, apart, by_load=self._total_load > 0)
            if placed is None:
                continue
            over = self._over(placed, bounds)
            if over <= 1:
                return self._with_fewer_pieces(placed, coarse, counts, apart, bounds)
            # A hundredth of balance is worth less than fewer pieces.
            this = (round(over, 2), int(counts.sum()))
            if found is None or this < rank:
                found, rank = placed, this
        return found

    def _with_fewer_pieces(
        self,
        placed: list[Sequence[int]],
        coarse: Counts,
        fine: Counts,
        apart: bool,
        bounds: tuple[float, float],
    ) -> list[Sequence[int]]:
        """The plan of a division that balances, or one with fewer variables cut as finely.

        Fifty equal layers on four tasks need two of them cut in half, not fifty. Those that add the
        fewest pieces are cut first; how many it takes is found by halving.
        """
        more = fine - coarse
        order = np.argsort(more, kind="stable")[np.count_nonzero(more <= 0) :]
        low, high = 0, len(order)
        if high.bit_length() * int(fine.sum()) > _MOST_TO_SAVE:
            return placed
        while high - low > 1:
            middle = (low + high) // 2
            counts = coarse.copy()
            counts[order[:middle]] = fine[order[:middle]]
            mixed = self._place(counts, apart, by_load=self._total_load > 0)
            if mixed is not None and self._over(mixed, bounds) <= 1:
                placed, high = mixed, middle
            else:
                low = middle
        return placed

    def fitting(self) -> list[Sequence[int]] | None:
        """Whatever fits, by bytes alone; None if nothing does."""
        ways = [False] * (self._total_load > 0) + [True] * (not self._equal_budgets)
        for by_room in ways:  # other ways than the one of `best`
            for counts, apart in self._divisions(with_loads=False):
                placed = self._place(counts, apart, by_room=by_room)
                if placed is not None:
                    return placed
        return None

    def flattest(self, enough: int = 0) -> tuple[list[Sequence[int]], int]:
        """The plan with the fewest bytes on the fullest task, by bytes alone, and these bytes."""
        best: list[Sequence[int]] = []
        lowest: int | None = None
        for counts, apart in self._divisions(with_loads=False):
            placed = self._place(counts, apart) or []
            peak = int(self._sums(placed)[0].max())
            if lowest is None or peak < lowest:
                best, lowest = placed, peak
            if lowest <= max(enough, self.floor):
                break
        return best, lowest or max(self._tasks.filled)

    def _divisions(self, *, with_loads: bool) -> Iterator[tuple[Counts, bool]]:
        """Numbers of pieces, and whether those of a variable keep apart, from coarse to fine.

        First no variable is cut into more pieces than there are tasks, each on a task of its own.
        That is all it takes, unless the tasks start or end uneven.
        """
        tasks = self._tasks
        need = _shares(self._bytes, tasks.filled, tasks.budgets)
        if with_loads and self._total_load > 0:
            need = np.maximum(need, _shares(self._loads, tasks.loaded, None))
        rows = np.array([max(spec.rows, 1) for spec in self._specs], float)
        asked = np.array([tasks.pieces.get(spec.path, 0) for spec in self._specs], np.int64)
        placed = 0
        for apart in (True, False):
            last: Counts | None = None
            most = np.minimum(rows, tasks.count) if apart else rows
            for shares in _SHARES:
                wanted = np.clip(np.ceil(need * shares - 1e-9), 1, most)
                counts = np.where(asked > 0, asked, wanted).astype(np.int64)
                if last is not None and np.array_equal(counts, last):
                    continue
                last = counts
                if not apart and self._even and not (wanted > tasks.count).any():
                    continue  # the same was tried before
                placed += int(counts.sum())
                if placed > _MOST_PIECES and not (apart and shares == 1):
                    return
                yield counts, apart

    def _place(
        self, counts: Counts, apart: bool, *, by_load: bool = False, by_room: bool = False
    ) -> list[Sequence[int]] | None:
        """The tasks of each variable's pieces, largest pieces first; None if they do not fit."""
        tasks = self._tasks
        filling: ByBytes | ByBytesAndLoad = ByBytes(tasks, by_room=by_room)
        size = np.array(self._bytes, float) / counts
        if by_load:
            mean = (self._total + sum(tasks.filled)) / tasks.count
            mean_load = (self._total_load + sum(tasks.loaded)) / tasks.count
            filling = ByBytesAndLoad(tasks, mean, mean_load)
            load = np.array(self._loads) / counts / mean_load
            size = np.maximum(size / mean if mean else size, load)
        order = np.argsort(-size, kind="stable").tolist()
        pieces = counts.tolist()
        whole = [(task,) for task in range(tasks.count)]
        placed: list[Sequence[int]] = [()] * len(pieces)
        for variable in order:
            if pieces[variable] == 1:
                task = filling.whole(self._bytes[variable], self._loads[variable])
                if task is None:
                    return None
                placed[variable] = whole[task]
                continue
            spec = self._specs[variable]
            count = pieces[variable]
            # A rule's pieces always keep apart: whoever asks for four means four tasks.
            alone = apart if spec.path not in tasks.pieces else count <= tasks.count
            found = filling.pieces(spec.piece_bytes(count), spec.piece_loads(count), alone)
            if found is None:
                return None
            placed[variable] = self._in_order(spec, found)
        return placed

    def _in_order(self, spec: VariableSpec, found: list[int]) -> Sequence[int]:
        """Tasks of equal pieces by index; pieces that all met on one task in one."""
        if len(set(found)) == 1 and spec.path not in self._tasks.pieces:
            return found[:1]
        more = spec.rows % len(found)  # so many pieces have a row more than the others
        first = 1 if spec.slot_bytes else 0
        parts = (found[:first], found[first:more], found[max(first, more) :])
        return tuple(task for part in parts for task in sorted(part))

    def _sums(self, placed: Sequence[Sequence[int]]) -> tuple[NDArray, NDArray]:
        """Bytes and load of each task."""
        filled, loaded = list(self._tasks.filled), list(self._tasks.loaded)
        loads = self._loads
        for variable, where in enumerate(placed):
            if len(where) == 1:
                filled[where[0]] += self._bytes[variable]
                loaded[where[0]] += loads[variable]
            else:
                spec = self._specs[variable]
                for task, size in zip(where, spec.piece_bytes(len(where)), strict=True):
                    filled[task] += size
                for task, load in zip(where, spec.piece_loads(len(where)), strict=True):
                    loaded[task] += load
        return np.array(filled), np.array(loaded)

    def _over(self, placed: Sequence[Sequence[int]], bounds: tuple[float, float]) -> float:
        """The fullest task over what is balanced; the worse of bytes and load."""
        balanced = (bounds[0] * _BALANCED_BYTES, bounds[1] * _BALANCED_LOAD)
        return max(
            peak.max() / most if most else 0.0
            for peak, most in zip(self._sums(placed), balanced, strict=True)
        )


def _shares(
    sizes: Sequence[float], filled: Sequence[float], caps: Sequence[float] | None
) -> NDArray[np.float64]:
    """Each size in fair shares: what a task gets when all is spread evenly."""
    total = sum(sizes)
    if not total:
        return np.zeros(len(sizes))
    level = water_level(filled, total, caps)
    if level == float("inf"):  # it does not fit; the division matters for what the error says
        level = water_level(filled, total)
    return np.array(sizes, float) / level
