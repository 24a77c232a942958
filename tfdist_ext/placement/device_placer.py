"""DevicePlacer: the placement of each variable of one machine, and the owners of owned ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import shown
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planning import plan
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    OnDevice,
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
from tfdist_ext.placement.targets import Targets, short_name

__all__ = ["DevicePlacer"]


class DevicePlacer:
    """Decides for the variables of a strategy on the devices of one machine.

    A model that is known before it is created is planned as a whole (`learn`): its owners hold
    nearly equal bytes. A variable that is not planned is owned by the device that owns the fewest
    bytes, and its piece i is on device i.

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
            owned_from: bytes of a trained variable, without slots, from which it is `Owned` if it
                has no rule. Smaller variables, and those that are not trained, are `Mirrored`.
            host: a device that variables may be on, too.

        Raises:
            PlacementError: a rule that does not fit these devices.
        """
        self.devices = tuple(devices)
        self.plan: PlacementPlan | None = None
        self.owned_bytes = [0] * len(self.devices)
        self._targets = Targets(len(self.devices), self.devices)
        self._owned_from = parse_size(owned_from, "owned_from")
        if not isinstance(rules, Iterable) or isinstance(rules, str):
            raise PlacementError(
                "rules must be a list of Rule(pattern, placement), or a table of pattern ->"
                f' placement, as {{"embedding/.*": "device CPU:0"}}, got {shown(rules)}.'
            )
        self._rules = checked_rules(rules)
        for rule in self._rules:
            self._check(rule, host)

    def learn(self, specs: Sequence[VariableSpec]) -> PlacementPlan:
        """Plan the owners and pieces of a model that is about to be created; returns the plan.

        It has no variables that are on the host.

        Raises:
            PlacementError: a rule that matches no variable, two rules that match one, or more
                pieces than rows.
        """
        self.check_paths([spec.path for spec in specs])
        here = [spec for spec in specs if self._is_here(self.placement_of(spec))]
        self.plan = plan(here, devices=self.devices, default=self.placement_of)
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
        if isinstance(placement, Sharded) and not spec.shape:
            raise PlacementError(
                f"{rule} must match variables with rows, got the scalar {spec.path!r}. Narrow the"
                " pattern."
            )
        self._targets.index_of(spec, placement)  # it must have the rows
        return placement

    def rule_of(self, spec: VariableSpec) -> str:
        """The rule of a variable for messages, as "the rule 'users/.*' (sharded(4))"."""
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

    def _check(self, rule: Rule, host: str) -> None:
        placement = rule.placement
        if isinstance(placement, OnDevice):
            named = short_name(placement.name)
            if named not in (*self.devices, host):
                raise PlacementError(
                    f"{rule} must name one of {', '.join(self.devices)}, or {host}, got {named}:"
                    f" name one of these, or give {named} to the strategy, too."
                )
            return
        if isinstance(placement, Sharded) and (placement.pieces or 0) > len(self.devices):
            raise PlacementError(
                f"{rule} must have at most {len(self.devices)} pieces, got {placement.pieces}: the"
                f" strategy has the devices {', '.join(self.devices)}. Write sharded for a piece on"
                " each."
            )
        # As of a variable with rows enough: the shapes are not known yet.
        self._targets.index_of(VariableSpec(rule.pattern, (2**40,), "bool"), placement)
