"""What the environments share: how they read a variable, and make a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist_ext.cluster import layout
from tfdist_ext.cluster.jobs import MAX_INDEX, ClusterDescription, Jobs, Task
from tfdist_ext.messages import refuse

# Below the range from which Linux hands out ports by itself, and not 2222, where MPI's sshd may be.
DEFAULT_PORT_BASE = 22222
ALONE = "1 task: no cluster needed"


def number(env: Mapping[str, str], name: str, where: str, advice: str) -> int:
    """A variable that is a whole number from 0 up; `advice` says how it comes to be set."""
    text = required(env, name, where, advice)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise refuse(where, f"{name} must be a whole number", text, advice)
    return int(text)


def size(env: Mapping[str, str], name: str, where: str, advice: str) -> int:
    """A variable that is the number of tasks: at least 1."""
    count = number(env, name, where, advice)
    if not 1 <= count <= MAX_INDEX:
        raise refuse(where, f"{name} must be a possible number of tasks", count, advice)
    return count


def required(env: Mapping[str, str], name: str, where: str, advice: str) -> str:
    """A variable that has to be there, without the white space around it."""
    text = env.get(name, "").strip()
    if not text:
        raise refuse(where, f"{name} is not set", env.get(name), advice)
    return text


def worker_cluster(
    env: Mapping[str, str],
    hosts: Sequence[str],
    rank: int,
    source: str,
    port_base: int = DEFAULT_PORT_BASE,
) -> ClusterDescription:
    """Rank r is worker r, on hosts[r]; ports count up from TFDIST_PORT_BASE, or `port_base`."""
    return cluster_at(env, {"worker": hosts}, Task("worker", rank), source, port_base)


def cluster_at(
    env: Mapping[str, str],
    hosts: Mapping[str, Sequence[str]],
    task: Task,
    source: str,
    port_base: int = DEFAULT_PORT_BASE,
) -> ClusterDescription:
    """The cluster of tasks on these hosts, by job; ports as in `worker_cluster`."""
    everyone = [host for of_job in hosts.values() for host in of_job]
    last = max(layout.local_ids(everyone))
    if env.get("TFDIST_PORT_BASE", "").strip():
        advice = f"Set it to a port from 1 to {65535 - last}, or unset it for {port_base}."
        port_base = number(env, "TFDIST_PORT_BASE", source, advice)
        if not 1 <= port_base <= 65535 - last:
            what = f"TFDIST_PORT_BASE must leave room for {last + 1} ports"
            raise refuse(source, what, port_base, advice)
    addresses = iter(layout.addresses(everyone, port_base))
    jobs = {job: [next(addresses) for _ in of_job] for job, of_job in hosts.items()}
    return ClusterDescription(Jobs(jobs, source), task, source)
