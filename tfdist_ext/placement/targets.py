"""The targets of a placement: parameter servers, or the devices of one machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, nearest, shown
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    OnDevice,
    OnTask,
    Owned,
    Placement,
    Sharded,
)
from tfdist_ext.placement.sizes import parse_size
from tfdist_ext.placement.specs import VariableSpec

__all__ = ["Targets", "short_name"]

_MOST = 1_000_000
_DEVICE = re.compile(r"/?(?:device:)?([a-z_]+):([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Targets:
    """The targets of pieces, by index.

    Attributes:
        count: of parameter servers or devices.
        devices: names of the devices, in the short form where they have one ("GPU:0"); None for
            parameter servers.
    """

    count: int
    devices: tuple[str, ...] | None = None

    @classmethod
    def of(cls, tasks: int | None, devices: Sequence[str] | None) -> Targets:
        """The targets of the arguments of `plan`.

        Raises:
            PlacementError: not exactly one of them, no number from 1, a device that stands twice.
        """
        if (tasks is None) == (devices is None):
            raise PlacementError(
                "a plan must be for a number of parameter servers (tasks) or for devices=, one of"
                f" the two, got tasks={shown(tasks)}, devices={shown(devices)}."
            )
        if devices is None:
            count = check_int(
                tasks, "the number of parameter servers", 1, _MOST, error=PlacementError
            )
            return cls(count)
        if isinstance(devices, str) or not all(isinstance(name, str) for name in devices):
            raise PlacementError(
                f'devices must be a list of names, as ["CPU:0", "GPU:0"], got {shown(devices)}.'
            )
        names = tuple(short_name(name) for name in devices)
        if not names or len(set(names)) < len(names):
            raise PlacementError(
                f"devices must be at least one name, each once, got {shown(devices)}."
            )
        return cls(len(names), names)

    def of_rule(self, spec: VariableSpec, placement: Placement) -> int | None:
        """The index that the placement names; None where it leaves the choice.

        Raises:
            PlacementError: there is no such task or device, it is not for this kind of target, or
                the variable has too few rows for that many pieces.
        """
        if isinstance(placement, Sharded) and (
            placement.pieces_on(self.count, spec.rows) > (spec.rows if spec.shape else 1)
        ):
            rows = f"only {spec.rows} rows" if spec.shape else "no axis 0, it is a scalar"
            raise PlacementError(
                f"{spec.path!r} must have a row for each piece to be {placement}, got shape"
                f" {spec.shape}: it has {rows}."
            )
        if self.devices is None:
            if isinstance(placement, Mirrored | Owned | OnDevice):
                raise PlacementError(
                    f"{spec.path!r} on parameter servers must be on task N, sharded(N) or balanced,"
                    f" got {placement!s}, which is for the devices of one machine (devices=)."
                )
            if isinstance(placement, OnTask):
                if placement.task >= self.count:
                    raise PlacementError(
                        f"the task of {spec.path!r} must be from 0 to {self.count - 1}, got"
                        f" {placement.task}: there are {self.count} ps tasks."
                    )
                return placement.task
        elif isinstance(placement, OnTask):
            raise PlacementError(
                f"{spec.path!r} in a plan for devices must be on a device, got {placement!s}: write"
                f" OnDevice({self.devices[0]!r}), or device {self.devices[0]} in a file."
            )
        elif isinstance(placement, OnDevice):
            name = short_name(placement.name)
            if name not in self.devices:
                raise PlacementError(
                    f"{spec.path!r} must be on a device of the plan, got {placement!s}."
                    f" {nearest(name, self.devices)}"
                )
            return self.devices.index(name)
        elif not isinstance(placement, Balanced | Sharded | Mirrored | Owned):
            raise PlacementError(
                f"a placement must be one of this package's, got {shown(placement)}."
            )
        return None

    def budgets(self, budget: int | str | Sequence[int | str] | None) -> tuple[int, ...] | None:
        """Bytes for each.

        Raises:
            PlacementError: no size, or not one for each.
        """
        if budget is None:
            return None
        if isinstance(budget, str) or not isinstance(budget, Sequence):
            return (parse_size(budget),) * self.count
        if len(budget) != self.count:
            raise PlacementError(
                f"budget must be one size, or one for each of {self.count} {self.what}, got"
                f" {len(budget)} sizes."
            )
        return tuple(parse_size(size, f"budget[{i}]") for i, size in enumerate(budget))

    @property
    def what(self) -> str:
        return "ps tasks" if self.devices is None else "devices"


def short_name(name: str) -> str:
    """ "GPU:0" for "/device:GPU:0" and "gpu:0"; the name of another machine's device as it is."""
    match = _DEVICE.fullmatch(name.strip())
    return f"{match[1].upper()}:{int(match[2])}" if match else name.strip()
