"""The tasks of a cluster: how they find each other and serve, and `tfd.run`."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.cluster.jobs import ClusterDescription, identity
from tfdist_ext.cluster.liveness.preflight import PreflightError, info_of, preflight, tasks_of
from tfdist_ext.cluster.liveness.watching import DONE, result_of_coordinator
from tfdist_ext.cluster.liveness.wire import Endpoint, port_is_free
from tfdist_ext.errors import PeerError, StrategyError
from tfdist_ext.launch.exit_codes import RESTART
from tfdist_ext.strategies.resolvers import Cluster, describe, describe_for, resolver_of
from tfdist_ext.user_frames import filter_traceback

__all__ = [
    "RoleEnded",
    "connecting",
    "run",
    "run_preflight",
    "serve",
    "start_failures_in_words",
    "usable_cores",
]

WAIT = 300.0  # seconds for the other tasks to come
_CONNECT = 120.0  # seconds for TensorFlow to connect to tasks that have all answered
_SESSION = 5.0  # seconds for the coordinator to open its session

Result = TypeVar("Result")


class RoleEnded(SystemExit):
    """The end of a task that does not drive the training: status 0, or 138 after a crash."""


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
        if described is not None and described.serves:
            serve(cluster)  # ends in RoleEnded
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


def serve(cluster: Cluster, wait: float | None = None) -> NoReturn:
    """Serve as this task of a cluster with parameter servers until the coordinator has ended.

    Signals end it at once.

    Args:
        wait: seconds to wait for the other tasks; None: 300.

    Raises:
        RoleEnded: always: with 0 when the coordinator has ended well, else with 138.
        StrategyError: this task cannot listen at its address, or another task does not come in
            time.
    """
    described = describe_for("parameter_server", cluster, "--chief --workers N --ps M")
    task = described.task
    assert task is not None
    resolver = resolver_of(cluster)
    endpoint = run_preflight(described, wait)
    if endpoint is not None:
        endpoint.free_port(session_within=_SESSION)
    try:
        with start_failures_in_words(described):
            # Not join(): it never returns, and it keeps Python from handling signals.
            server = tf.distribute.Server(
                resolver.cluster_spec(),
                job_name=task.type,
                task_index=task.index,
                protocol=resolver.rpc_layer or "grpc",
                config=_server_config(),
            )
        assert endpoint is not None  # else the port was in use, and the server has failed
        result = result_of_coordinator(described, endpoint)
        del server  # it serves as long as there is a reference
    finally:
        if endpoint is not None:
            endpoint.close()
    # Not a failure of this task: whoever starts tasks starts it again where the coordinator is.
    raise RoleEnded(0 if result == DONE else RESTART)


def _server_config() -> tf.compat.v1.ConfigProto | None:
    """At least two threads between operations; None if the default has two or more.

    TensorFlow's server answers its calls in as many threads as this process has cores. A step waits
    in one of them for tensors that another call asks for, so with one thread it waits forever.
    """
    if usable_cores() > 1 or "TF_NUM_INTEROP_THREADS" in os.environ:
        return None
    return tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_preflight(
    described: ClusterDescription, wait: float | None, *, first: bool = False
) -> Endpoint | None:
    """Return when all tasks of the cluster are there, and agree on it.

    Late tasks are named on stderr. A task that is not in the cluster does not wait. A task whose
    port is in use does not wait either: TensorFlow listens there already, or reports the port.

    Args:
        wait: seconds; None: 300.
        first: the strategy must be made before TensorFlow starts.

    Returns:
        What still listens at the address of this task; None where there was no preflight.

    Raises:
        StrategyError: TensorFlow has started, or a task is missing or differs. The error names the
            task, and is the same on every task.
    """
    wait = WAIT if wait is None else wait
    me, source = str(described.task), described.source
    tasks = tasks_of(described.jobs)
    if me not in tasks or not port_is_free(identity(tasks[me])[1]):
        return None
    if first and _has_started():
        raise StrategyError(
            "multi_worker_mirrored must be made before TensorFlow starts, got TensorFlow started"
            " already: an operation, a tensor, a model, a dataset or a list of devices came first."
            " Move create_strategy() to the top of the program, above the first of them."
        )
    gpus = len(tf.config.list_physical_devices("GPU"))
    try:
        return preflight(info_of(me, described.jobs, gpus), wait=wait, source=source)
    except PreflightError as error:
        if not error.missing:
            raise StrategyError(
                f"all tasks of {source} must be started alike, each at its own address, got:"
                f" {error}. Correct that task, and start the job again."
            ) from error
        failure = StrategyError(
            f"all tasks of {source} must be there within {wait:g} s (wait), got {error}. Start"
            " them, correct their addresses on every task, or allow more seconds."
        )
        failure.missing = error.missing
        raise failure from error


def _has_started() -> bool:
    """Whether TensorFlow has started. No public function tells; its settings are fixed then."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Scope in which TensorFlow connects to tasks that have all answered.

    TensorFlow holds Python's lock meanwhile and ignores SIGTERM. If a task ends at this moment, a
    timer that needs no Python shows the stacks of this process and ends it.
    """
    faulthandler.dump_traceback_later(_CONNECT, exit=True, file=2)  # stderr may be no file
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def start_failures_in_words(described: ClusterDescription) -> Iterator[None]:
    """Scope that raises StrategyError if TensorFlow cannot listen at the address of this task."""
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Could not start gRPC server" not in str(error) or described.task is None:
            raise
        address = described.addresses[str(described.task)]
        raise StrategyError(
            f"{described.task} cannot listen at {address}, the address from {described.source}: the"
            " port is in use. Stop the process that uses it (this program, started before?), or"
            " give this task another port on every task."
        ) from error
