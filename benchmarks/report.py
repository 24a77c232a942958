"""Reads the figures of a benchmark's program, formats them and writes them into a page."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["closing_line", "measured_in_turn", "put_into", "python_line", "table"]


def measured_in_turn(program: Path, *arguments: int | str) -> list[dict[str, float]]:
    """What a program whose contestants take turns prints: a figure of each, for each round."""
    command = [sys.executable, str(program), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: list[dict[str, float]] = json.loads(run.stdout.splitlines()[-1])
    return found


def table(title: str, medians: dict[str, float], ours: str, **more: dict[str, str]) -> list[str]:
    """Lines of a table: steps a second, and how much faster the contestant called `ours` is.

    Args:
        more: further columns: a title with underscores, and a cell for each contestant.
    """
    titles = [title, "steps/s", "tfdist_ext is", *(each.replace("_", " ") for each in more)]
    lines = ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, median in medians.items():
        ratio = "" if name.startswith(ours) else f"{medians[ours] / median:.2f} x as fast"
        cells = [name, f"{median:.0f}", ratio, *(column[name] for column in more.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def closing_line(rounds: int) -> list[str]:
    """What the figures are, and what they were measured with."""
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("tensorflow", "keras"))
    figures = "One run" if rounds == 1 else f"Medians of {rounds} rounds"
    return ["", f"{figures}; {versions}, {python_line()}."]


def python_line() -> str:
    """The interpreter and the machine that figures were measured with."""
    return f"Python {platform.python_version()}, {os.cpu_count()} cores"


def put_into(page: Path, markers: tuple[str, str], text: str) -> None:
    """Replace what stands between the markers."""
    old = page.read_text(encoding="utf-8")
    begin, end = (old.index(marker) for marker in markers)
    page.write_text(f"{old[: begin + len(markers[0])]}\n{text}\n{old[end:]}", encoding="utf-8")
