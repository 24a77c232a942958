"""One script for all tasks of a cluster: what each of them does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.strategies.cluster_constructors import parameter_server
from tfdist_ext.strategies.resolvers import describe
from tfdist_ext.strategies.serving import RoleEnded, ends_as_failure, serves

__all__ = ["run"]

Result = TypeVar("Result")


def run(main: Callable[[], Result]) -> Result | None:
    """Do what this process is there for in the cluster that the environment describes.

    - Where training is driven (a process alone, each worker of a multi-worker cluster, the chief
      of a cluster with parameter servers): call `main()` and return its result.
    - In a `ps` or `worker` task of a cluster with parameter servers: serve, and return None when
      the coordinator is done. `main` is not called.
    - In an `evaluator` task: call `main()`, where `fit(checkpoint_dir=...)` evaluates each new
      checkpoint in place of training, and return None when the training is done.

    The servers stay until the coordinator's process ends, so what comes after `run` may still use
    the variables they hold.

    Args:
        main: a function without arguments.

    Raises:
        SystemExit: with 1, in a `ps`, `worker` or `evaluator` task: the coordinator has failed,
            or is gone without a message. And what `main` itself raises.
        ClusterConfigError: the environment describes a cluster that cannot be right.
        StrategyError: a server cannot listen at its address.
    """
    cluster = ClusterConfig.from_env(os.environ)
    try:
        if cluster is not None and serves(describe(cluster)):
            parameter_server(cluster=cluster)  # which serves, and ends in RoleEnded
        return main()
    except RoleEnded as end:
        if end.code:
            raise
        return None
    except SystemExit as end:
        if end.code not in (None, 0):
            ends_as_failure()
        raise
