"""A plan as a picture: a bar for each task, with the largest variables as blocks."""

from __future__ import annotations

import colorsys
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import optional_module
from tfdist_ext.placement.sizes import UNITS, size_text

__all__ = ["check_file", "save"]

_REST = "#d9d9d9"
_WIDTH, _BAR = 8.1, 0.30  # inches: the length of bars, the least height of one
_CHARACTER = 0.075  # inches, of the text in blocks
_FONT = 8


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


def save(
    path: str | os.PathLike[str],
    title: str,
    tasks: Mapping[str, Mapping[str, int]],
    largest: Sequence[str],
) -> None:
    """Draw the bytes of variables on tasks to a file.

    Args:
        path: a .svg or .png file.
        title: the title of the picture.
        tasks: name of a task -> path of a variable -> its bytes on the task.
        largest: paths of the variables with a color and a name of their own.

    Raises:
        PlacementError: as in `check_file`, or the file cannot be written.
    """
    check_file(path)
    import matplotlib  # takes half a second; no pyplot, which would choose a backend

    # Names can be searched for, "$" in a path is no formula, and the same plan is the same file.
    options: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tfdist_ext",
        "text.usetex": False,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(options):
        figure = _figure(title, tasks, largest)
        metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, dpi=110, metadata=metadata, bbox_inches="tight")
        except OSError as error:
            raise PlacementError(
                f"the picture {os.fspath(path)!r} cannot be written: {error}"
            ) from error


def _figure(title: str, tasks: Mapping[str, Mapping[str, int]], largest: Sequence[str]) -> Any:
    from matplotlib.figure import Figure

    most = max(1, *(sum(held.values()) for held in tasks.values()))
    colors = {path: _color_of(rank) for rank, path in enumerate(largest)}
    power = min((most.bit_length() - 1) // 10, len(UNITS) - 1)
    # The figure is the bars alone; it is saved with what stands around it.
    figure = Figure(figsize=(_WIDTH, max(len(tasks) * _BAR, 0.21 * (len(colors) + 3))))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_yticks(range(len(tasks)), list(tasks), fontsize=_FONT)
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_xlim(0, 1.04 * most / 1024**power)
    axes.set_xlabel(f"{UNITS[power]} of variables and slots")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for row, held in enumerate(tasks.values()):
        _draw_bar(axes, row, held, colors, 1024**power)
    _draw_legend(axes, tasks, colors)
    return figure


def _draw_bar(
    axes: Any, row: int, held: Mapping[str, int], colors: Mapping[str, Any], scale: int
) -> None:
    """Draw the blocks of one task: the variables with a color, and one block for the others."""
    blocks = {path: held[path] for path in colors if held.get(path)}
    blocks[""] = sum(held.values()) - sum(blocks.values())
    left, limit = 0.0, axes.get_xlim()[1]
    for path, size in blocks.items():
        width, color = size / scale, colors.get(path, _REST)
        block = axes.barh(row, width, 0.84, left, color=color, edgecolor="w", linewidth=0.5)
        if (len(path) + 1) * _CHARACTER <= width / limit * _WIDTH:
            axes.bar_label(block, [path], label_type="center", fontsize=_FONT)
        left += width


def _draw_legend(
    axes: Any, tasks: Mapping[str, Mapping[str, int]], colors: Mapping[str, Any]
) -> None:
    from matplotlib.patches import Patch

    sizes = {path: sum(held.get(path, 0) for held in tasks.values()) for path in colors}
    entries = [
        Patch(color=colors[path], label=f"{path}  {size_text(sizes[path])}") for path in colors
    ]
    entries.append(Patch(color=_REST, label="other variables"))
    legend = axes.legend(handles=entries, frameon=False, fontsize=_FONT)
    legend.set_loc("upper left")
    legend.set_bbox_to_anchor((1, 1))


def _color_of(rank: int) -> tuple[float, float, float]:
    """A light color for each rank, on which text is readable. Neighbors differ clearly."""
    hue = (rank * 0.381966) % 1.0
    return colorsys.hls_to_rgb(hue, 0.72 if rank % 2 else 0.62, 0.62)
