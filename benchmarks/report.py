"""What a benchmark prints, and where in a page of docs it goes."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

__all__ = ["closing_line", "put_into", "python_line", "table"]


def table(title: str, medians: dict[str, float], ours: str) -> list[str]:
    """Lines of a table: steps a second, and how much faster the contestant called `ours` is."""
    lines = ["", f"| {title} | steps/s | tfdist_ext is |", "|---|---|---|"]
    for name, median in medians.items():
        ratio = "" if name.startswith(ours) else f"{medians[ours] / median:.2f} x as fast"
        lines.append(f"| {name} | {median:.0f} | {ratio} |")
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
