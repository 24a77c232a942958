"""What the environments share: their common shape, and how they read a variable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfdist_ext.cluster import layout
from tfdist_ext.cluster.jobs import MAX_INDEX, ClusterDescription, Jobs, Task
from tfdist_ext.messages import refuse

# Below the range from which Linux hands out ports by itself, and not 2222, where MPI's sshd may be.
DEFAULT_PORT_BASE = 22222
ALONE = "1 task: no cluster needed"


@dataclass(frozen=True)
class Environment:
    """One place that may describe a cluster.

    Attributes:
        name: as a person calls it.
        variables: every variable it reads.
        parse: the cluster it describes, or in a few words why it is passed over. A pure function of
            the mapping; raises ClusterConfigError where it is present but cannot be right.
    """

    name: str
    variables: tuple[str, ...]
    parse: Callable[[Mapping[str, str]], ClusterDescription | str]

    def detect(self, env: Mapping[str, str]) -> ClusterDescription | None:
        """The cluster this environment describes, or None where there is none.

        Raises:
            ClusterConfigError: the environment is present, but what it says cannot be right.
        """
        found = self.parse(env)
        return found if isinstance(found, ClusterDescription) else None


def number(env: Mapping[str, str], name: str, where: str, advice: str) -> int:
    """A variable that is a whole number from 0 up; `advice` says how it comes to be set."""
    text = required(env, name, where, advice)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise refuse(where, f"{name} is not a whole number", text, advice)
    return int(text)


def size(env: Mapping[str, str], name: str, where: str, advice: str) -> int:
    """A variable that is the number of tasks: at least 1."""
    count = number(env, name, where, advice)
    if not 1 <= count <= MAX_INDEX:
        raise refuse(where, f"{name} is not a possible number of tasks", count, advice)
    return count


def required(env: Mapping[str, str], name: str, where: str, advice: str) -> str:
    """A variable that has to be there, without the white space around it."""
    text = env.get(name, "").strip()
    if not text:
        raise refuse(where, f"{name} is not set", env.get(name), advice)
    return text


def worker_cluster(
    env: Mapping[str, str], hosts: Sequence[str], rank: int, source: str, port_base: int
) -> ClusterDescription:
    """Rank r is worker r, on hosts[r]; ports count up from TFDIST_PORT_BASE, or `port_base`."""
    last = max(layout.local_ids(hosts))
    if env.get("TFDIST_PORT_BASE", "").strip():
        advice = f"Set it to a port from 1 to {65535 - last}, or unset it for {port_base}."
        port_base = number(env, "TFDIST_PORT_BASE", source, advice)
        if not 1 <= port_base <= 65535 - last:
            what = f"TFDIST_PORT_BASE leaves no room for {last + 1} ports"
            raise refuse(source, what, port_base, advice)
    workers = layout.addresses(hosts, port_base)
    jobs = Jobs({"worker": workers}, source)
    return ClusterDescription(jobs, Task("worker", rank), source)
