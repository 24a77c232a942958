"""A plan as a picture: a bar for each task, with its largest variables as blocks."""

from __future__ import annotations

import colorsys
import os
from pathlib import Path
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import optional_module
from tfdist_ext.placement.assignment import Assignment
from tfdist_ext.placement.report import fullest_and_emptiest, largest_of
from tfdist_ext.placement.sizes import size_text

__all__ = ["require_matplotlib", "save"]

_NAMED = 20  # variables with a color and a name of their own
_MOST_BARS = 96  # of more tasks, the fullest and the emptiest are drawn
_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40), ("PiB", 2**50))
_REST, _BUDGET = "#d9d9d9", "#c00000"
_WIDTH, _BAR = 8.1, 0.30  # inches: the length of bars, the least height of one
_CHARACTER = 0.075  # inches, of the text in blocks
_FONT = 8


def save(plan: Assignment, path: str | os.PathLike[str]) -> None:
    """Draw the plan to a file.

    Raises:
        PlacementError: the suffix is neither .svg nor .png, matplotlib is not installed, or the
            file cannot be written.
    """
    file = Path(path)
    if file.suffix.lower() not in (".svg", ".png"):
        raise PlacementError(
            f"a picture must be a .svg or a .png file, got {os.fspath(path)!r}. Change the suffix."
        )
    require_matplotlib()
    import matplotlib  # takes half a second; no pyplot, which would choose a backend

    # Names can be searched for, "$" in a path is no formula, and the same plan is the same file.
    options: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tfdist_ext",
        "text.usetex": False,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(options):
        figure = _figure(plan)
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(file, dpi=110, metadata=metadata, bbox_inches="tight")
        except OSError as error:
            raise PlacementError(
                f"the picture {os.fspath(path)!r} cannot be written: {error}"
            ) from error


def require_matplotlib() -> None:
    """
    Raises:
        PlacementError: matplotlib is not installed.
    """
    optional_module("matplotlib", "matplotlib", "A picture of a plan", error=PlacementError)


def _figure(plan: Assignment) -> Any:
    from matplotlib.figure import Figure

    many = plan.tasks > _MOST_BARS
    bars = fullest_and_emptiest(plan, _MOST_BARS // 2) if many else list(range(plan.tasks))
    named = [spec for spec in largest_of(plan, _NAMED) if spec.bytes]
    colors = {spec.path: _color_of(rank) for rank, spec in enumerate(named)}
    # The figure is the bars alone; it is saved with what stands around it.
    figure = Figure(figsize=(_WIDTH, max(len(bars) * _BAR, 0.21 * (len(named) + 3))))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_title(_title(plan, len(bars)), fontsize=10, loc="left")
    axes.set_yticks(range(len(bars)), [plan.names()[task] for task in bars], fontsize=_FONT)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _draw_bars(axes, plan, bars, colors)
    legend = axes.legend(handles=_legend(plan, colors), frameon=False, fontsize=_FONT)
    legend.set_loc("upper left")
    legend.set_bbox_to_anchor((1, 1))
    return figure


def _draw_bars(axes: Any, plan: Assignment, bars: list[int], colors: dict[str, Any]) -> None:
    budgets = plan.budgets if _budget_in_sight(plan) else None
    most = max(*plan.bytes_by_task, *(budgets or ()), 1)
    unit, scale = max((entry for entry in _UNITS if entry[1] <= most), key=lambda e: e[1])
    limit = 1.04 * most / scale
    axes.set_xlim(0, limit)
    axes.set_xlabel(f"{unit} of variables and slots")
    for row, task in enumerate(bars):
        left = 0.0
        for path, size in _blocks(plan, task, colors):
            width = size / scale
            color = colors.get(path, _REST)
            block = axes.barh(row, width, 0.84, left, color=color, edgecolor="w", linewidth=0.5)
            if (len(path) + 1) * _CHARACTER <= width / limit * _WIDTH:
                axes.bar_label(block, [path], label_type="center", fontsize=_FONT)
            left += width
        if budgets is not None:
            at = budgets[task] / scale
            axes.plot([at, at], [row - 0.5, row + 0.5], color=_BUDGET, linewidth=1.6)


def _legend(plan: Assignment, colors: dict[str, Any]) -> list[Any]:
    from matplotlib.patches import Patch

    entries = []
    for path, color in colors.items():
        size = size_text(plan.specs[plan.index_of(path)].bytes)
        entries.append(Patch(color=color, label=f"{path}  {size}"))
    if len(plan.specs) > len(colors):
        entries.append(Patch(color=_REST, label=f"{len(plan.specs) - len(colors)} other variables"))
    if plan.budgets is not None:
        far = "" if _budget_in_sight(plan) else f" from {size_text(min(plan.budgets))}, far right"
        entries.append(Patch(color=_BUDGET, label=f"budget{far}"))
    return entries


def _budget_in_sight(plan: Assignment) -> bool:
    """Whether bars are still worth looking at on an axis as long as the largest budget."""
    return plan.budgets is not None and max(plan.budgets) <= 4 * max(plan.bytes_by_task)


def _blocks(plan: Assignment, task: int, named: dict[str, Any]) -> list[tuple[str, int]]:
    """Path and bytes of the named variables on a task; the others as one block at the end."""
    found = {}
    for path in named:
        index = plan.index_of(path)
        sizes = plan.places[index].bytes_of(plan.specs[index], plan.tasks)
        found[path] = sum(size for where, size in sizes if where == task)
    rest = plan.bytes_by_task[task] - sum(found.values())
    return [(path, size) for path, size in found.items() if size] + [("", rest)] * (rest > 0)


def _title(plan: Assignment, drawn: int) -> str:
    what = "ps tasks" if plan.devices is None else "devices"
    some = f", the {drawn // 2} fullest and the {drawn // 2} emptiest" * (drawn < plan.tasks)
    return (
        f"{len(plan.specs)} variables, {size_text(sum(plan.bytes_by_task))}, on {plan.tasks} {what}"
        f"{some}: fullest over mean {plan.imbalance:.3f}"
    )


def _color_of(rank: int) -> tuple[float, float, float]:
    """A light color for each rank, neighbors far apart: text on it stays readable."""
    hue = (rank * 0.381966) % 1.0
    return colorsys.hls_to_rgb(hue, 0.72 if rank % 2 else 0.62, 0.62)
