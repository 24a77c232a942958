"""What the environments share: how they read a variable, and make a cluster.

`cluster.config` has the table of the readers: `ranked` and `cloud` have most of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tfdist_ext.cluster.jobs import JOB_NAMES, ClusterDescription, Jobs, Task
from tfdist_ext.messages import refuse

# The variable with the roles of numbered tasks, as "chief=1,worker=2,ps=1".
TASKS = "TFDIST_TASKS"
SET_TASKS = 'Write job=number of tasks, as in "chief=1,worker=2,ps=1,evaluator=1".'

# Below the ephemeral ports of Linux. Not 2222, where MPI's sshd may listen.
DEFAULT_PORT_BASE = 22222
ALONE = "1 task: no cluster needed"
MAX_TASKS = 1_000_000  # a larger number is a typing error, and would cost memory


def number(
    env: Mapping[str, str], name: str, where: str, advice: str, low: int = 0, high: int = 10**18
) -> int:
    """A variable that is a whole number in [low, high]; `advice` says how to set it."""
    text = required(env, name, where, advice)
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and low <= int(text) <= high):
        limits = f" from {low} to {high}" if low else ""
        raise refuse(where, f"{name} must be a whole number{limits}", text, advice)
    return int(text)


def required(env: Mapping[str, str], name: str, where: str, advice: str) -> str:
    """A required variable, without the white space around it."""
    text = env.get(name, "").strip()
    if not text:
        raise refuse(where, f"{name} is not set", env.get(name), advice)
    return text


def listed_counts(env: Mapping[str, str], where: str) -> dict[str, int]:
    """Job -> its number of tasks in TFDIST_TASKS."""
    counts: dict[str, int] = {}
    for entry in env[TASKS].split(","):
        job, _, count = (word.strip() for word in entry.partition("="))
        known = job in JOB_NAMES and job not in counts
        digits = count.isascii() and count.isdigit() and len(count) <= 7
        if not known or not digits or not 1 <= int(count) <= MAX_TASKS:
            what = f"{TASKS} must list job=number, each of {', '.join(JOB_NAMES)} at most once"
            raise refuse(where, what, env[TASKS], SET_TASKS)
        counts[job] = int(count)
    return counts


def ranked_cluster(
    env: Mapping[str, str],
    hosts: Sequence[str],
    rank: int,
    source: str,
    port_base: int = DEFAULT_PORT_BASE,
) -> ClusterDescription:
    """The cluster of numbered tasks; rank r is on hosts[r].

    TFDIST_TASKS gives the roles of the ranks, in order. Without it, all tasks are workers. The
    ports of a host count up from TFDIST_PORT_BASE, or `port_base`.
    """
    if not env.get(TASKS, "").strip():
        return cluster_at(env, {"worker": hosts}, Task("worker", rank), source, port_base)
    counts = listed_counts(env, source)
    if sum(counts.values()) != len(hosts):
        what = f"{TASKS} must add up to {len(hosts)}, the number of tasks started"
        raise refuse(source, what, env[TASKS], SET_TASKS)
    tasks = [Task(job, index) for job, count in counts.items() for index in range(count)]
    by_job = {
        job: [host for host, task in zip(hosts, tasks, strict=True) if task.type == job]
        for job in counts
    }
    return cluster_at(env, by_job, tasks[rank], source, port_base)


def seen_by(job: str, hosts: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The jobs of the cluster that a task of this job sees.

    Only the evaluator sees itself: TensorFlow trains on a single worker where the cluster of a
    MultiWorkerMirroredStrategy names an evaluator.
    """
    return {name: hosts[name] for name in hosts if name != "evaluator" or job == "evaluator"}


def cluster_at(
    env: Mapping[str, str],
    hosts: Mapping[str, Sequence[str]],
    task: Task,
    source: str,
    port_base: int = DEFAULT_PORT_BASE,
) -> ClusterDescription:
    """The cluster that a task sees, of all hosts by job; ports as in `ranked_cluster`."""
    all_hosts = [host for job_hosts in hosts.values() for host in job_hosts]
    local = local_ids(all_hosts)
    last = max(local)
    if env.get("TFDIST_PORT_BASE", "").strip():
        advice = f"Set it to a port from 1 to {65535 - last}, or unset it for {port_base}."
        port_base = number(env, "TFDIST_PORT_BASE", source, advice, 1, 65535 - last)
    addresses = (f"{host}:{port_base + n}" for host, n in zip(all_hosts, local, strict=True))
    jobs = {job: [next(addresses) for _ in job_hosts] for job, job_hosts in hosts.items()}
    return ClusterDescription(Jobs(seen_by(task.type, jobs), source), task, source)


def local_ids(places: Iterable[object]) -> list[int]:
    """For each rank, how many earlier ranks are in the same place."""
    before: Counter[object] = Counter()
    ids: list[int] = []
    for place in places:
        ids.append(before[place])
        before[place] += 1
    return ids
