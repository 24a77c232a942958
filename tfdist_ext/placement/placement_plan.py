"""PlacementPlan: an assignment of variables to tasks, as a table, a picture and JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tfdist_ext.placement import picture, plan_json, report
from tfdist_ext.placement.assignment import Assignment
from tfdist_ext.user_frames import filter_traceback

__all__ = ["PlacementPlan"]


@filter_traceback
@dataclass(frozen=True, repr=False)
class PlacementPlan(Assignment):
    """Where every variable lives. Made by `plan`, or read by `from_json`.

    A path that the plan does not have is a PlacementError.

    Attributes:
        specs: the variables, in the order in which they were given.
        places: where each of them is.
        tasks: number of parameter servers, or of devices.
        devices: names of the devices, if it is a plan for one machine.
        budgets: bytes that each task may hold at most, if there was a budget.
        fixed: path -> the rule that decided its place or its number of pieces.
    """

    def __repr__(self) -> str:
        return f"<PlacementPlan: {len(self.specs)} variables on {', '.join(self.names()[:4])}, ...>"

    def __str__(self) -> str:
        return report.table(self)

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw a bar for each task, with its largest variables as blocks, as .svg or .png.

        Raises:
            PlacementError: another suffix, the file cannot be written, or matplotlib is not
                installed.
        """
        picture.save(self, path)

    def to_json(self) -> str:
        """A text that `from_json` reads back to an equal plan; one line for each variable."""
        return plan_json.dump(self)

    @staticmethod
    def from_json(text: str) -> PlacementPlan:
        """The plan of a text that `to_json` wrote.

        Raises:
            PlacementError: no JSON, not a plan, of another version, or changed since.
        """
        return PlacementPlan(**plan_json.load(text))
