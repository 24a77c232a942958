"""Clouds: Kubernetes, a SageMaker training job, and a TPU of Google Cloud.

On Kubernetes each pod of an indexed Job or of a JobSet is a task. Kubernetes tells a pod its index
(JOB_COMPLETION_INDEX) and calls it <job>-<index>. A JobSet calls its Jobs <jobset>-<name>-<number>.
The manifest has to say how many pods there are, and which Service resolves their names.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster.environments import (
    ALONE,
    MAX_TASKS,
    SET_TASKS,
    TASKS,
    cluster_at,
    listed_counts,
    number,
    ranked_cluster,
    required,
)
from tfdist_ext.cluster.jobs import ClusterDescription, Task
from tfdist_ext.cluster.tf_config import load_json
from tfdist_ext.messages import refuse

_INDEX = "JOB_COMPLETION_INDEX"
_SET_SIZE = (
    "Set it in the container's env to spec.completions of the Job;"
    f" to train each pod by itself, unset {_INDEX}."
)
_SET_SERVICE = (
    "Set it in the container's env to the headless Service, the subdomain of the pod template."
)
_SET_JOB = "Set TFDIST_JOB_NAME in the container's env to metadata.name of the Job."
_SET_ROLE = (
    f"Name each replicatedJob after its job in {TASKS}, with replicas: 1; if HOSTNAME differs"
    " (hostNetwork), set TFDIST_JOB_NAME to <jobset>-<job>-0."
)
_AS_SET = 'SageMaker sets it: SM_HOSTS=["algo-1","algo-2"], SM_CURRENT_HOST=algo-1.'


def kubernetes(env: Mapping[str, str]) -> ClusterDescription | str:
    """The cluster of this Job, or JobSet: the pod with index n is task n of its job."""
    if not env.get(_INDEX):
        return f"{_INDEX} is not set"
    by_kubernetes = "Kubernetes sets it in Jobs with completionMode: Indexed."
    index = number(env, _INDEX, "Kubernetes", by_kubernetes)
    where = f"Kubernetes ({_INDEX}={index})"
    if env.get(TASKS, "").strip():
        return _jobset(env, index)
    total = number(env, "TFDIST_JOB_SIZE", where, _SET_SIZE, 1, MAX_TASKS)
    if index >= total:
        what = f"{_INDEX} must be below TFDIST_JOB_SIZE, {total}"
        raise refuse(where, what, index, _SET_SIZE)
    if total == 1:
        return ALONE
    service = required(env, "TFDIST_JOB_SERVICE", where, _SET_SERVICE)
    job = _job_name(env, index, where)
    hosts = [f"{job}-{n}.{service}" for n in range(total)]
    return cluster_at(env, {"worker": hosts}, Task("worker", index), where)


def _jobset(env: Mapping[str, str], index: int) -> ClusterDescription:
    where = f"Kubernetes (JobSet, {_INDEX}={index})"
    sizes = listed_counts(env, where)
    child = _job_name(env, index, where)
    jobset, _, job = child.removesuffix("-0").rpartition("-")
    if not child.endswith("-0") or job not in sizes or not jobset:
        what = f"the name of the pod must be <jobset>-<job>-0-{index}, for a job in {TASKS}"
        raise refuse(where, what, f"{child}-{index}", _SET_ROLE)
    if index >= sizes[job]:
        what = f"{_INDEX} must be below the number of {job} tasks in {TASKS}, {sizes[job]}"
        raise refuse(where, what, index, SET_TASKS)
    service = env.get("TFDIST_JOB_SERVICE", "").strip() or jobset
    hosts = {
        role: [f"{jobset}-{role}-0-{n}.{service}" for n in range(count)]
        for role, count in sizes.items()
    }
    source = f"Kubernetes (JobSet {jobset}, {job}:{index})"
    return cluster_at(env, hosts, Task(job, index), source)


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


def sagemaker(env: Mapping[str, str]) -> ClusterDescription | str:
    """The cluster of this job: the n-th of SM_HOSTS is worker n (it is the same on every host)."""
    text = env.get("SM_HOSTS", "").strip()
    if not text:
        return "SM_HOSTS is not set"
    where = "SageMaker"
    hosts = load_json(text, f"{where}: SM_HOSTS")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
        raise refuse(where, "SM_HOSTS must be a JSON list of host names", text, _AS_SET)
    current = required(env, "SM_CURRENT_HOST", where, _AS_SET)
    if len(set(hosts)) < len(hosts):
        raise refuse(where, "SM_HOSTS must not repeat a host", text, "List each host once.")
    if current not in hosts:
        raise refuse(where, "SM_CURRENT_HOST must be one of SM_HOSTS", current, _AS_SET)
    if len(hosts) == 1:
        return ALONE
    source = f"SageMaker (SM_CURRENT_HOST={current})"
    return ranked_cluster(env, hosts, hosts.index(current), source)


def tpu_settings(env: Mapping[str, str]) -> dict[str, str]:
    """What the environment says of a TPU, as options of the strategy `tpu`.

    A TPU is reached through its own resolver: it has no ClusterConfig.

    Returns:
        "tpu": the name or address in TPU_NAME, or "local" on a TPU VM; "zone" and "project" if
        TPU_ZONE and TPU_PROJECT are set. Empty without TPU_NAME.
    """
    if not env.get("TPU_NAME", "").strip():
        return {}
    variables = {"tpu": "TPU_NAME", "zone": "TPU_ZONE", "project": "TPU_PROJECT"}
    settings = {option: env.get(name, "").strip() for option, name in variables.items()}
    return {option: value for option, value in settings.items() if value}
