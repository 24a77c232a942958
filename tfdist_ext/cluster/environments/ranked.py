"""Launchers that number the processes they start: mpirun of Open MPI, and srun of Slurm.

Rank r is on the r-th host. Each process checks its place on its host against this order, because a
cluster whose ranks and addresses disagree hangs without an error.

Open MPI provides ranks but no host names. On one machine all hosts are localhost. On several,
TFDIST_HOSTS has the hosts as mpirun's own --host takes them ("n1:2,n2:2").

Slurm numbers nodes as SLURM_STEP_NODELIST lists them. Ranks must be in blocks: node after node.
Neither scontrol nor nvidia-smi is needed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from tfdist_ext.cluster.environments import (
    ALONE,
    MAX_TASKS,
    local_ids,
    number,
    ranked_cluster,
    required,
)
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.messages import refuse, shown

_RANK = "OMPI_COMM_WORLD_RANK"
_SIZE = "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_BY_MPIRUN = (
    f"mpirun sets it: start all processes with mpirun, or unset {_RANK} to train in one process."
)
_SET_HOSTS = 'Pass the hosts to all ranks: mpirun --host n1:2,n2:2 -x TFDIST_HOSTS="n1:2,n2:2".'
_IN_ORDER = "List the host of each rank, in rank order, or start with mpirun --map-by slot."
# An entry of TFDIST_HOSTS: a host, and its number of ranks.
_ENTRY = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]:\s]+)(?::([0-9]{1,7}))?")
_IN_BLOCKS = "Start the step with srun --distribution=block."
_BY_SRUN = "srun sets it: start all tasks with srun, or unset SLURM_PROCID to train in one process."
# A step's ports start at one of 200 slots of 50 ports from 20000, so that steps that share a node
# seldom use the same port. All are below the ephemeral ports of Linux.
_FIRST_PORT, _SLOTS, _SLOT_SIZE = 20000, 200, 50
# Lists of hosts and of counts: "n[001-003,07],login" is n001, n002, n003, n07, login.
_RANGES = r"\[([0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*)\]"
_PART = re.compile(rf"{_RANGES}|([^\[\],\s]+)")
_ITEM = re.compile(rf"(?:{_RANGES}|[^\[\],\s])+")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def _check_place(
    env: Mapping[str, str], expected: Mapping[str, object], order: str, advice: str, where: str
) -> None:
    """Refuses a variable of the launcher with another value than the order of the hosts gives."""
    for name, value in expected.items():
        text = env.get(name, "").strip()
        if text not in ("", str(value)):
            raise refuse(where, f"{name} must be {shown(value)}{order}", text, advice)


def open_mpi(env: Mapping[str, str]) -> ClusterDescription | str:
    """The cluster of this mpirun: rank r is worker r."""
    if not env.get(_RANK):
        return f"{_RANK} is not set"
    where = "Open MPI"
    rank = number(env, _RANK, where, _BY_MPIRUN)
    total = number(env, _SIZE, where, _BY_MPIRUN, 1, MAX_TASKS)
    if rank >= total:
        what = f"{_RANK} must be below {_SIZE}, {total}"
        raise refuse(where, what, rank, _BY_MPIRUN)
    if total == 1:
        return ALONE
    hosts = _hosts_of_mpirun(env, total, where)
    expected = {_LOCAL_RANK: local_ids(hosts)[rank], _LOCAL_SIZE: hosts.count(hosts[rank])}
    _check_place(env, expected, f" for rank {rank}, according to TFDIST_HOSTS", _IN_ORDER, where)
    return ranked_cluster(env, hosts, rank, f"Open MPI ({_RANK}={rank})")


def _hosts_of_mpirun(env: Mapping[str, str], total: int, where: str) -> list[str]:
    text = env.get("TFDIST_HOSTS", "").strip()
    if not text:
        if env.get(_LOCAL_SIZE, "").strip() == str(total):
            return ["localhost"] * total
        what = f"TFDIST_HOSTS is not set, and not all {total} ranks run on this machine"
        received = {_LOCAL_SIZE: env.get(_LOCAL_SIZE), _SIZE: str(total)}
        raise refuse(where, what, received, _SET_HOSTS)
    slots: list[tuple[str, int]] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or match[2] == "0":
            what = f"TFDIST_HOSTS has the invalid entry {shown(entry)}"
            raise refuse(where, what, text, 'Write host or host:slots, as in "n1:2,n2:2".')
        slots.append((match[1], int(match[2] or 1)))
    count = sum(slot_count for _, slot_count in slots)
    if count != total:
        what = f"TFDIST_HOSTS has {count} slots, but {_SIZE} is {total}"
        advice = "Write the number of ranks after each host, not a port (set TFDIST_PORT_BASE)."
        raise refuse(where, what, text, advice)
    return [host for host, slot_count in slots for _ in range(slot_count)]


def slurm(env: Mapping[str, str]) -> ClusterDescription | str:
    """The cluster of this step: rank r is worker r."""
    if not env.get("SLURM_PROCID"):
        return "SLURM_PROCID is not set"
    if not env.get("SLURM_STEP_NODELIST"):
        # A batch script has SLURM_PROCID=0 too, but is not one of several tasks.
        return "SLURM_STEP_NODELIST is not set: not inside an srun step"
    where = _slurm_source(env)
    rank = number(env, "SLURM_PROCID", where, _BY_SRUN)
    listed = required(env, "SLURM_STEP_NODELIST", where, _BY_SRUN)
    hosts = expand_hosts(listed, "SLURM_STEP_NODELIST", where)
    per_node = required(env, "SLURM_STEP_TASKS_PER_NODE", where, _BY_SRUN)
    counts = expand_counts(per_node, "SLURM_STEP_TASKS_PER_NODE", where)
    _check_totals(env, hosts, counts, rank, where)
    if sum(counts) == 1:
        return ALONE
    # The order of `srun --distribution=block`, the default: node after node.
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    node = nodes[rank]
    ranks = [other for other in range(len(nodes)) if nodes[other] == node]
    expected = {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(ranks.index(rank)),
        "SLURM_GTIDS": ",".join(map(str, ranks)),
        "SLURMD_NODENAME": hosts[node],
    }
    _check_place(env, expected, ", as in a block distribution", _IN_BLOCKS, where)
    return ranked_cluster(env, [hosts[node] for node in nodes], rank, where, _port_base(env, where))


def _slurm_source(env: Mapping[str, str]) -> str:
    job = env.get("SLURM_JOB_ID", "").strip()
    return f"Slurm (SLURM_JOB_ID={job})" if job.isdigit() and len(job) < 20 else "Slurm"


def _check_totals(
    env: Mapping[str, str], hosts: list[str], counts: list[int], rank: int, where: str
) -> None:
    if len(hosts) != len(counts):
        names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
        what = f"{names[0]} must have one host for each count in {names[1]}"
        values = tuple(env[name] for name in names)
        raise refuse(where, what, values, "Leave both as srun set them.")
    total = sum(counts)
    if rank >= total:
        what = f"SLURM_PROCID must be below {total}, the number of tasks in the step"
        advice = "Start all tasks in one srun step that is not heterogeneous."
        raise refuse(where, what, rank, advice)


def _port_base(env: Mapping[str, str], where: str) -> int:
    """The first port of this step's slot, which has _SLOT_SIZE of them."""
    job, step = (
        number(env, name, where, _BY_SRUN) if env.get(name) else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    return _FIRST_PORT + (job * 7 + step) % _SLOTS * _SLOT_SIZE


def expand_hosts(text: str, name: str, where: str) -> list[str]:
    """The host names of a list, in the order written; a range keeps its zero padding.

    Slurm numbers the nodes of a step in this order. Sorted as text, node10 would come before node2.

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
