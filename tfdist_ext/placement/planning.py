"""From variables, targets and rules to a plan: rules decide first, the planner places the rest.

Every task holds about as many bytes, and as much load, as the others. `compare` plans a model for
several strategies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    Owned,
    Placement,
    Rule,
    Rules,
    Sharded,
    Targets,
    rules_of,
)
from tfdist_ext.placement.specs import (
    Held,
    Place,
    VariableSpec,
    columns,
    parse_size,
    size_text,
    worker_name,
)
from tfdist_ext.user_frames import filter_traceback

_SLACK = (1.005, 1.02)  # bytes and load of a full task over the mean. Loads are guesses.
_SMALL = 1 / 128  # of the mean task: not cut, because each piece costs a message in every step
_MOST_PIECES = 16  # for each task

Floats = NDArray[np.float64]


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
    """Plans the placement of variables. It does not allocate them and does not need TensorFlow.

    Pass either `tasks` or `devices`.

    Args:
        specs: the variables, in the order in which the model creates them.
        tasks: the number of parameter servers.
        devices: the names of the devices of one machine, such as ["CPU:0", "GPU:0"]. On devices,
            only a rule shards a variable.
        rules: a list of rules, or a dict such as {"users/.*": "sharded(4)"}.
        budget: the largest size per task, in bytes or as a string such as "8GiB".
        default: a function that returns the placement of a variable without a rule.

    Returns:
        A `PlacementPlan`.

    Raises:
        PlacementError: an argument or a rule is invalid, or the variables do not fit. The message
            contains the smallest sufficient budget.
    """
    variables = checked(specs)
    targets = Targets.of(tasks, devices)
    most = None if budget is None else parse_size(budget)
    chosen = rules_of([spec.path for spec in variables], rules)
    placements = [
        chosen[spec.path].placement if spec.path in chosen else default(spec) for spec in variables
    ]
    return within_budget(_planned(variables, placements, targets, most), chosen)


@filter_traceback
def plan_owners(
    specs: Iterable[VariableSpec],
    workers: int,
    *,
    is_cut: Callable[[VariableSpec], bool] = lambda _: True,
    budget: int | str | None = None,
) -> PlacementPlan:
    """Decide which worker owns which rows, under `shard_optimizer=True`.

    Every worker has all weights. The owner of a row holds the slots of the row and updates it. The
    plan does not depend on the number of slots.

    Args:
        specs: the variables, in the order in which the model creates them.
        workers: number of workers.
        is_cut: whether several workers may own rows of a variable.
        budget: the most that each worker may hold, in bytes or as "8GiB".

    Raises:
        PlacementError: an invalid argument, or variables that do not fit.
    """
    variables = checked(specs)
    check_int(workers, "workers", 1, error=PlacementError)
    trained = [replace(spec, slots=0, load=None) for spec in variables if spec.trainable]
    owners = plan(trained, workers, default=lambda s: Balanced() if is_cut(s) else Sharded(1))
    place_of = {
        spec.path: Place(place.tasks, Held.OWNED)
        for spec, place in zip(owners.specs, owners.places, strict=True)
    }
    copies = Place(tuple(range(workers)), Held.COPIES)
    places = tuple(place_of.get(spec.path, copies) for spec in variables)
    names = tuple(map(worker_name, range(workers)))
    most = None if budget is None else parse_size(budget)
    return within_budget(PlacementPlan(variables, places, workers, names, most))


def _planned(
    specs: tuple[VariableSpec, ...],
    placements: list[Placement],
    targets: Targets,
    budget: int | None,
) -> PlacementPlan:
    """The plan, whether or not it keeps to the budget."""
    count = targets.count
    held = np.zeros([2, count])
    places: dict[int, Place] = {}
    free: dict[int, VariableSpec] = {}
    pieces: dict[str, int] = {}
    for index, (spec, placement) in enumerate(zip(specs, placements, strict=True)):
        fixed: Place | None = None
        task = targets.index_of(spec, placement)
        if task is not None:
            fixed = places[index] = Place((task,))
        elif isinstance(placement, Mirrored):
            fixed = places[index] = Place(tuple(range(count)), Held.COPIES)
        elif isinstance(placement, Owned):
            # Every device holds a copy, and the owner the slots. A variable without slots counts as
            # one slot, because the owner computes its update.
            fixed = Place((), Held.OWNED)
            free[index] = replace(spec, slots=max(spec.slots - 1, 0), load=None)
            pieces[spec.path] = 1
        else:
            free[index] = spec
            if isinstance(placement, Sharded):
                pieces[spec.path] = placement.pieces_on(count, spec.rows)
            elif targets.devices is not None:
                pieces[spec.path] = 1  # nothing is gained by cutting on one machine
        for target, size, load in () if fixed is None else fixed.parts(spec, count):
            held[:, target] += size, load
    where = _Planner([*free.values()], held, pieces).place_all()
    for index, of_pieces in zip(free, where, strict=True):
        owned = isinstance(placements[index], Owned)
        places[index] = Place(tuple(of_pieces), Held.OWNED if owned else Held.PIECES)
    in_order = tuple(places[index] for index in range(len(specs)))
    return PlacementPlan(specs, in_order, count, targets.devices, budget)


def within_budget(made: PlacementPlan, rules: Mapping[str, Rule] | None = None) -> PlacementPlan:
    """Returns the plan.

    Args:
        rules: the rules by the path of a variable; None for a plan of owners.

    Raises:
        PlacementError: the plan is over its budget. The error names a budget that is enough.
    """
    budget = made.budget
    if budget is None or max(made.bytes_by_task) <= budget:
        return made
    over = [
        f"{name} would hold {size_text(held)}"
        for name, held in zip(made.names(), made.bytes_by_task, strict=True)
        if held > budget
    ]
    total, needed = sum(made.bytes_by_task), max(made.bytes_by_task)
    tasks = -(-total // max(budget, 1))  # if a task could be filled to the last byte
    if rules is None:
        advice = "Or use more workers, or an optimizer with fewer slots."
    elif made.devices is not None:
        advice = "Or use rules that put less on a device, or an optimizer with fewer slots."
    else:
        more = max(tasks, made.tasks + 1)
        advice = f"For {size_text(budget)} each, use at least {more} ps tasks."
    if rules and tasks <= made.tasks:
        advice = _rule_to_change(made, rules) or advice
    raise PlacementError(
        f"the variables and their slots ({size_text(total)}) do not fit into {size_text(budget)}"
        f" each: {'; '.join(over[:3])}{f'; and {len(over) - 3} more' * (len(over) > 3)}. The"
        f" smallest budget that fits is {needed} bytes ({size_text(needed)}). {advice}"
    )


def _rule_to_change(made: PlacementPlan, rules: Mapping[str, Rule]) -> str:
    """Advice on the rule that puts the most on the fullest task; "" if the planner does."""
    task = made.bytes_by_task.index(max(made.bytes_by_task))
    size, path = max(
        (sum(size for index, size, _ in place.parts(spec, made.tasks) if index == task), spec.path)
        for spec, place in zip(made.specs, made.places, strict=True)
    )
    if path not in rules or isinstance(rules[path].placement, Balanced):
        return ""
    return f"Change {rules[path]}, which puts {size_text(size)} of {path} on {made.names()[task]}."


def checked(specs: Iterable[VariableSpec]) -> tuple[VariableSpec, ...]:
    variables = tuple(specs)
    for spec in variables:
        if not isinstance(spec, VariableSpec):
            raise PlacementError(f"specs must contain VariableSpec objects, got {shown(spec)}.")
    paths = Counter(spec.path for spec in variables)
    if len(paths) < len(variables):
        path = paths.most_common(1)[0][0]
        raise PlacementError(
            f"two variables have the path {path!r}. Rules and plans name variables by their path:"
            " give layers different names."
        )
    return variables


class _Planner:
    """Fills tasks with variables, largest first, each on the task that is least full.

    Variables whose number of pieces a rule decides come before the others.

    A variable that is larger than 1/128 of the mean task is cut into equal pieces where it would
    overflow a task. The rest is small enough to fill the gaps. Bytes are row 0 of each array, load
    is row 1.

    Attributes:
        held: what each task holds.
        mean: what a task holds on average when everything is placed; 1 where there is nothing.
        full: when a task counts as full.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        held: Floats,
        pieces: Mapping[str, int],
    ) -> None:
        """
        Args:
            specs: the variables to place.
            held: what rules have put on each task.
            pieces: path -> number of pieces that its rule asks for; for other variables the planner
                decides.
        """
        self._specs, self._pieces = specs, pieces
        self._count = held.shape[1]
        self.held = held
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
        # Variables that may be cut fill the gaps between the others.
        is_cut = np.array([spec.path not in self._pieces for spec in self._specs])
        for index in np.lexsort((np.negative(sizes), is_cut)).tolist():
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


