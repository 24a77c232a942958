"""Kubernetes: the pods of an indexed Job behind a headless Service, one task each.

Kubernetes tells a pod its index (JOB_COMPLETION_INDEX) and calls it <job>-<index>. It does not tell
how many pods there are, nor the Service their names are looked up in: the manifest has to.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster.environments.reading import ALONE, number, required, size, worker_cluster
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.messages import refuse

_INDEX = "JOB_COMPLETION_INDEX"
_SET_SIZE = (
    "Set it in the container's env to spec.completions of the Job;"
    f" pods that work alone unset {_INDEX}."
)
_SET_SERVICE = (
    "Set it in the container's env to the headless Service, the subdomain of the pod template."
)
_SET_JOB = "Set TFDIST_JOB_NAME in the container's env to metadata.name of the Job."


def parse(env: Mapping[str, str]) -> ClusterDescription | str:
    """The cluster of this Job: the pod with index n is worker n."""
    if not env.get(_INDEX):
        return f"{_INDEX} is not set"
    by_kubernetes = "Kubernetes sets it in Jobs with completionMode: Indexed."
    index = number(env, _INDEX, "Kubernetes", by_kubernetes)
    where = f"Kubernetes ({_INDEX}={index})"
    total = size(env, "TFDIST_JOB_SIZE", where, _SET_SIZE)
    if index >= total:
        what = f"{_INDEX} must be below TFDIST_JOB_SIZE, {total}"
        raise refuse(where, what, index, _SET_SIZE)
    if total == 1:
        return ALONE
    service = required(env, "TFDIST_JOB_SERVICE", where, _SET_SERVICE)
    job = _job_name(env, index, where)
    hosts = [f"{job}-{n}.{service}" for n in range(total)]
    return worker_cluster(env, hosts, index, where)


def _job_name(env: Mapping[str, str], index: int, where: str) -> str:
    name = env.get("TFDIST_JOB_NAME", "").strip()
    if name:
        return name
    hostname = env.get("HOSTNAME", "").strip()
    job = hostname.removesuffix(f"-{index}")
    if not job or job == hostname:
        # With hostNetwork, HOSTNAME is the name of the machine.
        raise refuse(where, f"HOSTNAME must be <job>-{index}", env.get("HOSTNAME"), _SET_JOB)
    return job
