"""PlacementPlan: which task holds which rows of each variable; as sums, table, picture, JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import counted, optional_module, shown
from tfdist_ext.placement.rules import nearest_paths
from tfdist_ext.placement.specs import (
    UNITS,
    Held,
    Place,
    VariableShard,
    VariableSpec,
    columns,
    size_text,
    worker_name,
)
from tfdist_ext.user_frames import filter_traceback

# The peak of a server, measured by benchmarks/embedding_speed.py --memory: the process, and what
# blocks of checkpoints and updates of rows add to the variables.
_PROCESS_BYTES, _PEAK_OVER_BYTES = 768 * 2**20, 1.15
_OTHERS = "#d9d9d9"  # the color of variables that have none of their own
_FORMAT = "tfdist_ext placement plan, version 1"
_NAMED = 5  # differences of each kind that an error names
_LARGEST = 10  # variables in the table
_LISTED = 6  # tasks of one variable in the table


@filter_traceback
@dataclass(frozen=True, repr=False)
class PlacementPlan:
    """The placement of all variables of a model. Print it to read it as a table.

    `plan` and `from_json` create a plan. Methods with a parameter `path` raise a PlacementError if
    the plan does not contain the path.

    Attributes:
        specs: the variables, in the order of the model.
        places: the place of each variable.
        tasks: the number of parameter servers, devices or workers.
        devices: the names of the devices, if the plan is for one machine.
        budget: the largest number of bytes per task, or None.
    """

    specs: tuple[VariableSpec, ...]
    places: tuple[Place, ...]
    tasks: int
    devices: tuple[str, ...] | None
    budget: int | None

    def tasks_of(self, path: str) -> tuple[int, ...]:
        """Returns the tasks (or devices) that hold the variable, in the order of its rows."""
        return tuple(dict.fromkeys(shard.task for shard in self.shards_of(path)))

    def shards_of(self, path: str) -> tuple[VariableShard, ...]:
        """Returns the shards of a variable in the order of its rows, or its copies.

        A variable on one task is one shard with all rows. A scalar has one row.
        """
        spec, place = self._of(path)
        if place.held is not Held.PIECES:
            return tuple(VariableShard(task, 0, spec.rows) for task in range(self.tasks))
        return spec.shards(place.tasks)

    def owner_of(self, path: str) -> int | None:
        """Returns the device that holds the slots of an owned variable and updates it.

        Returns None if the variable is not owned. If several workers own rows of the variable,
        returns the owner of the first rows. `owned_shards_of` returns all owners.
        """
        _, place = self._of(path)
        return place.tasks[0] if place.held is Held.OWNED else None

    def owned_shards_of(self, path: str) -> tuple[VariableShard, ...]:
        """Returns the rows that each owner of a variable updates, or () if it is not owned."""
        spec, place = self._of(path)
        return spec.shards(place.tasks) if place.held is Held.OWNED else ()

    @cached_property
    def bytes_by_task(self) -> tuple[int, ...]:
        """The bytes of variables and slots on each task (or device)."""
        held = [0] * self.tasks
        for spec, place in zip(self.specs, self.places, strict=True):
            for task, size, _ in place.parts(spec, self.tasks):
                held[task] += size
        return tuple(held)

    @cached_property
    def load_by_task(self) -> tuple[float, ...]:
        """The load on each task (or device), in the unit of `VariableSpec.load`."""
        loaded = [0.0] * self.tasks
        for spec, place in zip(self.specs, self.places, strict=True):
            for task, _, load in place.parts(spec, self.tasks):
                loaded[task] += load
        return tuple(loaded)

    @property
    def imbalance(self) -> float:
        """The bytes on the fullest task, divided by the mean of all tasks."""
        return _max_over_mean(self.bytes_by_task)

    @property
    def memory_by_task(self) -> tuple[int, ...]:
        """The memory that each parameter server needs, with its process, if updates are of rows."""
        return tuple(_PROCESS_BYTES + int(_PEAK_OVER_BYTES * size) for size in self.bytes_by_task)

    def names(self) -> tuple[str, ...]:
        """Returns the names of the tasks ("ps 0") or of the devices."""
        return self.devices or tuple(f"ps {task}" for task in range(self.tasks))

    def holds(self, spec: VariableSpec) -> bool:
        """Returns whether the plan contains this variable with this shape and dtype."""
        index = self._index.get(spec.path)
        return index is not None and _kind(self.specs[index]) == _kind(spec)

    def check(self, specs: Iterable[VariableSpec]) -> None:
        """Checks that the plan is for these variables, in any order.

        Raises:
            PlacementError: a variable is missing in the plan or in `specs`, or has another shape or
                dtype.
        """
        now = {spec.path: _kind(spec) for spec in specs}
        then = {spec.path: _kind(spec) for spec in self.specs}
        changes = {
            "new": [repr(path) for path in now if path not in then],
            "gone": [repr(path) for path in then if path not in now],
            "changed": [
                f"{path!r} from {then[path]} to {kind}"
                for path, kind in now.items()
                if then.get(path, kind) != kind
            ],
        }
        differences = [
            f"{len(paths)} {what}: {', '.join(paths[:_NAMED])}{', ...' * (len(paths) > _NAMED)}"
            for what, paths in changes.items()
            if paths
        ]
        if differences:
            raise PlacementError(
                f"the plan does not match the variables of the model: {'; '.join(differences)}."
                " Plan again."
            )

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws a bar for each task with its largest variables, as .svg or .png.

        Raises:
            PlacementError: the path has another suffix, the file cannot be written, or matplotlib
                is not installed.
        """
        save_figure(path, self._figure)

    def to_json(self) -> str:
        """Returns the plan as JSON, with one line per variable. `from_json` reads it."""
        content = {"format": _FORMAT, "tasks": self.tasks, "devices": self.devices}
        text = json.dumps({**content, "budget": self.budget}, indent=1)[:-2]  # no closing brace
        lines = [
            json.dumps({**asdict(spec), "held": place.held.value, "on": place.tasks})
            for spec, place in zip(self.specs, self.places, strict=True)
        ]
        text += ',\n "variables": [' + ",".join(f"\n  {line}" for line in lines) + "\n ]"
        return f"{text}\n}}\n"

    @staticmethod
    def from_json(text: str) -> PlacementPlan:
        """Returns the plan from the JSON of `to_json`.

        Raises:
            PlacementError: the text is not a plan, or has another version.
        """
        try:
            content = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise PlacementError(
                f"the placement plan {shown(text)} is not the JSON that to_json() writes: {error}."
            ) from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise PlacementError(
                f'the placement plan {shown(content)} does not have the format "{_FORMAT}". Plan'
                " again with this package."
            )
        try:
            specs, places = [], []
            for line in content["variables"]:
                places.append(Place(tuple(line.pop("on")), Held(line.pop("held"))))
                specs.append(VariableSpec(**line))
            devices = content["devices"] and tuple(content["devices"])
            plan = PlacementPlan(
                tuple(specs), tuple(places), content["tasks"], devices, content["budget"]
            )
            tasks = {task for place in places for task in place.tasks}
            if unknown := tasks - set(range(plan.tasks)):
                raise ValueError(f"it has no task {', '.join(map(str, sorted(unknown)))}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlacementError(
                f"the placement plan was changed and cannot be read: {error!r}. Plan again, and"
                " use rules to move variables."
            ) from None
        return plan

    def __str__(self) -> str:
        head, *lines = _lines_of_tasks(self)
        parts = [
            self._title(),
            indent(columns([head, *lines], "<" + ">" * (len(head) - 1)), "  "),
            f"imbalance {self.imbalance:.3f} (fullest over mean bytes)",
        ]
        if any(self.load_by_task):
            parts[-1] += f"\nimbalance of load {_max_over_mean(self.load_by_task):.3f}"
        if self.budget is not None:
            parts[-1] += f"\nbudget {size_text(self.budget)} each"
        largest = [
            [spec.path, str(spec.shape), size_text(spec.bytes), self._place_text(spec.path)]
            for spec in self._largest()
        ]
        if largest:
            parts.append("largest variables\n" + indent(columns(largest, "<<><"), "  "))
        return "\n\n".join(parts)

    def _figure(self) -> Any:
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        held = {spec.path: np.zeros(self.tasks) for spec in self.specs}
        for spec, place in zip(self.specs, self.places, strict=True):
            for task, size, _ in place.parts(spec, self.tasks):
                held[spec.path][task] += size
        totals = np.array(self.bytes_by_task, float)
        power = min((max(int(totals.max()), 1).bit_length() - 1) // 10, len(UNITS) - 1)
        largest = [spec.path for spec in self._largest()]
        rest = totals - sum((held[path] for path in largest), np.zeros(self.tasks))
        blocks = [(path, held[path], colormaps["tab20"](i)) for i, path in enumerate(largest)]
        figure = Figure(figsize=(8, max(0.4 * self.tasks, 0.2 * len(largest) + 1)))
        axes = figure.add_subplot()
        title = f"{self._title()}: fullest over mean {self.imbalance:.3f}"
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(f"{UNITS[power]} of variables and slots")
        axes.set_ylim(self.tasks - 0.5, -0.5)
        left = np.zeros(self.tasks)
        for name, sizes, color in [*blocks, ("other variables", rest, _OTHERS)]:
            axes.barh(
                self.names(),
                sizes / 1024**power,
                left=left / 1024**power,
                color=color,
                edgecolor="w",
                label=f"{name}  {size_text(int(sizes.sum()))}",
            )
            left += sizes
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
        return figure

    def _title(self) -> str:
        slots = any(spec.slots for spec in self.specs)
        what = "ps task" if self.devices is None else "worker" if self._of_workers else "device"
        size = size_text(sum(self.bytes_by_task))
        if self.devices is not None:
            size += " in all copies"
        return (
            f"{counted(len(self.specs), 'variable')}, {size}{' with optimizer slots' * slots}, on"
            f" {counted(self.tasks, what)}"
        )

    def _largest(self) -> list[VariableSpec]:
        return sorted(self.specs, key=lambda spec: (-spec.bytes, spec.path))[:_LARGEST]

    def _place_text(self, path: str) -> str:
        """Where a variable is, as "ps 2" or "4 pieces: ps 0, ps 1, ps 3, ps 5"."""
        spec, place = self._of(path)
        names = [self.names()[task] for task in sorted(set(place.tasks))]
        listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
        copies = f"on every {'worker' if self._of_workers else 'device'}"
        if place.held is Held.COPIES:
            return copies
        if place.held is Held.OWNED:
            owned = "slots" if spec.slots else "updated"
            return f"{size_text(spec.weight_bytes)} {copies}, {owned} on {listed}"
        if len(place.tasks) == 1:
            return names[0]
        return f"{len(place.tasks)} pieces: {listed}"

    @property
    def _of_workers(self) -> bool:
        """Whether this is a plan of `plan_owners`."""
        return self.devices is not None and self.devices[0] == worker_name(0)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spec.path: index for index, spec in enumerate(self.specs)}

    def _of(self, path: str) -> tuple[VariableSpec, Place]:
        index = self._index.get(path)
        if index is None:
            raise PlacementError(
                f"the plan has no variable {path!r}. {nearest_paths(path, list(self._index))}"
            )
        return self.specs[index], self.places[index]


