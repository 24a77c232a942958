"""From variables, tasks and rules to a plan: what rules say first, the policy for the rest."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import nearest, shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planner import balanced
from tfdist_ext.placement.policies import Policy, Tasks, greedy, round_robin
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    OnTask,
    Owned,
    Placement,
    Rule,
    Rules,
    Sharded,
    rules_of,
)
from tfdist_ext.placement.sizes import size_text
from tfdist_ext.placement.specs import Held, Place, VariableSpec
from tfdist_ext.placement.targets import Targets
from tfdist_ext.user_frames import filter_traceback

__all__ = ["accepted", "plan", "policy_named"]

_POLICIES: dict[str, Policy] = {
    "balanced": balanced,
    "greedy": greedy,
    "round_robin": round_robin,
}
_FREE = Balanced()
_MOST_TASKS = 4096  # that an error looks for


@filter_traceback
def plan(
    specs: Iterable[VariableSpec],
    tasks: int | None = None,
    *,
    devices: Sequence[str] | None = None,
    rules: Rules = (),
    budget: int | str | Sequence[int | str] | None = None,
    policy: Policy | str | None = None,
    default: Placement | Callable[[VariableSpec], Placement] = _FREE,
) -> PlacementPlan:
    """Decide where every variable lives. Pure: nothing is allocated, no TensorFlow is needed.

    Args:
        specs: the variables, in the order in which the model creates them.
        tasks: number of parameter servers; or
        devices: names of the devices of one machine, as ["CPU:0", "GPU:0"]. There a variable is cut
            only where a rule says so.
        rules: for some variables; or a table of pattern -> placement or its text.
        budget: the most that each task may hold, in bytes or as "8GiB"; or one for each task.
        policy: places what no rule does: "balanced" (the default), "greedy", "round_robin", or a
            function as `placement.policies` describes it.
        default: the placement of variables without a rule, or a function from a variable to it.

    Raises:
        PlacementError: an argument, a rule or a policy that cannot be right; or variables that do
            not fit, with the smallest budget and the smallest number of tasks that would do.
    """
    variables = _checked(specs)
    targets = Targets.of(tasks, devices)
    budgets = targets.budgets(budget)
    chosen = rules_of([spec.path for spec in variables], rules)
    placements = [
        chosen[spec.path].placement if spec.path in chosen else _default(default, spec)
        for spec in variables
    ]
    fixed = {path: rule for path, rule in chosen.items() if rule.placement != _FREE}
    order = _Order(variables, placements, fixed, *policy_named(policy))
    made = order.carried_out(targets, budgets)
    if budgets is not None and any(
        held > most for held, most in zip(made.bytes_by_task, budgets, strict=True)
    ):
        raise _over_budget_error(order, targets, made)
    return made


@dataclass(frozen=True)
class _Order:
    """The variables to be placed, and how.

    Attributes:
        specs: the variables.
        placements: of each of them.
        fixed: path -> the rule that decides it.
        policy: places what no rule does.
        name: of the policy.
    """

    specs: tuple[VariableSpec, ...]
    placements: list[Placement]
    fixed: dict[str, Rule]
    policy: Policy
    name: str

    def carried_out(self, targets: Targets, budgets: tuple[int, ...] | None) -> PlacementPlan:
        """The plan, whether or not it keeps to the budgets."""
        places, holding, bare, tasks = self._prepared(targets, budgets)
        parts = [(holding, tasks)]
        if bare:  # it is work that is balanced here, which no budget limits
            parts.append((bare, replace(tasks, budgets=None)))
        for indices, room in parts:
            specs = self._to_place(indices)
            placed = accepted(self.policy(specs, room), specs, room, self.name)
            for index, where in zip(indices, placed, strict=True):
                owned = isinstance(self.placements[index], Owned)
                places[index] = Place(where, Held.OWNED if owned else Held.PIECES)
        return PlacementPlan(
            specs=self.specs,
            places=tuple(places),
            tasks=targets.count,
            devices=targets.devices,
            budgets=budgets,
            fixed=self.fixed,
            policy=self.name,
        )

    def fullest(self, targets: Targets) -> int:
        """Bytes on the fullest of the targets in a plan without budgets."""
        return max(self.carried_out(targets, None).bytes_by_task)

    @property
    def fewest_tasks(self) -> int:
        """Tasks that there must be because rules name them."""
        return 1 + max((p.task for p in self.placements if isinstance(p, OnTask)), default=0)

    def _prepared(
        self, targets: Targets, budgets: tuple[int, ...] | None
    ) -> tuple[list[Place], list[int], list[int], Tasks]:
        """The places by rules, the indices of the rest, and the tasks as the policy finds them.

        Left are what adds bytes where it goes, and the owned without slots, which add none.
        """
        filled, loaded = [0] * targets.count, [0.0] * targets.count
        on_all, load_of_copies = 0, 0.0
        places = [Place(())] * len(self.specs)
        holding: list[int] = []
        bare: list[int] = []
        pieces: dict[str, int] = {}
        for index, (spec, placement) in enumerate(zip(self.specs, self.placements, strict=True)):
            task = None if placement is _FREE else targets.of_rule(spec, placement)
            if task is not None:
                places[index] = Place((task,))
                filled[task] += spec.bytes
                loaded[task] += spec.load or 0.0
                continue
            if isinstance(placement, Mirrored):
                places[index] = Place(tuple(range(targets.count)), Held.COPIES)
                on_all += spec.bytes
                load_of_copies += spec.load or 0.0
                continue
            if isinstance(placement, Owned):
                on_all += spec.weight_bytes
                load_of_copies += spec.load or 0.0
            adds_none = isinstance(placement, Owned) and spec.bytes == spec.weight_bytes
            (bare if adds_none else holding).append(index)
            if isinstance(placement, Sharded):
                pieces[spec.path] = placement.pieces_on(targets.count, spec.rows)
            elif targets.devices is not None:
                pieces[spec.path] = 1  # nothing is gained by cutting on one machine
        filled = [held + on_all for held in filled]
        loaded = [load + load_of_copies / targets.count for load in loaded]
        tasks = Tasks(targets.count, tuple(filled), tuple(loaded), budgets, pieces)
        return places, holding, bare, tasks

    def _to_place(self, indices: list[int]) -> list[VariableSpec]:
        """Of an owned variable every device holds a copy: what is left for the owner is the slots.

        One without slots counts as one slot: the gradient and the update are the owner's work.
        """
        found = ((self.specs[index], self.placements[index]) for index in indices)
        return [_slots_alone(spec) if isinstance(at, Owned) else spec for spec, at in found]


def _slots_alone(spec: VariableSpec) -> VariableSpec:
    if not spec.slots and spec.slot_bytes:  # of other shapes only
        return replace(spec, shape=(0,), load=None)
    return replace(spec, slots=max(spec.slots - 1, 0), load=None)


def _over_budget_error(order: _Order, targets: Targets, made: PlacementPlan) -> PlacementError:
    """The error for a plan that is over its budgets: what would do, found by planning again."""
    budgets = made.budgets or ()
    over = [
        f"{name} would hold {size_text(held)} of {size_text(most)}"
        for name, held, most in zip(made.names(), made.bytes_by_task, budgets, strict=True)
        if held > most
    ]
    needed = order.fullest(targets)
    message = (
        f"the variables and their slots ({size_text(sum(made.bytes_by_task))}) do not fit:"
        f" {'; '.join(over[:3])}{f'; and {len(over) - 3} more' * (len(over) > 3)}."
        f" For {made.tasks} {targets.what} the smallest budget is {needed} bytes"
        f" ({size_text(needed)}) each."
    )
    enough = None
    if made.devices is not None:
        message += " Or use rules that put less on a device, or an optimizer with fewer slots."
    else:
        budget = max(budgets)
        enough = _enough_tasks(order, budget, -(-sum(made.bytes_by_task) // max(budget, 1)))
        number = f"no number of up to {_MOST_TASKS:,}" if enough is None else str(enough)
        message += f" With {size_text(budget)} each, {number} ps tasks would do."
    error = PlacementError(message)
    error.smallest_budget, error.smallest_tasks = needed, enough
    return error


def _enough_tasks(order: _Order, budget: int, least: int) -> int | None:
    """A number of tasks that is enough while one less is not; None if none is.

    Args:
        least: fewer are not enough.
    """

    def enough(tasks: int) -> bool:
        return order.fullest(Targets(tasks)) <= budget

    low = high = max(least, order.fewest_tasks)
    while high <= _MOST_TASKS and not enough(high):
        low, high = high + 1, 2 * high
    return low + bisect_left(range(low, high), True, key=enough) if high <= _MOST_TASKS else None


def _checked(specs: Iterable[VariableSpec]) -> tuple[VariableSpec, ...]:
    variables = tuple(specs)
    for spec in variables:
        if not isinstance(spec, VariableSpec):
            raise PlacementError(f"specs must be VariableSpec, got {shown(spec)} among them.")
    paths = Counter(spec.path for spec in variables)
    if len(paths) < len(variables):
        path = paths.most_common(1)[0][0]
        raise PlacementError(
            f"each variable must have a path of its own, got {path!r} twice. Rules and plans name"
            " variables by their path: give layers different names."
        )
    return variables


def _default(
    default: Placement | Callable[[VariableSpec], Placement], spec: VariableSpec
) -> Placement:
    placement = default if isinstance(default, Placement) else default(spec)
    if not isinstance(placement, Placement):
        raise PlacementError(
            f"default must be or return a Placement, got {shown(placement)} for {spec.path!r}; give"
            " one, for example Mirrored(), or a function from a VariableSpec to one."
        )
    return placement


def policy_named(policy: Policy | str | None) -> tuple[Policy, str]:
    """The policy of a name, or of none, or a policy itself; and its name.

    Raises:
        PlacementError: neither a known name nor a function.
    """
    if policy is None or policy is balanced:
        return balanced, "balanced"
    if isinstance(policy, str) and policy in _POLICIES:
        return _POLICIES[policy], policy
    if isinstance(policy, str) or not callable(policy):
        raise PlacementError(
            f"policy must be a known name or a function, got {shown(policy)}."
            f" {nearest(policy, _POLICIES)}"
        )
    return policy, getattr(policy, "__name__", type(policy).__name__)


def accepted(
    placed: Sequence[Sequence[int]], specs: Sequence[VariableSpec], tasks: Tasks, policy: str
) -> list[tuple[int, ...]]:
    """The policy's answer as tuples.

    Raises:
        PlacementError: it leaves out a variable, names a task that is not there, cuts a variable
            into more pieces than rows, or not into as many as a rule asks for.
    """
    try:
        answer = [tuple(map(operator.index, where)) for where in placed]
    except TypeError as error:
        raise PlacementError(
            f"the policy {policy} must return a list with the tasks of each variable, as [[0], [1],"
            f" [0, 1]], got {shown(placed)}: {error}."
        ) from None
    if len(answer) != len(specs):
        raise PlacementError(
            f"the policy {policy} must place all {len(specs)} variables, got the tasks of"
            f" {len(answer)}. It returns the tasks of each, in the same order."
        )
    for spec, where in zip(specs, answer, strict=True):
        if len(where) == 1 and 0 <= where[0] < tasks.count and not tasks.pieces:
            continue  # what most are, so that 100,000 are checked at once
        for task in where:
            if not 0 <= task < tasks.count:
                raise PlacementError(
                    f"the policy {policy} must name tasks from 0 to {tasks.count - 1}, got {task}"
                    f" for {spec.path!r}."
                )
        if not 1 <= len(where) <= max(spec.rows, 1):
            raise PlacementError(
                f"the policy {policy} must cut {spec.path!r} of shape {spec.shape} into at most"
                f" {spec.rows} pieces, got {len(where)}."
            )
        if len(where) != tasks.pieces.get(spec.path, len(where)):
            raise PlacementError(
                f"the policy {policy} must cut {spec.path!r} into {tasks.pieces[spec.path]} pieces,"
                f" as a rule or a plan for devices asks, got {len(where)}; see Tasks.pieces."
            )
    return answer
