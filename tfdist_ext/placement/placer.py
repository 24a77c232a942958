"""Placers: where each variable goes at the moment of its creation.

A model that is known before it is created is planned as a whole. The other variables are placed
one by one. `plan_in_order` says beforehand where they go.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import counted, shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planning import checked, plan, within_budget
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    OnDevice,
    Owned,
    Placement,
    Rule,
    Rules,
    Sharded,
    Targets,
    placement_for,
    rules_from,
    rules_of,
    short_name,
)
from tfdist_ext.placement.specs import Place, VariableShard, VariableSpec, parse_size, size_text

_LARGE = 64 * 2**20  # bytes of a variable that is cut, without slots
_HOST = "CPU:0"  # variables may be there even if it is not a device of the strategy


class ServerPlacer:
    """Places variables on parameter servers, and counts the bytes on each server.

    A variable that is not planned is placed by its rule. Without a rule, a variable of at least 64
    MiB is cut into a piece for each server, and a smaller one goes to the server with the fewest
    bytes.

    Attributes:
        plan: the given plan, or the plan of the last model that was planned as a whole.
        plans_models: whether models are planned as a whole.
        bytes_by_task: bytes on each server.
    """

    def __init__(self, placement: Any, tasks: int):
        """
        Args:
            placement: a PlacementPlan, or the path of one as JSON; rules, or a table of pattern ->
                placement; "balanced": the planner without rules; None: neither plan nor rules.
            tasks: number of parameter servers.

        Raises:
            PlacementError: an invalid placement, or one that is not for these servers.
        """
        self._targets = Targets(tasks)
        self._given_plan: PlacementPlan | None = None
        self._rules: tuple[Rule, ...] = ()
        self.plans_models = placement is not None
        self.plan: PlacementPlan | None = None
        self.bytes_by_task = [0] * tasks
        file = os.fspath(placement) if isinstance(placement, os.PathLike) else placement
        if isinstance(file, str) and file.endswith(".json"):
            try:
                placement = PlacementPlan.from_json(Path(file).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise PlacementError(f"the plan {file!r} cannot be read: {error}") from error
        if isinstance(placement, PlacementPlan):
            if placement.devices is not None or placement.tasks != tasks:
                kind = "ps task" if placement.devices is None else "device"
                raise PlacementError(
                    f"the plan is for {counted(placement.tasks, kind)}, but the cluster has"
                    f" {counted(tasks, 'ps task')}. Plan again."
                )
            self._given_plan = self.plan = placement
        elif isinstance(placement, Iterable) and not isinstance(placement, str):
            self._rules = rules_from(placement)
        elif placement not in (None, "balanced"):
            raise PlacementError(
                "placement must be a PlacementPlan or its .json file, rules, a table of pattern ->"
                f' placement, or "balanced", got {shown(placement)}.'
            )
        for rule in self._rules:
            self._targets.check(rule)

    def __str__(self) -> str:
        if self._given_plan is not None:
            return "by the given plan"
        if self.plans_models:
            return "by rules, then by the planner" if self._rules else "by the planner"
        text = "a variable is whole, on the ps with the fewest bytes"
        if self._targets.count > 1:
            text += f"; from {size_text(_LARGE)} on it is cut into a piece for each ps"
        return text

    def learn(self, specs: Sequence[VariableSpec]) -> None:
        """Plan a model that is about to be created; its variables then go where the plan says.

        Raises:
            PlacementError: the given plan is for another model, or the rules do not fit this one.
        """
        if self._given_plan is not None:
            self._given_plan.check(specs)
        else:
            self.plan = plan(specs, self._targets.count, rules=self._rules)

    def knows(self, spec: VariableSpec) -> bool:
        """Whether the given plan, if there is one, has the variable."""
        return self._given_plan is None or self._planned(spec) is not None

    def place(self, spec: VariableSpec) -> tuple[VariableShard, ...]:
        """The pieces of a variable that is now created, in the order of rows.

        Raises:
            PlacementError: the variable's rule does not fit it.
        """
        shards = self._planned(spec) or self._unplanned(spec)
        for shard, size in zip(shards, spec.piece_bytes(len(shards)), strict=True):
            self.add(shard.task, size)
        return shards

    def add(self, task: int, size: int) -> None:
        """Count bytes that something else put on a task."""
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
        # If a variable is created with a value, as an optimizer's counter, only the last part of
        # its path is known.
        paths = [other.path for other in self.plan.specs if other.path.endswith(f"/{spec.path}")]
        alike = [path for path in paths if self.plan.holds(replace(spec, path=path))]
        return self.plan.shards_of(alike[0]) if len(alike) == 1 else None

    def _unplanned(self, spec: VariableSpec) -> tuple[VariableShard, ...]:
        placement = placement_for(spec.path, self._rules)
        task = self._targets.index_of(spec, placement)
        if task is not None:
            return spec.shards((task,))
        if isinstance(placement, Balanced) and spec.weight_bytes >= _LARGE:
            placement = Sharded()
        count = self._targets.count
        pieces = placement.pieces_on(count, spec.rows) if isinstance(placement, Sharded) else 1
        held, tasks = list(self.bytes_by_task), []
        for size in spec.piece_bytes(pieces):
            free = [task for task in range(count) if task not in tasks] or range(count)
            tasks.append(min(free, key=held.__getitem__))
            held[tasks[-1]] += size
        return spec.shards(sorted(tasks) if pieces == count else tasks)


def plan_in_order(
    specs: Sequence[VariableSpec], tasks: int, *, budget: int | str | None = None
) -> PlacementPlan:
    """The plan of what happens without a placement, if variables are created in this order.

    Slots are created after all variables, each beside its variable.

    Raises:
        PlacementError: an invalid argument, or variables that do not fit into the budget.
    """
    variables = checked(specs)
    placer = ServerPlacer(None, Targets.of(tasks, None).count)
    shards = [placer.place(replace(spec, slots=0)) for spec in variables]
    places = tuple(Place(tuple(shard.task for shard in pieces)) for pieces in shards)
    most = None if budget is None else parse_size(budget)
    return within_budget(PlacementPlan(variables, places, tasks, None, most), {})


class DevicePlacer:
    """Decides for the variables of a strategy on the devices of one machine.

    A variable that is not planned is owned by the device that owns the fewest bytes, and its piece
    i is on device i.

    Attributes:
        devices: names of the replicas' devices.
        plan: the plan of the last model that was planned as a whole, without the variables on the
            host; None before.
        owned_bytes: bytes of weights that each device owns.
    """

    def __init__(self, devices: Sequence[str], rules: Rules = (), *, owned_from: int | str = 0):
        """
        Args:
            devices: names of the replicas' devices, in the short form ("GPU:0").
            rules: rules for some variables; or a table of pattern -> placement or its text.
            owned_from: the size, without slots, from which a trained variable without a rule is
                `Owned`. Other variables without a rule are `Mirrored`.

        Raises:
            PlacementError: a rule that does not fit these devices.
        """
        self.devices = tuple(devices)
        self.plan: PlacementPlan | None = None
        self.owned_bytes = [0] * len(self.devices)
        self._targets = Targets(len(self.devices), self.devices)
        self._owned_from = parse_size(owned_from, "owned_from")
        self._rules = rules_from(rules)
        for rule in self._rules:
            placement = rule.placement
            if not (isinstance(placement, OnDevice) and short_name(placement.name) == _HOST):
                self._targets.check(rule)

    def learn(self, specs: Sequence[VariableSpec]) -> None:
        """Plan the owners and pieces of a model that is about to be created.

        Raises:
            PlacementError: a rule that matches no variable, two rules that match one, or more
                pieces than rows.
        """
        self.check_paths([spec.path for spec in specs])
        host = None if _HOST in self.devices else OnDevice(_HOST)
        on_devices = [spec for spec in specs if self.placement_of(spec) != host]
        self.plan = plan(on_devices, devices=self.devices, default=self.placement_of)

    def check_paths(self, paths: Sequence[str]) -> None:
        """Check that the rules fit a model with variables of these paths.

        Raises:
            PlacementError: a rule that matches no variable, or two rules that match one.
        """
        rules_of(paths, self._rules)

    def placement_of(self, spec: VariableSpec) -> Placement:
        """`Mirrored()`, `Owned()`, `Sharded`, or `OnDevice` with the short name of a device.

        Raises:
            PlacementError: two rules match the path; or its rule asks for more pieces than rows.
        """
        placement = placement_for(spec.path, self._rules)
        if isinstance(placement, OnDevice):
            return OnDevice(short_name(placement.name))
        if isinstance(placement, Balanced):
            owned = spec.trainable and spec.weight_bytes >= self._owned_from
            return Owned() if owned else Mirrored()
        self._targets.index_of(spec, placement)  # checks that the variable has enough rows
        is_whole = isinstance(placement, Sharded) and not spec.shape
        return Mirrored() if is_whole else placement

    def devices_of_pieces(self, spec: VariableSpec, placement: Sharded) -> tuple[str, ...]:
        """The devices of the even pieces of a variable that is now created, in the order of rows.

        Each piece is on a different device.
        """
        if self.plan is not None and self.plan.holds(spec):
            return tuple(self.devices[shard.task] for shard in self.plan.shards_of(spec.path))
        return self.devices[: placement.pieces_on(len(self.devices), spec.rows)]

    def choose_owner(self, spec: VariableSpec) -> int:
        """The number of the device that owns an `Owned` variable that is now created."""
        owner = None
        if self.plan is not None and self.plan.holds(spec):
            owner = self.plan.owner_of(spec.path)
        if owner is None:
            owner = self.owned_bytes.index(min(self.owned_bytes))
        self.owned_bytes[owner] += spec.weight_bytes
        return owner