def _lines_of_tasks(plan: PlacementPlan) -> list[list[str]]:
    """The cells of the table of tasks, after a line of titles."""
    mean = sum(plan.bytes_by_task) / plan.tasks
    variables: Counter[int] = Counter()
    shards: Counter[int] = Counter()
    for place in plan.places:
        variables.update(set(place.tasks if place.held is Held.PIECES else range(plan.tasks)))
        if len(place.tasks) > 1 and place.held is Held.PIECES:
            shards.update(place.tasks)
    cut, loads = any(shards.values()), any(plan.load_by_task)
    servers = plan.devices is None
    titles = [*["memory"] * servers, "of mean", "variables", *["shards"] * cut, *["load"] * loads]
    lines = [["", "bytes", *titles]]
    for task, name in enumerate(plan.names()):
        held = plan.bytes_by_task[task]
        of_mean = f"{held / mean:.3f}" if mean else "-"
        memory = [size_text(plan.memory_by_task[task])] * servers
        line = [name, size_text(held), *memory, of_mean, str(variables[task])]
        line += [str(shards[task])] * cut
        lines.append(line + [f"{plan.load_by_task[task]:.4g}"] * loads)
    return lines


def _kind(spec: VariableSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _max_over_mean(sizes: Sequence[float]) -> float:
    total = sum(sizes)
    return max(sizes) * len(sizes) / total if total else 1.0


def check_file(path: str | os.PathLike[str]) -> None:
    """Check that a picture can be drawn to a file of this name.

    Raises:
        PlacementError: the suffix is neither .svg nor .png, or matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in (".svg", ".png"):
        raise PlacementError(
            f"a picture must be a .svg or a .png file, got {os.fspath(path)!r}. Change the suffix."
        )
    optional_module("matplotlib", "matplotlib", "A picture of a plan", error=PlacementError)


def save_figure(path: str | os.PathLike[str], draw: Callable[[], Any]) -> None:
    """Writes the figure that `draw` returns to a .svg or .png file.

    Raises:
        PlacementError: as in `check_file`, or the file cannot be written.
    """
    check_file(path)
    import matplotlib  # takes half a second; no pyplot, which would choose a backend

    # Names can be searched for, "$" in a path is not a formula, and the same plan is the same file.
    options: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tfdist_ext",
        "text.usetex": False,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(options):
        figure = draw()
        metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, dpi=110, metadata=metadata, bbox_inches="tight")
        except OSError as error:
            raise PlacementError(
                f"the picture {os.fspath(path)!r} cannot be written: {error}"
            ) from error
