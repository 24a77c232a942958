"""Where workers are in their calls, and what is said where these differ: no TensorFlow."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

__all__ = ["Place", "clock", "different_calls", "odd_one", "summary"]


@dataclass(frozen=True)
class Place:
    """Where a task is.

    Attributes:
        number: of the meeting it is in, or was in last.
        call: the public calls that it is in, the outermost first: "fit", "fit > evaluate".
        detail: what the meeting is for.
        inside: it is in the meeting, and not between two.
        since: seconds since 1970.
    """

    number: int = 0
    call: str = ""
    detail: str = ""
    inside: bool = False
    since: float = 0.0

    def __str__(self) -> str:
        call = " inside ".join(reversed(self.call.split(" > "))) if self.call else ""
        place = f"{call} ({self.detail})" if call and self.detail else call
        if self.inside or not place:
            return place or "its own code"
        return f"its own code, inside {place}"


def summary(error: BaseException) -> str:
    """An exception in one line: of TensorFlow's reports of a graph, the line with the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Graph execution error"):
        causes = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)]
        lines = [*causes, *lines[1:], *lines]
    return f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _by_call(calls: dict[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for task in sorted(calls):
        groups.setdefault(calls[task], []).append(task)
    return groups


def odd_one(calls: dict[str, str]) -> str:
    """The one task whose call differs from that of all others; "" where that is not one alone."""
    groups = sorted(_by_call(calls).values(), key=len)
    return groups[0][0] if len(groups) == 2 and len(groups[0]) == 1 < len(groups[1]) else ""


def different_calls(calls: dict[str, str]) -> str:
    shown = [f"{', '.join(tasks)} in {call}" for call, tasks in _by_call(calls).items()]
    return (
        f"every worker must make the same calls in the same order, got {'; '.join(shown)}. Call"
        " fit, evaluate, predict, save and the like on every worker, not on one alone: all of them"
        " compute, and of save and export the chief writes the files."
    )