@filter_traceback
def compare(specs: Iterable[VariableSpec], devices: int, ps: int | PlacementPlan) -> str:
    """Returns a table of the weights and slots on the fullest device, per strategy.

    The table does not include gradients and activations. The gradients of a replica are at most as
    large as the trainable weights. The gradient of an embedding has one row for each lookup.

    Args:
        specs: the variables of the model, with the slots of its optimizer.
        devices: the number of replicas on one machine.
        ps: the number of parameter servers, or a plan for them.

    Raises:
        PlacementError: `devices` or `ps` is not a positive integer.
    """
    check_int(devices, "devices", 1, error=PlacementError)
    variables = tuple(specs)
    weights = sum(spec.weight_bytes for spec in variables)
    total = sum(spec.bytes for spec in variables)
    owned = plan(variables, devices=[f"GPU:{i}" for i in range(devices)], default=lambda _: Owned())
    servers = ps if isinstance(ps, PlacementPlan) else plan(variables, ps)
    fullest = max(servers.bytes_by_task)
    task = servers.bytes_by_task.index(fullest)
    without_slots = tuple(replace(spec, slots=0) for spec in servers.specs)
    on_server = replace(servers, specs=without_slots).bytes_by_task[task]
    lines = [["strategy", "on", "weights", "slots", "total"]]
    for strategy, device, of_weights, of_all in (
        ("mirrored", "each device", weights, total),
        ("central_storage", "host", weights, total),
        ("placed", "fullest device", weights, max(owned.bytes_by_task)),
        ("parameter_server", "fullest ps", on_server, fullest),
    ):
        sizes = (of_weights, of_all - of_weights, of_all)
        lines.append([strategy, device, *map(size_text, sizes)])
    return columns(lines, "<<>>>")
