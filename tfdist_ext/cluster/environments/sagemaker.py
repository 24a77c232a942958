"""SageMaker: the hosts of a training job, one task each."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster.environments.reading import ALONE, ranked_cluster, required
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.cluster.tf_config import load_json
from tfdist_ext.messages import refuse

_AS_SET = 'SageMaker sets it: SM_HOSTS=["algo-1","algo-2"], SM_CURRENT_HOST=algo-1.'


def parse(env: Mapping[str, str]) -> ClusterDescription | str:
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
        raise refuse(where, "SM_HOSTS must have each host once", text, "List each host once.")
    if current not in hosts:
        raise refuse(where, "SM_CURRENT_HOST must be one of SM_HOSTS", current, _AS_SET)
    if len(hosts) == 1:
        return ALONE
    source = f"SageMaker (SM_CURRENT_HOST={current})"
    return ranked_cluster(env, hosts, hosts.index(current), source)
