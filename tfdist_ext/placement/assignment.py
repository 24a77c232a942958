"""Assignment: which task holds which rows of each variable, and the sums over tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tfdist_ext.errors import PlacementError
from tfdist_ext.placement.rules import Rule, nearest_paths
from tfdist_ext.placement.specs import Held, Place, VariableShard, VariableSpec
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Assignment"]

_NAMED = 5  # differences of each kind that an error names


@filter_traceback
@dataclass(frozen=True, repr=False)
class Assignment:
    """Where every variable lives.

    A path that the plan does not have is a PlacementError.

    Attributes:
        specs: the variables, in the order in which they were given.
        places: where each of them is.
        tasks: number of parameter servers, or of devices.
        devices: names of the devices, if it is a plan for one machine.
        budgets: bytes that each task may hold at most, if there was a budget.
        fixed: path -> the rule that decided its place or its number of pieces.
    """

    specs: tuple[VariableSpec, ...]
    places: tuple[Place, ...]
    tasks: int
    devices: tuple[str, ...] | None
    budgets: tuple[int, ...] | None
    fixed: dict[str, Rule]

    def tasks_of(self, path: str) -> tuple[int, ...]:
        """The tasks (or devices) that hold the variable or a part of it, first rows first."""
        return tuple(dict.fromkeys(shard.task for shard in self.shards_of(path)))

    def shards_of(self, path: str) -> tuple[VariableShard, ...]:
        """The rows of the variable on each task, in the order of rows; or all its copies.

        A whole variable is one shard of all rows; a scalar has one row.
        """
        spec, place = self._of(path)
        if place.held is not Held.PIECES:
            return tuple(VariableShard(task, 0, spec.rows) for task in range(self.tasks))
        return spec.shards(place.tasks)

    def owner_of(self, path: str) -> int | None:
        """The device that updates an owned variable and holds its slots; else None."""
        _, place = self._of(path)
        return place.tasks[0] if place.held is Held.OWNED else None

    @cached_property
    def bytes_by_task(self) -> tuple[int, ...]:
        """Bytes of variables and slots on each task (or device)."""
        held = [0] * self.tasks
        for spec, place in zip(self.specs, self.places, strict=True):
            for task, size in place.bytes_of(spec, self.tasks):
                held[task] += size
        return tuple(held)

    @cached_property
    def load_by_task(self) -> tuple[float, ...]:
        """Load on each task (or device), in the unit of the variables' loads."""
        loaded = [0.0] * self.tasks
        for spec, place in zip(self.specs, self.places, strict=True):
            if not spec.load:
                continue
            if place.held is Held.PIECES:
                for task, load in zip(place.tasks, spec.piece_loads(len(place.tasks)), strict=True):
                    loaded[task] += load
            else:  # each copy serves its own replica
                for task in range(self.tasks):
                    loaded[task] += spec.load / self.tasks
        return tuple(loaded)

    @property
    def imbalance(self) -> float:
        """Bytes on the fullest task over the mean; 1.0 is even."""
        return _max_over_mean(self.bytes_by_task)

    @property
    def load_imbalance(self) -> float:
        """Load on the busiest task over the mean; 1.0 is even, or no loads were given."""
        return _max_over_mean(self.load_by_task)

    def names(self) -> tuple[str, ...]:
        """The names of the tasks: "ps 0", or those of the devices."""
        return self.devices or tuple(f"ps {task}" for task in range(self.tasks))

    def holds(self, spec: VariableSpec) -> bool:
        """Whether the plan has this variable, of this shape and dtype."""
        index = self._index.get(spec.path)
        return index is not None and _kind(self.specs[index]) == _kind(spec)

    def check(self, specs: Iterable[VariableSpec]) -> None:
        """Check that this is a plan for these variables, in any order.

        Raises:
            PlacementError: names the variables that are new, gone or of another shape or dtype.
        """
        now = {spec.path: _kind(spec) for spec in specs}
        then = {spec.path: _kind(spec) for spec in self.specs}
        new = [repr(path) for path in now if path not in then]
        gone = [repr(path) for path in then if path not in now]
        changed = [
            f"{path!r} from {then[path]} to {kind}"
            for path, kind in now.items()
            if then.get(path, kind) != kind
        ]
        differences = [
            f"{len(found)} {what}: {', '.join(found[:_NAMED])}{', ...' * (len(found) > _NAMED)}"
            for what, found in (("new", new), ("gone", gone), ("changed", changed))
            if found
        ]
        if differences:
            raise PlacementError(
                "the variables of the model must be those of the plan, got"
                f" {'; '.join(differences)}. Plan again."
            )

    def check_tasks(self, tasks: int) -> None:
        """Check that this is a plan for so many parameter servers.

        Raises:
            PlacementError: it is for another number, or for the devices of one machine.
        """
        if self.devices is not None or self.tasks != tasks:
            devices = f"the devices {', '.join(self.devices)}" if self.devices else self.tasks
            raise PlacementError(
                f"the plan must be for the cluster's {tasks} ps tasks, got one for {devices}."
                " Plan again."
            )

    def index_of(self, path: str) -> int:
        """The variable's index in `specs` and `places`."""
        index = self._index.get(path)
        if index is None:
            raise PlacementError(
                f"the plan has no variable {path!r}. {nearest_paths(path, list(self._index))}"
            )
        return index

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spec.path: index for index, spec in enumerate(self.specs)}

    def _of(self, path: str) -> tuple[VariableSpec, Place]:
        index = self.index_of(path)
        return self.specs[index], self.places[index]


def _kind(spec: VariableSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _max_over_mean(sizes: Sequence[float]) -> float:
    total = sum(sizes)
    return max(sizes) * len(sizes) / total if total else 1.0
