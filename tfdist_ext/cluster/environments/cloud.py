"""Clouds: the hosts of a SageMaker training job, and a TPU of Google Cloud."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster.environments import ALONE, ranked_cluster, required
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.cluster.tf_config import load_json
from tfdist_ext.messages import refuse

_AS_SET = 'SageMaker sets it: SM_HOSTS=["algo-1","algo-2"], SM_CURRENT_HOST=algo-1.'


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
        raise refuse(where, "SM_HOSTS must have each host once", text, "List each host once.")
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
    found = {option: env.get(name, "").strip() for option, name in variables.items()}
    return {option: value for option, value in found.items() if value}
