"""Where a cluster can be described: the table of environments, in order of precedence.

TF_CONFIG is first, because somebody wrote it on purpose. Then the launcher nearest to the process:
mpirun inside a Slurm step or a container numbers its processes anew, so its ranks are the true
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfdist_ext.cluster import tf_config
from tfdist_ext.cluster.environments import kubernetes, open_mpi, sagemaker, slurm
from tfdist_ext.cluster.jobs import ClusterDescription

# Each parser returns the cluster, or says in a few words why the environment is passed over. It
# raises ClusterConfigError if the environment is present but cannot be right.
ENVIRONMENTS: dict[str, Callable[[Mapping[str, str]], ClusterDescription | str]] = {
    "TF_CONFIG": tf_config.parse_variable,
    "Open MPI": open_mpi.parse,
    "Slurm": slurm.parse,
    "SageMaker": sagemaker.parse,
    "Kubernetes": kubernetes.parse,
}
