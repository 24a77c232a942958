"""Clusters in both forms: this package's ClusterConfig and TensorFlow's own resolvers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.cluster.jobs import ClusterDescription, Jobs
from tfdist_ext.errors import StrategyError

__all__ = ["Cluster", "call_with_timeout", "describe", "describe_for", "resolver_of"]

Result = TypeVar("Result")

# What describes a cluster; None: no cluster.
Cluster: TypeAlias = "ClusterConfig | tf.distribute.cluster_resolver.ClusterResolver | None"

LOOKUP_SECONDS = 60.0  # a resolver may ask scontrol, Kubernetes or a cloud


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


def describe(cluster: Cluster) -> ClusterDescription | None:
    """Describe a cluster, checked as a TF_CONFIG is; None without one, and for a TPU.

    Raises:
        StrategyError: it is no cluster, or the resolver failed or did not answer in a minute.
        ClusterConfigError: it describes a cluster that cannot be right.
    """
    if cluster is None or isinstance(cluster, tf.distribute.cluster_resolver.TPUClusterResolver):
        return None  # a TPU's resolver asks the cloud each time
    if isinstance(cluster, ClusterConfig):
        return ClusterDescription(cluster.jobs, cluster.task, cluster.source)
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
        return ClusterDescription(Jobs(jobs, source) if jobs else {}, None, source)
    return ClusterDescription(ClusterConfig(jobs, task, source=source).jobs, task, source)


def describe_for(strategy: str, cluster: Cluster, options: str) -> ClusterDescription:
    """The description of a cluster in which every task has an address.

    Args:
        strategy: its name, for messages.
        options: of `tfdist run`, for messages.

    Raises:
        StrategyError: there is no cluster, or a task without an address.
        ClusterConfigError: as `describe`.
    """
    described = describe(cluster)
    if described is None or not described.jobs:
        source = "the call or the environment" if described is None else described.source
        raise StrategyError(
            f"{strategy} must have a cluster, got none from {source}: set TF_CONFIG, start the"
            f" script with `tfdist run {options}`, or pass cluster=."
        )
    if holes := [task for task, address in described.addresses.items() if not address]:
        raise StrategyError(
            f"the cluster of {strategy} must have an address for every task, got none for"
            f" {', '.join(holes)} from {described.source}. Number the tasks from 0."
        )
    return described


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
