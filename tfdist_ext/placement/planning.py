"""From variables, targets and rules to a plan: rules decide first, the planner places the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planner import Planner
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    Owned,
    Placement,
    Rules,
    Sharded,
    rules_of,
)
from tfdist_ext.placement.sizes import parse_size, size_text
from tfdist_ext.placement.specs import Held, Place, VariableSpec
from tfdist_ext.placement.targets import Targets
from tfdist_ext.user_frames import filter_traceback

__all__ = ["plan"]


@filter_traceback
def plan(
    specs: Iterable[VariableSpec],
    tasks: int | None = None,
    *,
    devices: Sequence[str] | None = None,
    rules: Rules = (),
    budget: int | str | None = None,
    default: Callable[[VariableSpec], Placement] = lambda _: Balanced(),
) -> PlacementPlan:
    """Decide where every variable lives. Nothing is allocated, and no TensorFlow is needed.

    Args:
        specs: the variables, in the order in which the model creates them.
        tasks: number of parameter servers; or
        devices: names of the devices of one machine, as ["CPU:0", "GPU:0"]. A variable is cut there
            only if a rule says so.
        rules: rules for some variables; or a table of pattern -> placement or its text.
        budget: the most that each task may hold, in bytes or as "8GiB".
        default: returns the placement of a variable without a rule.

    Raises:
        PlacementError: an invalid argument or rule; or variables that do not fit, with the smallest
            budget that is enough.
    """
    variables = _checked(specs)
    targets = Targets.of(tasks, devices)
    most = None if budget is None else parse_size(budget)
    chosen = rules_of([spec.path for spec in variables], rules)
    placements = [
        chosen[spec.path].placement if spec.path in chosen else default(spec) for spec in variables
    ]
    made = _planned(variables, placements, targets, most)
    if most is not None and max(made.bytes_by_task) > most:
        raise _over_budget_error(made, most)
    return made


def _planned(
    specs: tuple[VariableSpec, ...],
    placements: list[Placement],
    targets: Targets,
    budget: int | None,
) -> PlacementPlan:
    """The plan, whether or not it keeps to the budget."""
    count = targets.count
    filled, loaded = [0] * count, [0.0] * count
    bytes_everywhere, load_everywhere = 0, 0.0
    places: dict[int, Place] = {}
    free: dict[int, VariableSpec] = {}
    pieces: dict[str, int] = {}
    for index, (spec, placement) in enumerate(zip(specs, placements, strict=True)):
        load = spec.load or 0.0
        task = targets.index_of(spec, placement)
        if task is not None:
            places[index] = Place((task,))
            filled[task] += spec.bytes
            loaded[task] += load
        elif isinstance(placement, Mirrored):
            places[index] = Place(tuple(range(count)), Held.COPIES)
            bytes_everywhere += spec.bytes
            load_everywhere += load / count
        elif isinstance(placement, Owned):
            # Beyond the copy that every device holds, the owner has the slots. A variable without
            # slots counts as one slot: the owner computes its update.
            free[index] = replace(spec, slots=max(spec.slots - 1, 0), load=None)
            bytes_everywhere += spec.weight_bytes
            load_everywhere += load / count
            pieces[spec.path] = 1
        else:
            free[index] = spec
            if isinstance(placement, Sharded):
                pieces[spec.path] = placement.pieces_on(count, spec.rows)
            elif targets.devices is not None:
                pieces[spec.path] = 1  # nothing is gained by cutting on one machine
    filled = [held + bytes_everywhere for held in filled]
    loaded = [load + load_everywhere for load in loaded]
    where = Planner([*free.values()], filled, loaded, pieces).place_all()
    for index, of_pieces in zip(free, where, strict=True):
        owned = isinstance(placements[index], Owned)
        places[index] = Place(tuple(of_pieces), Held.OWNED if owned else Held.PIECES)
    in_order = tuple(places[index] for index in range(len(specs)))
    return PlacementPlan(specs, in_order, count, targets.devices, budget)


def _over_budget_error(made: PlacementPlan, budget: int) -> PlacementError:
    """The error for a plan over its budget. It names a budget that is enough."""
    over = [
        f"{name} would hold {size_text(held)}"
        for name, held in zip(made.names(), made.bytes_by_task, strict=True)
        if held > budget
    ]
    total, needed = sum(made.bytes_by_task), max(made.bytes_by_task)
    if made.devices is not None:
        advice = "Or use rules that put less on a device, or an optimizer with fewer slots."
    else:
        advice = f"With this budget, at least {-(-total // max(budget, 1))} ps tasks are needed."
    return PlacementError(
        f"the variables and their slots ({size_text(total)}) do not fit into {size_text(budget)}"
        f" each: {'; '.join(over[:3])}{f'; and {len(over) - 3} more' * (len(over) > 3)}. The"
        f" smallest budget that fits is {needed} bytes ({size_text(needed)}). {advice}"
    )


def _checked(specs: Iterable[VariableSpec]) -> tuple[VariableSpec, ...]:
    variables = tuple(specs)
    for spec in variables:
        if not isinstance(spec, VariableSpec):
            raise PlacementError(f"specs must be VariableSpec, got {shown(spec)} among them.")
    paths = Counter(spec.path for spec in variables)
    if len(paths) < len(variables):
        path = paths.most_common(1)[0][0]
        raise PlacementError(
            f"two variables have the path {path!r}. Rules and plans name variables by their path:"
            " give layers different names."
        )
    return variables
