"""Where a cluster can be described: the table of environments, in order of precedence.

TF_CONFIG is first, because somebody wrote it on purpose. Then the launcher nearest to the process:
mpirun inside a Slurm step or a container numbers its processes anew, so its ranks are the true
ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster import tpu
from tfdist_ext.cluster.environments.kubernetes import KUBERNETES
from tfdist_ext.cluster.environments.open_mpi import OPEN_MPI
from tfdist_ext.cluster.environments.reading import Environment
from tfdist_ext.cluster.environments.sagemaker import SAGEMAKER
from tfdist_ext.cluster.environments.slurm import SLURM
from tfdist_ext.cluster.environments.tf_config_variable import TF_CONFIG
from tfdist_ext.cluster.jobs import ClusterDescription
from tfdist_ext.errors import ClusterConfigError
from tfdist_ext.messages import counted

__all__ = ["ENVIRONMENTS", "Environment", "describe_environments", "detect"]

ENVIRONMENTS: tuple[Environment, ...] = (TF_CONFIG, OPEN_MPI, SLURM, SAGEMAKER, KUBERNETES)


def detect(env: Mapping[str, str]) -> ClusterDescription | None:
    """The cluster of the first environment that describes one, or None.

    Raises:
        ClusterConfigError: an environment is present, but what it says cannot be right.
    """
    for environment in ENVIRONMENTS:
        cluster = environment.detect(env)
        if cluster is not None:
            return cluster
    return None


def describe_environments(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """What each environment says, in order of precedence, the TPU last. Never raises.

    Returns:
        Pairs of an environment's name and what was found there, or why it was passed over, for
        example ("Slurm", "SLURM_PROCID is not set").
    """
    lines: list[tuple[str, str]] = []
    for environment in ENVIRONMENTS:
        try:
            found = environment.parse(env)
        except ClusterConfigError as error:
            found = f"cannot be used: {error}"
        if isinstance(found, ClusterDescription):
            found = f"{found.task} of {counted(found.num_tasks, 'task')}, from {found.source}"
        lines.append((environment.name, found))
    return [*lines, (tpu.NAME, tpu.describe(env))]
