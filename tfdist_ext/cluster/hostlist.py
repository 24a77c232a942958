"""Slurm's compact lists: "n[001-003,07],login" is n001, n002, n003, n07, login.

The order is the one written, which is the order in which Slurm numbers the nodes of a step. Sorting
the names as text would put node10 before node2 and give tasks the addresses of others.
"""

from __future__ import annotations

import itertools
import re

from tfdist_ext.messages import refuse, shown

_RANGES = r"\[([0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*)\]"
_PART = re.compile(rf"{_RANGES}|([^\[\],\s]+)")
_ITEM = re.compile(rf"(?:{_RANGES}|[^\[\],\s])+")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand_hosts(text: str, name: str, where: str) -> list[str]:
    """The host names of a list, in the order written; a range keeps its zero padding.

    Args:
        text: the list, for example "rack[0-1]n[2,10]".
        name: the variable it came from, for messages.
        where: the environment it came from, for messages.

    Raises:
        ClusterConfigError: brackets that do not match, an empty name, a range that runs backwards.
    """
    hosts: list[str] = []
    items = [match[0] for match in _ITEM.finditer(text)]
    if not items or ",".join(items) != text:
        advice = 'Write it as Slurm does: "n[001-003,07],login".'
        raise refuse(where, f"{name} is not a host list", text, advice)
    for item in items:
        parts = [
            _expand_ranges(part[1], text, name, where) if part[1] else [part[2]]
            for part in _PART.finditer(item)
        ]
        # As Slurm does, the last bracket runs fastest: r0n0, r0n1, r1n0, r1n1.
        hosts.extend(map("".join, itertools.product(*parts)))
    return hosts


def expand_counts(text: str, name: str, where: str) -> list[int]:
    """Tasks of each node: "2(x3),1" is [2, 2, 2, 1].

    Raises:
        ClusterConfigError: not such a list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise refuse(where, f"{name} must be a list of counts", text, 'Write it as "2(x3),1".')
        count, times = int(match[1]), int(match[2] or 1)
        counts.extend([count] * times)
    return counts


def _expand_ranges(ranges: str, text: str, name: str, where: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        low, _, high = item.partition("-")
        first, last = int(low), int(high or low)
        if last < first:
            what = f"{name} has the range {shown(item)}"
            raise refuse(where, what, text, 'Write ranges upwards: "[001-003,07]".')
        numbers.extend(str(n).zfill(len(low)) for n in range(first, last + 1))
    return numbers
