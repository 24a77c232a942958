"""One script for all tasks of a cluster: what each of them does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import PeerError, StrategyError
from tfdist_ext.launch.exit_codes import RESTART
from tfdist_ext.strategies.cluster_constructors import parameter_server
from tfdist_ext.strategies.resolvers import describe
from tfdist_ext.strategies.serving import RoleEnded, serves
from tfdist_ext.user_frames import filter_traceback

__all__ = ["run"]

Result = TypeVar("Result")


@filter_traceback
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
        SystemExit: with 138 ("start me again"), after the traceback: this task failed because of
            another one, which did not come, is gone or does not answer. The same in a `ps`,
            `worker` or `evaluator` task: the coordinator has failed, or is gone without a
            message. And what `main` itself raises.
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
            sys.last_value = end  # Python keeps other exceptions there; read at the exit
        raise
    except Exception as error:
        if cluster is None or not _because_of_another_task(error):
            raise
        _end_with(RESTART, error)


def _because_of_another_task(error: Exception) -> bool:
    """Whether another start may do better: a task did not come, is gone, or does not answer."""
    match error:
        case PeerError():
            return not error.permanent
        case StrategyError():
            return bool(error.missing)
    return isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)


def _end_with(status: int, error: BaseException) -> NoReturn:
    """What Python does where nobody catches an exception, with another exit status than 1.

    Without a launcher that knows who failed first, a scheduler has nothing but exit statuses.
    """
    sys.last_value = error  # read by what runs at the exit
    sys.excepthook(type(error), error, error.__traceback__)
    raise SystemExit(status) from None
