"""DevicePlacer: which placement each variable of one machine gets, and who owns the owned ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import counted, shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planning import plan
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
    checked_rules,
    rule_for,
    rules_of,
)
from tfdist_ext.placement.sizes import parse_size
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.placement.targets import short_name

__all__ = ["DevicePlacer"]


class DevicePlacer:
    """Decides for the variables of a strategy on the devices of one machine.

    A model that is known before it is created is planned as a whole (`learn`): its owners hold
    nearly equal bytes, and fewer pieces than devices go where that balances. What comes one by one
    is owned by the device that owns the fewest bytes, and piece i is on device i.

    Attributes:
        devices: names of the replicas' devices.
        plan: of the last model that was planned as a whole; None before.
        owned_bytes: bytes of weights that each device owns.
    """

    def __init__(
        self,
        devices: Sequence[str],
        rules: Rules = (),
        *,
        owned_from: int | str = 0,
        host: str = "CPU:0",
    ):
        """
        Args:
            devices: names of the replicas' devices, in the short form ("GPU:0").
            rules: for some variables; or a table of pattern -> placement or its text.
            owned_from: bytes of a trained variable, without slots, from which it is `Owned` where
                no rule says otherwise; below, and where nothing is trained, it is `Mirrored`.
            host: a device that variables may be on, too.

        Raises:
            PlacementError: rules that cannot be right on these devices; names the rule.
        """
        self.devices = tuple(devices)
        self.plan: PlacementPlan | None = None
        self.owned_bytes = [0] * len(self.devices)
        self._owned_from = parse_size(owned_from, "owned_from")
        self._host = host
        if not isinstance(rules, Iterable) or isinstance(rules, str):
            raise PlacementError(
                "rules must be a list of Rule(pattern, placement), or a table of pattern ->"
                f' placement, as {{"embedding/.*": "device CPU:0"}}, got {shown(rules)}.'
            )
        self._rules = checked_rules(rules)
        for rule in self._rules:
            self._check(rule)

    def learn(self, specs: Sequence[VariableSpec]) -> PlacementPlan:
        """Plan the owners and pieces of a model that is about to be created; returns the plan.

        It holds what is on the replicas' devices, and nothing that is on the host beside them.

        Raises:
            PlacementError: a rule that matches no variable, or two that match one; one that cuts a
                variable into more pieces than it has rows.
        """
        self.check_paths([spec.path for spec in specs])
        placements = {spec.path: self.placement_of(spec) for spec in specs}
        here = [spec for spec in specs if self._is_here(placements[spec.path])]
        self.plan = plan(here, devices=self.devices, default=lambda spec: placements[spec.path])
        return self.plan

    def check_paths(self, paths: Sequence[str]) -> None:
        """Raise PlacementError unless each rule matches one of a model's variables.

        The counters of optimizers and the states of metrics are created with other names.
        """
        rules_of(paths, self._rules)

    def placement_of(self, spec: VariableSpec) -> Placement:
        """`Mirrored()`, `Owned()`, `Sharded`, or `OnDevice` with the short name of a device.

        Raises:
            PlacementError: two rules match the path; or its rule asks for more pieces than rows.
        """
        rule = rule_for(spec.path, self._rules)
        placement: Placement = Balanced() if rule is None else rule.placement
        if isinstance(placement, OnDevice):
            return OnDevice(short_name(placement.name))
        if isinstance(placement, Balanced):
            owned = spec.trainable and spec.weight_bytes >= self._owned_from
            return Owned() if owned else Mirrored()
        if rule is not None and isinstance(placement, Sharded):
            _check_rows(rule, spec, placement.pieces_on(len(self.devices), spec.rows))
        return placement

    def rule_of(self, spec: VariableSpec) -> str:
        """The rule of a variable as messages name it, as "the rule 'users/.*' (sharded(4))"."""
        return str(rule_for(spec.path, self._rules) or "no rule")

    def devices_of_pieces(self, spec: VariableSpec, placement: Sharded) -> tuple[str, ...]:
        """The devices of the even pieces of a variable that is now created, in the order of rows.

        No two pieces are on one device.
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

    def _is_here(self, placement: Placement) -> bool:
        return not isinstance(placement, OnDevice) or placement.name in self.devices

    def _check(self, rule: Rule) -> None:
        placement = rule.placement
        named = short_name(placement.name) if isinstance(placement, OnDevice) else self._host
        if named not in (*self.devices, self._host):
            host = "" if self._host in self.devices else f" or {self._host}, the host"
            raise PlacementError(
                f"{rule} must name one of {', '.join(self.devices)}{host}, got {named}: name one of"
                f" these, or give {named} to the strategy, too."
            )
        if isinstance(placement, OnTask):
            raise PlacementError(
                f"{rule} must be mirrored, owned, balanced, sharded(n) or a device such as"
                f" {self.devices[0]}, got {placement}, which is for parameter servers."
            )
        if isinstance(placement, Sharded) and (placement.pieces or 0) > len(self.devices):
            raise PlacementError(
                f"{rule} must have at most {len(self.devices)} pieces, got {placement.pieces}: the"
                f" strategy has the devices {', '.join(self.devices)}. Write sharded for a piece on"
                " each."
            )


def _check_rows(rule: Rule, spec: VariableSpec, pieces: int) -> None:
    if not spec.shape or pieces > spec.rows:
        has = counted(spec.rows, "row") if spec.shape else "no rows, it is a scalar"
        raise PlacementError(
            f"{rule} must match variables with a row for each piece, got {spec.path!r} of shape"
            f" {spec.shape}, which has {has}. Narrow the pattern, or give {spec.path!r} a rule of"
            " its own."
        )
