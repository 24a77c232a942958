"""A plan as a picture: a bar for each task, with the largest variables as blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import optional_module
from tfdist_ext.placement.specs import UNITS, size_text

__all__ = ["check_file", "save"]

_OTHERS = "#d9d9d9"  # the color of variables that have none of their own


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

    # Names can be searched for, "$" in a path is not a formula, and the same plan is the same file.
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
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    totals = np.array([sum(held.values()) for held in tasks.values()], float)
    power = min((max(int(totals.max()), 1).bit_length() - 1) // 10, len(UNITS) - 1)
    figure = Figure(figsize=(8, max(0.4 * len(tasks), 0.2 * len(largest) + 1)))
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(f"{UNITS[power]} of variables and slots")
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    blocks = [
        (
            path,
            np.array([held.get(path, 0) for held in tasks.values()], float),
            colormaps["tab20"](i),
        )
        for i, path in enumerate(largest)
    ]
    rest = totals - sum((sizes for _, sizes, _ in blocks), np.zeros(len(tasks)))
    left = np.zeros(len(tasks))
    for name, sizes, color in [*blocks, ("other variables", rest, _OTHERS)]:
        axes.barh(
            list(tasks),
            sizes / 1024**power,
            left=left / 1024**power,
            color=color,
            edgecolor="w",
            label=f"{name}  {size_text(int(sizes.sum()))}",
        )
        left += sizes
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    return figure
