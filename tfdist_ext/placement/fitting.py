"""When variables do not fit: what would do, found by planning again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from tfdist_ext.errors import PlacementError
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.rules import OnTask, Sharded
from tfdist_ext.placement.sizes import size_text
from tfdist_ext.placement.targets import Targets

__all__ = ["infeasible_error"]

_MOST_TASKS = 100_000


def infeasible_error(
    plan: PlacementPlan, targets: Targets, fullest: Callable[[Targets, int], int], fewest: int
) -> PlacementError:
    """The error to raise for a plan that is over its budgets.

    Args:
        plan: the plan, over budget.
        targets: what it is for.
        fullest: (targets, enough) -> bytes on the fullest of them at the policy's best.
        fewest: tasks there must be because rules name them.
    """
    budgets = plan.budgets or ()
    over = [
        f"{name} would hold {size_text(held)} of {size_text(most)}"
        for name, held, most in zip(plan.names(), plan.bytes_by_task, budgets, strict=True)
        if held > most
    ]
    needed = fullest(targets, 0)
    message = (
        f"the variables and their slots ({size_text(sum(plan.bytes_by_task))}) do not fit:"
        f" {'; '.join(over[:3])}{f'; and {len(over) - 3} more' * (len(over) > 3)}."
        f" For {plan.tasks} {targets.what} the smallest budget is {needed} bytes"
        f" ({size_text(needed)}) each."
    )
    enough = None
    if plan.devices is not None:
        message += " Or use rules that put less on a device, or an optimizer with fewer slots."
    else:
        budget = max(budgets)
        why = _why(plan, budget)
        if not why:
            # Fewer than these cannot do: rules name them, or the bytes alone are too many.
            fewest = max(fewest, -(-sum(plan.bytes_by_task) // budget))
            enough = _fewest_that_do(lambda n: fullest(Targets(n), budget) <= budget, fewest)
        number = (
            f"no number of ps tasks would do{why}"
            if enough is None
            else f"{enough} ps tasks would do"
        )
        message += f" With {size_text(budget)} each, {number}."
    error = PlacementError(message)
    error.smallest_budget, error.smallest_tasks = needed, enough
    return error


def _fewest_that_do(does: Callable[[int], bool], fewest: int) -> int | None:
    """The smallest number of tasks that does while one less does not; None if none does."""
    low = high = fewest
    while not does(high):
        if high >= _MOST_TASKS:
            return None
        low, high = high + 1, min(2 * high - fewest + 1, _MOST_TASKS)
    return low + bisect_left(range(low, high), True, key=does)


def _why(plan: PlacementPlan, budget: int) -> str:
    """Why no number of tasks does, if that is plain: too much in one place."""
    fixed = [0] * plan.tasks
    for spec in plan.specs:
        rule = plan.fixed.get(spec.path)
        asked = rule.placement if rule else None
        if isinstance(asked, OnTask):
            fixed[asked.task] += spec.bytes
            continue
        given = asked.pieces if isinstance(asked, Sharded) else None
        pieces = given or max(spec.rows, 1)
        largest = spec.largest_piece(pieces)
        if largest > budget:
            why = f"by the rule {rule.pattern!r}" if rule else "and cannot be cut further"
            return (
                f": a piece of {spec.path!r} of shape {spec.shape} has {size_text(largest)} {why}"
            )
    for task, held in enumerate(fixed):
        if held > budget:
            return f": rules put {size_text(held)} on task {task}"
    return ""
