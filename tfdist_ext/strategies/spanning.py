"""A strategy of one machine in a cluster: each task would train a model of its own, silently."""

from __future__ import annotations

import os

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import ClusterConfigError, StrategyError
from tfdist_ext.strategies.explanation import devices_listed

__all__ = ["check_spans_cluster"]


def check_spans_cluster(strategy: tf.distribute.Strategy, name: str) -> None:
    """Check that the strategy spans the cluster; not for tasks that train by themselves.

    Args:
        name: of the strategy, for the message.

    Raises:
        StrategyError: the environment describes a cluster in which several tasks train, and the
            strategy has no replica on the others.
    """
    try:
        cluster = ClusterConfig.from_env(os.environ)
    except ClusterConfigError:
        return  # what it is cannot be told
    if cluster is None or cluster.task.type == "evaluator" or _spans_tasks(strategy):
        return
    training = [str(task) for task in cluster.tasks() if task.type != "evaluator"]
    if len(training) < 2:
        return
    for_cluster = "parameter_server" if "ps" in cluster.jobs else "multi_worker_mirrored"
    raise StrategyError(
        f"in a cluster the strategy must span its tasks, got {name!r}, which has replicas on this"
        f" machine alone: {cluster.source} lists {len(training)} tasks"
        f" ({', '.join(training[:5])}{', ...' if len(training) > 5 else ''}), and each would train"
        f" a model of its own. Use create_strategy() or create_strategy({for_cluster!r}). If each"
        " task is to train by itself, say so with create_strategy(..., alone=True), or"
        " distribute(..., alone=True) for a strategy made elsewhere."
    )


def _spans_tasks(strategy: tf.distribute.Strategy) -> bool:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy):
        return True
    here = len(devices_listed(strategy, "worker_devices")) or 1  # the default strategy lists none
    return strategy.num_replicas_in_sync > here
