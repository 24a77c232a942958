"""From variables, targets and rules to a plan: rules decide first, the planner places the rest.

`compare` plans a model for several strategies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, nearest, shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planner import Planner
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    OnDevice,
    OnTask,
    Owned,
    Placement,
    Rule,
    Rules,
    Sharded,
    rules_of,
)
from tfdist_ext.placement.specs import Held, Place, VariableSpec, columns, parse_size, size_text
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Targets", "compare", "plan", "short_name"]

_MOST = 1_000_000
_DEVICE = re.compile(r"/?(?:device:)?([a-z_]+):([0-9]+)", re.IGNORECASE)


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
        for on, size, load in () if fixed is None else fixed.parts(spec, count):
            filled[on] += size
            loaded[on] += load
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


@dataclass(frozen=True)
class Targets:
    """The parameter servers or devices that hold variables, by index.

    Attributes:
        count: number of parameter servers or devices.
        devices: names of the devices, in the short form if they have one ("GPU:0"); None for
            parameter servers.
    """

    count: int
    devices: tuple[str, ...] | None = None

    @classmethod
    def of(cls, tasks: int | None, devices: Sequence[str] | None) -> Targets:
        """The targets of the arguments of `plan`.

        Raises:
            PlacementError: both or none of the arguments, no number from 1, or a device twice.
        """
        if (tasks is None) == (devices is None):
            raise PlacementError(
                "a plan must be for a number of parameter servers (tasks) or for devices=, one of"
                f" the two, got tasks={shown(tasks)}, devices={shown(devices)}."
            )
        if devices is None:
            what = "the number of parameter servers"
            return cls(check_int(tasks, what, 1, _MOST, error=PlacementError))
        texts = [name for name in devices if isinstance(name, str)]
        names = tuple(dict.fromkeys(map(short_name, texts)))
        if isinstance(devices, str) or not names or len(names) < len(devices):
            raise PlacementError(
                'devices must be a list of different names, as ["CPU:0", "GPU:0"], got'
                f" {shown(devices)}."
            )
        return cls(len(names), names)

    def index_of(self, spec: VariableSpec, placement: Placement) -> int | None:
        """The index of the target that the placement names; None if the planner chooses.

        Raises:
            PlacementError: there is no such target, the placement is for the other kind of target,
                or the variable has fewer rows than pieces.
        """
        if isinstance(placement, Sharded):
            self._check_pieces(spec, placement)
        if self.devices is None and isinstance(placement, Mirrored | Owned | OnDevice):
            raise PlacementError(
                f"{spec.path!r} cannot be {placement} on parameter servers. Use task N, sharded(N)"
                " or balanced."
            )
        if self.devices is not None and isinstance(placement, OnTask):
            raise PlacementError(
                f"{spec.path!r} cannot be on {placement}, which is for parameter servers. Use"
                f" mirrored, owned, sharded(N), balanced or device {self.devices[0]}."
            )
        if isinstance(placement, OnTask):
            if placement.task >= self.count:
                raise PlacementError(
                    f"the task of {spec.path!r} must be from 0 to {self.count - 1}, got"
                    f" {placement.task}: there are {self.count} ps tasks."
                )
            return placement.task
        if isinstance(placement, OnDevice) and self.devices is not None:
            name = short_name(placement.name)
            if name not in self.devices:
                raise PlacementError(
                    f"{spec.path!r} cannot be on {placement}, which is not there."
                    f" {nearest(name, self.devices)}"
                )
            return self.devices.index(name)
        return None

    def check(self, rule: Rule) -> None:
        """Check what a rule names, before the shapes of variables are known.

        Raises:
            PlacementError: as in `index_of`.
        """
        self.index_of(VariableSpec(rule.pattern, (2**40,), "bool"), rule.placement)

    def _check_pieces(self, spec: VariableSpec, placement: Sharded) -> None:
        pieces = placement.pieces_on(self.count, spec.rows)
        if self.devices is not None and pieces > self.count:
            raise PlacementError(
                f"{spec.path!r} cannot be {placement} on {self.count} devices. Write sharded for a"
                " piece on each device."
            )
        if pieces > (spec.rows if spec.shape else 1):
            rows = f"only {spec.rows} rows" if spec.shape else "no axis 0, it is a scalar"
            raise PlacementError(
                f"{spec.path!r} must have a row for each piece to be {placement}, got shape"
                f" {spec.shape}: it has {rows}."
            )


def short_name(name: str) -> str:
    """ "GPU:0" for "/device:GPU:0" and "gpu:0"; names on other machines are unchanged."""
    match = _DEVICE.fullmatch(name.strip())
    return f"{match[1].upper()}:{int(match[2])}" if match else name.strip()


@filter_traceback
def compare(specs: Iterable[VariableSpec], devices: int, ps: int) -> str:
    """A table of weights and slots on the devices that hold most of them, for each strategy.

    Gradients are not counted: a replica has at most one number for each trainable weight, and for
    an embedding one row for each lookup of a step. Activations are not counted either.

    Args:
        specs: the variables of the model, with the slots of its optimizer.
        devices: number of replicas on one machine.
        ps: number of parameter servers.

    Raises:
        PlacementError: `devices` or `ps` is not an integer from 1.
    """
    check_int(devices, "devices", 1, error=PlacementError)
    variables = tuple(specs)
    weights = sum(spec.weight_bytes for spec in variables)
    total = sum(spec.bytes for spec in variables)
    owned = plan(variables, devices=[f"GPU:{i}" for i in range(devices)], default=lambda _: Owned())
    servers = plan(variables, ps)
    fullest = max(servers.bytes_by_task)
    task = servers.bytes_by_task.index(fullest)
    on_server = sum(
        spec.weight_bytes // spec.rows * (shard.stop - shard.start)
        for spec in variables
        for shard in servers.shards_of(spec.path)
        if shard.task == task and spec.rows
    )
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
