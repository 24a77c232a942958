"""`tfd.run`: one script for all tasks of a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import PeerError, StrategyError
from tfdist_ext.launch.exit_codes import RESTART
from tfdist_ext.strategies.constructors import parameter_server
from tfdist_ext.strategies.resolvers import describe
from tfdist_ext.strategies.serving import RoleEnded, serves
from tfdist_ext.user_frames import filter_traceback

__all__ = ["run"]

Result = TypeVar("Result")


@filter_traceback
def run(main: Callable[[], Result]) -> Result | None:
    """Run the role of this process in the cluster that the environment describes.

    - Where training is driven (a process alone, each worker of a multi-worker cluster, the chief
      of a cluster with parameter servers): call `main()` and return its result.
    - In a `ps` or `worker` task of a cluster with parameter servers: serve, and return None when
      the coordinator is done. `main` is not called.
    - In an `evaluator` task: call `main()`, where `fit(checkpoint_dir=...)` evaluates each new
      checkpoint in place of training, and return None when the training is done.

    The servers stay until the coordinator's process ends, so code after `run` may still use the
    variables on the servers.

    Args:
        main: a function without arguments.

    Raises:
        SystemExit: with 138 ("start me again"), after the traceback: another task did not come, is
            gone or does not answer. In a `ps`, `worker` or `evaluator` task: the coordinator has
            failed, or is gone without a message.
        ClusterConfigError: the environment describes a cluster that cannot be right.
        StrategyError: a server cannot listen at its address.
        Exception: what `main` itself raises.
    """
    cluster = ClusterConfig.from_env(os.environ)
    try:
        described = describe(cluster)
        if described is not None and serves(described):
            parameter_server(cluster=cluster)  # which serves, and ends in RoleEnded
        return main()
    except RoleEnded as end:
        if end.code:
            raise
        return None
    except SystemExit as end:
        if end.code not in (None, 0):
            sys.last_value = end  # read at the exit; Python keeps other exceptions there
        raise
    except Exception as error:
        if cluster is None or not _because_of_another_task(error):
            raise
        # As Python ends on an exception, with another status: a scheduler sees only the status.
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(RESTART) from None


def _because_of_another_task(error: Exception) -> bool:
    """Whether a restart may help: another task did not come, is gone, or does not answer."""
    if isinstance(error, PeerError):
        return not error.permanent
    if isinstance(error, StrategyError):
        return bool(error.missing)
    return isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
