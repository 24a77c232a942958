"""Placer: the task of each variable at the moment of its creation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planning import plan
from tfdist_ext.placement.rules import (
    Balanced,
    Placement,
    Rule,
    Sharded,
    checked_rules,
    rule_for,
)
from tfdist_ext.placement.specs import VariableShard, VariableSpec
from tfdist_ext.placement.targets import Targets

__all__ = ["Placer"]


class Placer:
    """Places variables on parameter servers, one by one, and counts the bytes on each server.

    A model that is known before it is created is planned as a whole: see `learn`. A variable that
    is not planned is placed by its rule, or on the server with the fewest bytes.

    Attributes:
        plan: the given one, or that of the last model that was planned as a whole; None before.
        plans_models: whether models are to be planned as a whole.
        bytes_by_task: bytes that are on each server.
    """

    def __init__(
        self,
        placement: Any,
        tasks: int,
        default: Callable[[VariableSpec], Placement] = lambda _: Balanced(),
    ):
        """
        Args:
            placement: a PlacementPlan, or the path of one as JSON; rules, or a table of pattern ->
                placement; "balanced": the planner without rules; None: the fewest bytes.
            tasks: number of parameter servers.
            default: the placement of variables without a rule.

        Raises:
            PlacementError: an invalid placement, or one that is not for these servers.
        """
        self._targets = Targets.of(tasks, None)
        self._given: PlacementPlan | None = None
        self._rules: tuple[Rule, ...] = ()
        self._default = default
        self.plans_models = placement is not None
        self.plan: PlacementPlan | None = None
        self.bytes_by_task = [0] * tasks
        if isinstance(placement, str) and placement.endswith(".json"):
            placement = _read(placement)
        if isinstance(placement, PlacementPlan):
            placement.check_tasks(tasks)
            self._given = self.plan = placement
        elif isinstance(placement, Rule | Iterable) and not isinstance(placement, str):
            self._rules = checked_rules([placement] if isinstance(placement, Rule) else placement)
        elif placement not in (None, "balanced"):
            raise PlacementError(
                "placement must be a PlacementPlan or its .json file, rules, a table of pattern ->"
                f' placement, or "balanced", got {shown(placement)}.'
            )
        for rule in self._rules:
            # As of a variable with rows enough: the shapes are not known yet.
            self._targets.index_of(VariableSpec(rule.pattern, (2**40,), "bool"), rule.placement)

    def learn(self, specs: Sequence[VariableSpec]) -> PlacementPlan:
        """Plan a model that is about to be created; its variables then go where the plan says.

        Raises:
            PlacementError: the given plan is for another model, or the rules do not fit this one.
        """
        if self._given is not None:
            self._given.check(specs)
            return self._given
        self.plan = plan(specs, self._targets.count, rules=self._rules, default=self._default)
        return self.plan

    def knows(self, spec: VariableSpec) -> bool:
        """Whether there is a plan, or none is needed, for the variable."""
        return self._given is None or self._planned(spec) is not None

    def place(self, spec: VariableSpec) -> tuple[VariableShard, ...]:
        """The pieces of a variable that is now created, in the order of rows.

        Raises:
            PlacementError: its rule does not fit the variable.
        """
        shards = self._planned(spec) or self._unplanned(spec)
        for shard, size in zip(shards, spec.piece_bytes(len(shards)), strict=True):
            self.add(shard.task, size)
        return shards

    def add(self, task: int, size: int) -> None:
        """Count bytes that were put on a task by other means."""
        if 0 <= task < len(self.bytes_by_task):
            self.bytes_by_task[task] += size

    @property
    def fewest_bytes(self) -> int:
        """The task that holds the fewest bytes."""
        return self.bytes_by_task.index(min(self.bytes_by_task))

    def _planned(self, spec: VariableSpec) -> tuple[VariableShard, ...] | None:
        if self.plan is None:
            return None
        if self.plan.holds(spec):
            return self.plan.shards_of(spec.path)
        # Of a variable with a given value, as an optimizer's counter, only the last part of the
        # path is known when it is created.
        paths = [other.path for other in self.plan.specs if other.path.endswith(f"/{spec.path}")]
        alike = [path for path in paths if self.plan.holds(replace(spec, path=path))]
        return self.plan.shards_of(alike[0]) if len(alike) == 1 else None

    def _unplanned(self, spec: VariableSpec) -> tuple[VariableShard, ...]:
        rule = rule_for(spec.path, self._rules)
        placement = self._default(spec) if rule is None else rule.placement
        task = self._targets.index_of(spec, placement)
        if task is not None:
            return spec.shards((task,))
        count = self._targets.count
        pieces = placement.pieces_on(count, spec.rows) if isinstance(placement, Sharded) else 1
        held, tasks = list(self.bytes_by_task), []
        for size in spec.piece_bytes(pieces):
            tasks.append(held.index(min(held)))
            held[tasks[-1]] += size
        return spec.shards(tasks)


def _read(path: str) -> PlacementPlan:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlacementError(f"the plan {path!r} cannot be read: {error}") from error
    return PlacementPlan.from_json(text)
