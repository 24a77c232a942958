"""The targets of a placement: parameter servers, or the devices of one machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, nearest, shown
from tfdist_ext.placement.rules import (
    Mirrored,
    OnDevice,
    OnTask,
    Owned,
    Placement,
    Rule,
    Sharded,
)
from tfdist_ext.placement.specs import VariableSpec

__all__ = ["Targets", "short_name"]

_MOST = 1_000_000
_DEVICE = re.compile(r"/?(?:device:)?([a-z_]+):([0-9]+)", re.IGNORECASE)


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
                or the variable has too few rows for so many pieces.
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
