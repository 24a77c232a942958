"""What a task reports of itself at the start, and which differences between tasks are errors."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

__all__ = ["TaskInfo", "differences", "info_of", "tasks_of"]

_PACKAGES = ("tensorflow", "keras", "tfdist_ext")  # of one version on all tasks


@dataclass(frozen=True)
class TaskInfo:
    """What a task reports of itself.

    Attributes:
        task: its name, as "worker:1".
        jobs: job -> addresses.
        versions: package -> version.
        devices: kind -> number, of what must be equal on all tasks that train.
    """

    task: str
    jobs: Mapping[str, Sequence[str]]
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)


def info_of(task: str, jobs: Mapping[str, Sequence[str]], devices: Mapping[str, int]) -> TaskInfo:
    """The report of this process, as this task."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return TaskInfo(task, jobs, versions, devices)


def tasks_of(jobs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Task -> address of the tasks that start together, the leader first; no evaluator."""
    return {
        f"{job}:{index}": address
        for job in ("chief", "worker", "ps")
        for index, address in enumerate(jobs.get(job, ()))
        if address
    }


def differences(leader: TaskInfo, other: TaskInfo) -> list[str]:
    """One sentence for each difference between a task and the leader."""
    found = []
    if where := _first_difference(leader.jobs, other.jobs):
        found.append(f"{other.task} was started with another cluster ({where})")
    for name, version in leader.versions.items():
        theirs = other.versions.get(name, "none")
        if theirs != version:
            found.append(f"{other.task} has {name} {theirs}, and {leader.task} has {version}")
    train = ("chief", "worker")
    if "ps" not in leader.jobs and all(c.task.split(":")[0] in train for c in (leader, other)):
        for kind in {*leader.devices, *other.devices}:
            here, there = leader.devices.get(kind, 0), other.devices.get(kind, 0)
            if here != there:
                found.append(
                    f"{other.task} has {there} {kind} devices, and {leader.task} has {here}:"
                    " collectives would hang"
                )
    return found


def _first_difference(
    ours: Mapping[str, Sequence[str]], theirs: Mapping[str, Sequence[str]]
) -> str:
    for job in dict.fromkeys([*ours, *theirs]):
        here, there = ours.get(job, ()), theirs.get(job, ())
        for index, (one, other) in enumerate(zip(here, there, strict=False)):
            if one != other:
                return f"differs in cluster.{job}[{index}]: {other!r}, not {one!r}"
        if len(here) != len(there):
            return f"differs in cluster.{job}: {len(there)} tasks, not {len(here)}"
    return ""
