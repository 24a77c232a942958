"""Placer: the task of each variable at the moment of its creation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planner import balanced
from tfdist_ext.placement.planning import accepted, plan, policy_named
from tfdist_ext.placement.policies import Policy, Tasks, greedy
from tfdist_ext.placement.rules import Balanced, Rule, Sharded, checked_rules, rule_for
from tfdist_ext.placement.specs import VariableShard, VariableSpec
from tfdist_ext.placement.targets import Targets

__all__ = ["Placer"]


class Placer:
    """Places variables on parameter servers, one by one, and remembers how full each is.

    A model that is known before it is created is planned as a whole: see `learn`. What comes one
    by one is placed by its rule, or by the policy; where that is the planner, which must see a
    whole model, on the server with the fewest bytes.

    Attributes:
        plan: the given one, or that of the last model that was planned as a whole; None before.
        plans_models: whether models are to be planned as a whole.
        bytes_by_task: bytes that are on each server.
    """

    def __init__(self, placement: Any, tasks: int, policy: Policy | None = None):
        """
        Args:
            placement: a PlacementPlan, or the path of one as JSON; rules, or a table of pattern ->
                placement; a policy or the name of one; None for the fewest bytes.
            tasks: number of parameter servers.
            policy: for what rules, if they are the placement, leave to it.

        Raises:
            PlacementError: none of these, or one that cannot be right for these servers.
        """
        self._targets = Targets.of(tasks, None)
        self._given: PlacementPlan | None = None
        self._rules: tuple[Rule, ...] = ()
        self._policy, self._policy_name = policy_named(greedy if policy is None else policy)
        self._policy_of_models = policy  # none is the planner
        self.plans_models = placement is not None
        self.plan: PlacementPlan | None = None
        self.bytes_by_task = [0] * tasks
        self._filled_by_rules = [0] * tasks
        self._free: list[VariableSpec] = []
        self._free_pieces: dict[str, int] = {}
        if isinstance(placement, str) and placement.endswith(".json"):
            placement = _read(placement)
        if isinstance(placement, PlacementPlan):
            placement.check_tasks(tasks)
            self._given = self.plan = placement
        elif isinstance(placement, str) or callable(placement):
            self._policy, self._policy_name = policy_named(placement)
            self._policy_of_models = self._policy
        elif isinstance(placement, Rule | Iterable):
            self._rules = checked_rules([placement] if isinstance(placement, Rule) else placement)
        elif placement is not None:
            raise PlacementError(
                "placement must be a PlacementPlan, rules, a table of pattern -> placement, or a"
                f" policy, got {shown(placement)}."
            )
        for rule in self._rules:
            # As of a variable with rows enough: the shapes are not known yet.
            self._targets.of_rule(VariableSpec(rule.pattern, (2**40,), "bool"), rule.placement)

    def learn(self, specs: Sequence[VariableSpec]) -> PlacementPlan:
        """Plan a model that is about to be created; its variables then go where the plan says.

        Raises:
            PlacementError: the given plan is for another model, or the rules do not fit this one.
        """
        if self._given is not None:
            self._given.check(specs)
            return self._given
        self.plan = plan(
            specs, self._targets.count, rules=self._rules, policy=self._policy_of_models
        )
        return self.plan

    def knows(self, spec: VariableSpec) -> bool:
        """Whether there is a plan, or none is needed, for the variable."""
        return self._given is None or self._planned(spec) is not None

    def place(self, spec: VariableSpec) -> tuple[VariableShard, ...]:
        """Where the variable that is now created lives: its pieces, in the order of rows.

        Raises:
            PlacementError: its rule cannot be right for it, or the policy's answer.
        """
        shards = self._planned(spec) or self._online(spec)
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

    def _online(self, spec: VariableSpec) -> tuple[VariableShard, ...]:
        rule = rule_for(spec.path, self._rules)
        placement = Balanced() if rule is None else rule.placement
        task = self._targets.of_rule(spec, placement)
        if task is not None:
            self._filled_by_rules[task] += spec.bytes
            return spec.shards((task,))
        pieces = {}
        if isinstance(placement, Sharded):
            pieces[spec.path] = placement.pieces_on(self._targets.count, spec.rows)
        if self._policy in (greedy, balanced):
            filled, specs = tuple(self.bytes_by_task), [spec]
        else:  # it may count what came before
            filled = tuple(self._filled_by_rules)
            pieces = self._free_pieces = {**self._free_pieces, **pieces}
            specs = self._free = [*self._free, spec]
        tasks = Tasks(self._targets.count, filled, (0.0,) * self._targets.count, None, pieces)
        policy = greedy if self._policy is balanced else self._policy
        return spec.shards(accepted(policy(specs, tasks), specs, tasks, self._policy_name)[-1])


def _read(path: str) -> PlacementPlan:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlacementError(f"the plan {path!r} cannot be read: {error}") from error
    return PlacementPlan.from_json(text)
