"""Clusters in both forms: this package's ClusterConfig and TensorFlow's own resolvers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.cluster.jobs import Jobs
from tfdist_ext.errors import StrategyError
from tfdist_ext.messages import counted

__all__ = [
    "Cluster",
    "Described",
    "call_with_timeout",
    "describe",
    "resolver_of",
]

Result = TypeVar("Result")

# What describes a cluster; None: no cluster.
Cluster: TypeAlias = "ClusterConfig | tf.distribute.cluster_resolver.ClusterResolver | None"

LOOKUP_SECONDS = 60.0  # a resolver may ask scontrol, Kubernetes or a cloud


@dataclass(frozen=True)
class Described:
    """A cluster's description, read once.

    Attributes:
        jobs: job -> addresses in index order, "" where none is listed; empty: no cluster.
        task: which of them this process is; None where the resolver does not say.
        source: where it came from, for messages.
    """

    jobs: Mapping[str, tuple[str, ...]]
    task: Task | None
    source: str

    @property
    def address(self) -> str:
        """The address of this task, which is known."""
        assert self.task is not None
        return self.jobs[self.task.type][self.task.index]

    @property
    def addresses(self) -> dict[str, str]:
        """Every task below the highest index of its job: 'worker:1' -> 'host:port', or ""."""
        return {
            f"{job}:{index}": address
            for job, addresses in self.jobs.items()
            for index, address in enumerate(addresses)
        }

    @property
    def is_evaluator(self) -> bool:
        """Whether this task evaluates, and takes no part in the training."""
        return self.task is not None and self.task.type == "evaluator"

    def __str__(self) -> str:
        return ", ".join(counted(sum(map(bool, tasks)), job) for job, tasks in self.jobs.items())


def resolver_of(cluster: Cluster) -> tf.distribute.cluster_resolver.ClusterResolver:
    """TensorFlow's form of a cluster; its own resolvers stay as they are."""
    resolvers = tf.distribute.cluster_resolver
    if isinstance(cluster, resolvers.ClusterResolver):
        return cluster
    if not isinstance(cluster, ClusterConfig):
        raise StrategyError(
            f"cluster must be a ClusterConfig or a TensorFlow ClusterResolver, got {cluster!r}. For"
            " the text of a TF_CONFIG: ClusterConfig.from_tf_config(text)."
        )
    jobs = {
        job: {index: address for index, address in enumerate(addresses) if address}
        for job, addresses in cluster.jobs.items()
    }
    return resolvers.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=cluster.task.type,
        task_id=cluster.task.index,
        environment=cluster.environment or "",
        rpc_layer=cluster.rpc_layer or "grpc",
    )


def describe(cluster: Cluster) -> Described | None:
    """Describe a cluster, checked as a TF_CONFIG is; None without one, and for a TPU.

    Raises:
        StrategyError: it is no cluster, or the resolver failed or did not answer in a minute.
        ClusterConfigError: it describes a cluster that cannot be right.
    """
    if cluster is None or isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver):
        return None  # a TPU's resolver asks the cloud each time
    if isinstance(cluster, ClusterConfig):
        return Described(cluster.jobs, cluster.task, cluster.source)
    resolver, source = resolver_of(cluster), type(cluster).__name__

    def look_up() -> tuple[tf.train.ClusterSpec, str | None, int | None]:
        # SlurmClusterResolver knows its task only after the cluster.
        return resolver.cluster_spec(), resolver.task_type, resolver.task_id

    try:
        spec, task_type, task_id = call_with_timeout(LOOKUP_SECONDS, look_up)
    except Exception as error:  # what it raises depends on the resolver and on its clients
        raise StrategyError(
            f"{source} must describe the cluster, got {type(error).__name__}: {error}"
        ) from error
    jobs = {job: _addresses(tasks) for job, tasks in (spec.as_dict() if spec else {}).items()}
    task = Task(task_type, task_id or 0) if jobs and task_type else None
    if task is None:
        return Described(Jobs(jobs, source) if jobs else {}, None, source)
    return Described(ClusterConfig(jobs, task, source=source).jobs, task, source)


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """Return or raise what `call` does, within a time limit.

    It runs in a daemon thread, which is left behind after a timeout.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tfdist-bounded", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


def _addresses(tasks: Any) -> tuple[str, ...]:
    """A ClusterSpec gives a list, or index -> address where indices are missing."""
    if not isinstance(tasks, Mapping):
        return tuple(tasks)
    return tuple(tasks.get(index, "") for index in range(max(tasks, default=-1) + 1))
