"""Which tasks run on which machine: pure arithmetic, the same on every node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.plan import tasks_of

__all__ = ["Layout", "parse_endpoint", "parse_places"]

_PLACED = ("chief", "ps", "evaluator", "data_worker")
_PLACE = re.compile(r"([a-z_-]+)=(\d+(?:,\d+)*)")
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class Layout:
    """The tasks of a run on several machines.

    Worker i runs on node i // workers_per_node. Servers and data workers take turns on the nodes,
    from node 0 on; the chief is on node 0, the evaluator on the last node.

    Attributes:
        nodes: how many machines.
        workers_per_node: how many workers on each.
        chief, ps, evaluator, data_workers: as in `plan_local`.
        places: job -> the node of each of its tasks, for those that are elsewhere.

    Raises:
        LaunchError: tasks that make no cluster, or a place that does not exist.
    """

    nodes: int
    workers_per_node: int
    chief: bool | None = None
    ps: int = 0
    evaluator: bool = False
    data_workers: int = 0
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("workers_per_node", 0)):
            value = getattr(self, name)
            if value < least:
                option = f"--{name.replace('_', '-')}"
                raise LaunchError(f"{option} must be a number of at least {least}, got {value}")
        counts = self._counts
        for job, nodes in self.places.items():
            if job not in _PLACED:
                raise LaunchError(
                    f"--place must name one of {', '.join(_PLACED)}, got {job!r}; workers are"
                    " placed by --workers-per-node"
                )
            if len(nodes) != counts.get(job, 0):
                raise LaunchError(
                    f"--place {job}={','.join(map(str, nodes))} must name a node for each of its"
                    f" {counts.get(job, 0)} tasks, got {len(nodes)}; change one of the two"
                )
            if not all(0 <= node < self.nodes for node in nodes):
                raise LaunchError(
                    f"--place {job} must name nodes from 0 to {self.nodes - 1}, got {list(nodes)}"
                )

    @property
    def workers(self) -> int:
        """How many workers there are when all machines are there."""
        return self.nodes * self.workers_per_node

    @property
    def _counts(self) -> dict[str, int]:
        return tasks_of(
            workers=self.workers,
            chief=self.chief,
            ps=self.ps,
            evaluator=self.evaluator,
            data_workers=self.data_workers,
        )

    def nodes_of(self, workers: Sequence[int]) -> dict[str, list[int]]:
        """Job -> the node of each of its tasks.

        Args:
            workers: those that take part, each by its number among all.
        """
        found = {}
        for job, count in self._counts.items():
            turns = [index % self.nodes for index in range(count)]
            last = [self.nodes - 1] * count
            usual = last if job == "evaluator" else turns
            found[job] = list(self.places.get(job, usual))
        if workers or "worker" in found:
            found["worker"] = [worker // self.workers_per_node for worker in workers]
        return {job: nodes for job, nodes in found.items() if nodes}

    def workers_without(self, nodes: Sequence[int], workers: Sequence[int]) -> tuple[int, ...]:
        """Those of some workers that are on other nodes than these."""
        return tuple(each for each in workers if each // self.workers_per_node not in nodes)

    @property
    def needed(self) -> frozenset[int]:
        """The nodes without which there is no run: they have tasks that are not workers."""
        others = self.nodes_of(())
        return frozenset(node for nodes in others.values() for node in nodes) | {0}

    @property
    def described(self) -> dict[str, object]:
        """What must be the same on all machines, as JSON has it."""
        places = {job: list(nodes) for job, nodes in sorted(self.places.items())}
        return {
            "--nodes": self.nodes,
            "--workers-per-node": self.workers_per_node,
            "--chief": self.chief,
            "--ps": self.ps,
            "--evaluator": self.evaluator,
            "--data-workers": self.data_workers,
            "--place": places,
        }


def parse_places(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Of words as "ps=1,2".

    Raises:
        LaunchError: another word.
    """
    places: dict[str, tuple[int, ...]] = {}
    for word in words:
        match = _PLACE.fullmatch(word)
        if match is None:
            raise LaunchError(f"--place must be a job and its nodes, as in ps=1,2, got {word!r}")
        job = match[1].replace("-", "_")
        places[job] = tuple(int(node) for node in match[2].split(","))
    return places


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; an IPv6 address stands in brackets there, and has none here.

    Raises:
        LaunchError: another text.
    """
    match = _ENDPOINT.fullmatch(text.strip())
    port = int(match[2]) if match else 0
    if match is None or not 1 <= port < 65536:
        raise LaunchError(
            f"--rendezvous must be HOST:PORT, got {text!r}; HOST is a name or address of node 0 by"
            " which the others reach it"
        )
    return match[1].strip("[]"), port
