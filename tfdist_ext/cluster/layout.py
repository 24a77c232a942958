"""Which rank runs where, and the address that follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def nodes_by_rank(counts: Sequence[int], chunk: int | None) -> list[int]:
    """The node of each rank, when `counts[i]` tasks run on node i.

    Nodes are visited round and round, and take `chunk` tasks a visit as long as they have room:
    1 is Slurm's cyclic distribution, n its plane distribution with planes of n tasks, None fills
    node after node, its block distribution (after `_task_layout_*` in slurm_step_layout.c).
    """
    left = list(counts)
    step = max(left, default=0) if chunk is None else chunk
    ranks: list[int] = []
    open_nodes = [node for node, count in enumerate(left) if count]
    while open_nodes:
        for node in open_nodes:
            take = min(step, left[node])
            ranks.extend([node] * take)
            left[node] -= take
        open_nodes = [node for node in open_nodes if left[node]]
    return ranks


def local_ids(places: Iterable[object]) -> list[int]:
    """For each rank, how many earlier ranks are in the same place."""
    before: Counter[object] = Counter()
    ids: list[int] = []
    for place in places:
        ids.append(before[place])
        before[place] += 1
    return ids


def addresses(hosts: Sequence[str], port_base: int) -> tuple[str, ...]:
    """An address for each rank, from the host of each rank: the n-th on a host gets base + n."""
    local = local_ids(hosts)
    return tuple(f"{host}:{port_base + n}" for host, n in zip(hosts, local, strict=True))
