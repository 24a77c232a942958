"""Slurm: a tfdist on each node of an allocation, started by srun."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist_ext.cluster.environments import slurm
from tfdist_ext.cluster.hostlist import expand_counts, expand_hosts
from tfdist_ext.errors import LaunchError

__all__ = ["Allocation", "srun_command"]

_WHERE = "Slurm"
_INSIDE = "start it inside of sbatch or salloc, or without --slurm"


@dataclass(frozen=True)
class Allocation:
    """The nodes of a Slurm job, as one of its processes sees them.

    Attributes:
        nodes: how many.
        node: the number of this one in a step with a task on each node; None outside of a step.
        rendezvous: "HOST:PORT" on the first node, the same for all processes of a step.
        tasks_per_node: as the job asked for; None where it did not say.
    """

    nodes: int
    node: int | None
    rendezvous: str
    tasks_per_node: int | None

    @classmethod
    def of_environment(cls, env: Mapping[str, str]) -> Allocation:
        """Of the variables that Slurm sets.

        Raises:
            LaunchError: no Slurm job, or a step with several tasks on a node.
            ClusterConfigError: variables that cannot be right.
        """
        in_step = bool(env.get("SLURM_STEP_NODELIST"))
        name = "SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST"
        listed = env.get(name, "").strip()
        if not listed:
            raise LaunchError(
                f"--slurm must be in a job of Slurm, got no SLURM_JOB_NODELIST; {_INSIDE}"
            )
        hosts = expand_hosts(listed, name, _WHERE)
        node = None
        if in_step:
            name = "SLURM_STEP_TASKS_PER_NODE"
            counts = expand_counts(env.get(name, "1"), name, _WHERE)
            if set(counts) != {1}:
                raise LaunchError(
                    "--slurm must be started once on each node, got a step with"
                    f" {env[name]} tasks per node; leave out srun, which"
                    " tfdist starts itself, or add --ntasks-per-node=1"
                )
            node = int(env.get("SLURM_NODEID") or 0)
        wanted = env.get("SLURM_NTASKS_PER_NODE", "")
        # The last port of those that the workers of this step would have without tfdist.
        port = slurm.port_base(env, _WHERE) + slurm.SLOT_SIZE - 1
        per_node = int(wanted) if wanted.isdecimal() else None
        return cls(len(hosts), node, f"{hosts[0]}:{port}", per_node)


def srun_command(nodes: int, words: Sequence[str]) -> list[str]:
    """The srun that starts a tfdist with these words on each node.

    Each gets all of what the job has on its node. They end together by themselves, so a bad exit of
    one is no reason for srun to end the others.
    """
    of_srun = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    of_srun += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]
    program = [sys.executable or "python", "-m", "tfdist_ext.cli"]
    return ["srun", *of_srun, *program, *words]
