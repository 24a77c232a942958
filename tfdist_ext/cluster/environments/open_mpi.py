"""Open MPI: the processes of one mpirun. Open MPI provides ranks but no host names.

On one machine all hosts are localhost. On several, TFDIST_HOSTS has the hosts as mpirun's own
--host takes them ("n1:2,n2:2"), and each process compares them with its local rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist_ext.cluster.environments import ALONE, MAX_TASKS, local_ids, number, ranked_cluster
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
_ENTRY = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]:\s]+)(?::([0-9]{1,7}))?")


def parse(env: Mapping[str, str]) -> ClusterDescription | str:
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
    hosts = _hosts(env, total, where)
    expected = {_LOCAL_RANK: local_ids(hosts)[rank], _LOCAL_SIZE: hosts.count(hosts[rank])}
    for name, value in expected.items():
        if env.get(name) and number(env, name, where, _BY_MPIRUN) != value:
            what = f"{name} must be {value} for rank {rank}, according to TFDIST_HOSTS"
            raise refuse(where, what, env[name], _IN_ORDER)
    return ranked_cluster(env, hosts, rank, f"Open MPI ({_RANK}={rank})")


def _hosts(env: Mapping[str, str], total: int, where: str) -> list[str]:
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
