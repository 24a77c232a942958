"""ClusterConfig: a valid cluster, and which task of it this process is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tfdist_ext.cluster import tf_config
from tfdist_ext.cluster.environments import cloud, ranked
from tfdist_ext.cluster.jobs import ClusterDescription, Jobs, Task, check_task
from tfdist_ext.errors import ClusterConfigError
from tfdist_ext.messages import counted
from tfdist_ext.user_frames import filter_traceback

# The environments that can describe a cluster, in order of precedence. TF_CONFIG is first, because
# it is set explicitly. mpirun comes before Slurm, because mpirun inside a Slurm step gives the
# processes new ranks.
# A parser returns the cluster, or the reason why the environment describes none. It raises
# ClusterConfigError for an invalid description.
ENVIRONMENTS: dict[str, Callable[[Mapping[str, str]], ClusterDescription | str]] = {
    "TF_CONFIG": tf_config.parse_variable,
    "Open MPI": ranked.open_mpi,
    "Slurm": ranked.slurm,
    "SageMaker": cloud.sagemaker,
    "Kubernetes": cloud.kubernetes,
}


@filter_traceback
@dataclass(frozen=True)
class ClusterConfig:
    """The addresses of all tasks of a cluster, and the task of this process.

    Immutable and hashable. The cluster is validated when it is created.

    Attributes:
        jobs: maps each job to the addresses ("host:port") of its tasks, in index order. Read-only.
        task: the task of this process.
        source: a short description of where the cluster was found. Ignored in comparisons.

    Raises:
        ClusterConfigError: the cluster has no jobs, an unknown or empty job, two chiefs, parameter
            servers without workers, an invalid or duplicate address, or does not contain `task`.
    """

    jobs: dict[str, tuple[str, ...]]
    task: Task
    source: str = field(default="ClusterConfig", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        # Jobs are checked when they are made: for_task on 10,000 tasks checks them once.
        jobs = self.jobs if isinstance(self.jobs, Jobs) else Jobs(self.jobs, self.source)
        object.__setattr__(self, "jobs", jobs)
        check_task(self.task, jobs, self.source)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ClusterConfig | None:
        """Returns the cluster that the environment variables describe.

        TF_CONFIG takes precedence over the variables of a launcher such as Slurm.

        Args:
            env: environment variables. By default, the variables of this process.

        Returns:
            The cluster, or None if the environment does not describe a cluster.

        Raises:
            ClusterConfigError: the environment describes an invalid cluster.
        """
        for parse in ENVIRONMENTS.values():
            described = parse(os.environ if env is None else env)
            if not isinstance(described, str):
                return cls(**described._asdict())
        return None

    @classmethod
    def from_tf_config(cls, text: str, *, source: str = "TF_CONFIG") -> ClusterConfig:
        """Returns the cluster that a value of TF_CONFIG describes.

        Raises:
            ClusterConfigError: the text is not valid JSON, or describes an invalid cluster.
        """
        return cls(**tf_config.parse(text, source)._asdict())

    def to_tf_config(self) -> str:
        """Returns the cluster as a value of TF_CONFIG, which `from_tf_config` reads."""
        return tf_config.dump(self.jobs, self.task)

    def for_task(self, type: str, index: int) -> ClusterConfig:
        """Returns the configuration of another task of the same cluster.

        Raises:
            ClusterConfigError: the task is not in the cluster.
        """
        return replace(self, task=Task(type, index))

    @property
    def is_chief(self) -> bool:
        """Whether this task is the chief, or worker 0 of a cluster without a chief."""
        return self.task == Task("chief" if "chief" in self.jobs else "worker", 0)

    @property
    def num_tasks(self) -> int:
        """The number of tasks, including parameter servers and evaluators."""
        return sum(map(len, self.jobs.values()))

    @property
    def address(self) -> str:
        """The address of this task; "" for an evaluator outside of the cluster."""
        return self.jobs[self.task.type][self.task.index] if self.task.type in self.jobs else ""

    def tasks(self) -> Iterator[Task]:
        """Yields the tasks of the cluster, ordered by job and index."""
        for name, addresses in self.jobs.items():
            for index in range(len(addresses)):
                yield Task(name, index)


def describe_environments(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Describe each environment, in order of precedence. Never raises.

    Returns:
        Pairs of an environment's name and what was found there, or why it was passed over, for
        example ("Slurm", "SLURM_PROCID is not set").
    """
    lines: list[tuple[str, str]] = []
    for name, parse in ENVIRONMENTS.items():
        try:
            text = parse(env)
            if not isinstance(text, str):
                cluster = ClusterConfig(**text._asdict())
                tasks = counted(cluster.num_tasks, "task")
                text = f"{cluster.task} of {tasks}, from {cluster.source}"
        except ClusterConfigError as error:
            text = f"cannot be used: {error}"
        lines.append((name, text))
    return lines
